"""Ranks decide alike: one all-reduce of the flags per step, one more of the action when something fired anywhere."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dynguard.actions import Action, Verdict

log = logging.getLogger("dynguard")


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is a DTensor: a piece, or a copy, of a tensor that lives on several ranks."""
    return hasattr(tensor, "to_local") and hasattr(tensor, "device_mesh")


class Ranks:
    """The ranks that take each step together.

    Args:
        group: a process group, or None for the default one.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.rank = torch.distributed.get_rank(group)
        self.size = torch.distributed.get_world_size(group)

    def any(self, flags: Tensor) -> Tensor:
        """Element-wise maximum over the ranks, in place: what fired on one has fired on all. No host read."""
        torch.distributed.all_reduce(flags, op=torch.distributed.ReduceOp.MAX, group=self.group)
        return flags

    def agree(self, verdict: Verdict, device: torch.device) -> Verdict:
        """The farthest verdict of all ranks; a rank that saw nothing learns which rank asked. Reads the host.

        Every rank must call it, which they do, as they have read the same flags.
        """
        code = verdict.action.rank * self.size + (self.size - 1 - self.rank)
        worst = torch.tensor([code], dtype=torch.int64, device=device)
        torch.distributed.all_reduce(worst, op=torch.distributed.ReduceOp.MAX, group=self.group)
        top, from_rank = divmod(int(worst.item()), self.size)
        if top == verdict.action.rank:
            return verdict
        asked_by = self.size - 1 - from_rank
        return verdict.model_copy(
            update={"action": list(Action)[top], "reason": f"rank {asked_by} asked for it", "detector": "ranks"}
        )


def find_ranks(models: Sequence[nn.Module], wanted: bool | Any | None) -> Ranks | None:
    """The ranks that step together: given, or found because the model is wrapped in DDP or its parameters are sharded.

    Args:
        models: the models as the user gave them, still wrapped.
        wanted: None to find out, True for the default group, False for none, or a process group.
    """
    if wanted is False or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    if wanted is not None and wanted is not True:
        return Ranks(wanted)
    if torch.distributed.get_world_size() == 1:
        return None
    together = any(
        isinstance(m, nn.parallel.DistributedDataParallel) or any(is_sharded(p) for p in m.parameters()) for m in models
    )
    if together or wanted is True:
        return Ranks()
    log.warning(
        "torch.distributed runs %d ranks, but the model is neither wrapped in DistributedDataParallel nor sharded, so "
        "each rank decides for itself. Give FlowManager the wrapped model, or ranks=True if all ranks step together.",
        torch.distributed.get_world_size(),
    )
    return None


def sharded_norms(gradients: Sequence[Tensor]) -> Tensor:
    """L2 norms of whole tensors of which this rank holds shards, (n,), with one all-reduce per mesh dimension.

    The gradients must lie on one mesh with the same placements. Squares are summed in float64, so that a norm that
    float32 can hold does not overflow on the way.
    """
    first: Any = gradients[0]
    local = [g.to_local() for g in gradients]  # type: ignore[attr-defined]
    kind = torch.float64 if any(g.dtype == torch.float64 for g in local) else torch.float32
    norms = torch.stack(
        [torch.linalg.vector_norm(g, dtype=kind) if g.numel() else g.new_zeros((), dtype=kind) for g in local]
    )
    squares = norms.double().square()
    for dimension, placement in enumerate(first.placements):
        if placement.is_shard():
            torch.distributed.all_reduce(squares, group=first.device_mesh.get_group(dimension))
    return squares.sqrt().to(kind)


def layout(gradient: Tensor) -> Any:
    """What must be equal for gradients to be reduced together."""
    shard: Any = gradient
    return (shard.device_mesh, tuple(shard.placements))
