"""What ``adaclip`` knows: the usual largest entry of every gradient, kept on the device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynguard.events import GradientEvent

SLACK = 1e-5  # what rounding may do to a gradient that never changes


class Levels:
    """T and t of :class:`~dynguard_plugins.stability.spam_clip.ElementClip` as (n,) arrays.

    Args:
        gamma: decay of T.
    """

    def __init__(self, gamma: float) -> None:
        self.gamma = gamma
        self._names: tuple[str, ...] = ()
        self._now: Any = None  # (2, n): T and t
        self._last: Any = None  # the same before the last step, which may turn out dropped
        self._step = -1
        self._saved: dict[str, list[float]] = {}  # by name: T, t, and both before the last step

    def judge(self, event: GradientEvent, chosen: Sequence[int], gradients: Sequence[Any]) -> tuple[Any, Any]:
        """Learn from the largest entries, and say by what to multiply the entries above which limit.

        Args:
            event: of this step.
            chosen: which parameters the gradients belong to.
            gradients: strided; shards where they are sharded.

        Returns:
            Two tuples of n 0-d tensors: factor, and limit (infinite where nothing is above it), in the units of the
            gradients.
        """
        import torch

        tops = _tops(event, chosen, gradients)
        self._prepare(event, tops)
        fine = torch.isfinite(tops)
        level, count = self._now.unbind()
        level = torch.where(fine, self.gamma * level + (1.0 - self.gamma) * tops, level)
        count = count + fine
        self._last, self._now, self._step = self._now, torch.stack((level, count)), event.step
        usual = level / -torch.expm1(count.clamp_min(1.0) * math.log(self.gamma))
        over = fine & (tops > usual * (1.0 + SLACK))
        factors = torch.where(over, usual / tops, torch.ones_like(tops))
        limits = usual if event.scale is None else usual * event.scale.to(usual.device, non_blocking=True)
        return factors.unbind(), limits.masked_fill(~over, math.inf).unbind()

    def _prepare(self, event: GradientEvent, like: Any) -> None:
        """Forget a step that was dropped, and make room for parameters that have joined."""
        import torch

        now = self._now
        if now is not None and event.step == self._step + 1:
            dropped: Any = event.rejected
            if isinstance(dropped, torch.Tensor):
                now = torch.where(dropped.to(now.device, non_blocking=True), self._last, now)
            elif dropped:
                now = self._last
        have = 0 if now is None else now.shape[1]
        if have < len(event.names):
            rows = [self._saved.pop(name, [0.0] * 4) for name in event.names[have:]]
            fresh = torch.tensor(rows, dtype=like.dtype).T.to(like.device, non_blocking=True)
            now = fresh[:2] if now is None else torch.cat((now.to(like), fresh[:2]), 1)
            if have == 0 and event.step == self._step + 1 and event.rejected is True and self._step >= 0:
                now = fresh[2:]  # resumed right after a step that was dropped
        self._names, self._now = event.names, now.to(like)

    def state_dict(self) -> dict[str, Any]:
        """T and t by parameter, now and before the last step, and when that was; reads the device."""
        rows = {name: list(row) for name, row in self._saved.items()}
        if self._now is not None:
            both = [*self._now.tolist(), *self._last.tolist()]
            rows |= {name: list(row) for name, row in zip(self._names, zip(*both, strict=True), strict=True)}
        return {"rows": rows, "step": self._step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up ``state_dict()``; the numbers go to the gradients' device at the next step."""
        self._names, self._now, self._last = (), None, None
        self._saved = {name: list(row) for name, row in state["rows"].items()}
        self._step = state["step"]


def _tops(event: GradientEvent, chosen: Sequence[int], gradients: Sequence[Any]) -> Any:
    """(n,) largest absolute entry by parameter in the units of the loss; NaN where none is asked for."""
    import torch

    from dynguard.torch.distributed import is_sharded

    mine = [g.to_local() if is_sharded(g) else g for g in gradients]
    home = mine[0].device
    kind = torch.float64 if any(g.dtype == torch.float64 for g in mine) else torch.float32
    tops = [torch.full((), math.nan, dtype=kind, device=home)] * len(event.names)
    for (device, dtype), members in _alike(mine).items():
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        values = torch._foreach_norm([mine[k] for k in members], math.inf, dtype=wide)
        for k, value in zip(members, values, strict=True):
            tops[chosen[k]] = value.to(home, kind, non_blocking=device != home)
    _over_ranks(tops, [(i, g) for i, g in zip(chosen, gradients, strict=True) if is_sharded(g)])
    joined = torch.stack(tops)
    return joined if event.scale is None else joined / event.scale.to(home, non_blocking=True)


def _over_ranks(tops: list[Any], shards: Sequence[tuple[int, Any]]) -> None:
    """Put the largest entries of whole tensors in place of those of this rank's shards, which may be empty."""
    import torch

    from dynguard.torch.distributed import layout

    alike: dict[Any, list[int]] = {}
    for i, gradient in shards:
        alike.setdefault(layout(gradient), []).append(i)
        if not gradient.to_local().numel():
            tops[i] = torch.zeros_like(tops[i])
    for (mesh, placements), members in alike.items():
        values = torch.stack([tops[i] for i in members]).nan_to_num(nan=math.inf)  # a maximum may lose a NaN
        for dimension, placement in enumerate(placements):
            if placement.is_shard():
                group = mesh.get_group(dimension)
                torch.distributed.all_reduce(values, op=torch.distributed.ReduceOp.MAX, group=group)
        for i, value in zip(members, values.unbind(), strict=True):
            tops[i] = value


def _alike(tensors: Sequence[Any]) -> dict[Any, list[int]]:
    groups: dict[Any, list[int]] = {}
    for k, tensor in enumerate(tensors):
        if tensor.numel():
            groups.setdefault((tensor.device, tensor.dtype), []).append(k)
    return groups
