"""Did a parameter move? A copy of a sample of its entries, compared some steps later."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

ENTRIES = 65_536  # of each parameter that are kept
LAYERS = 64  # that are looked at in one go


def sample(parameter: Any, entries: int = ENTRIES) -> Any:
    """(m,) evenly spread entries of a dense tensor, m <= 2 * entries: a view where the memory is contiguous."""
    flat = _here(parameter).reshape(-1)
    return flat[:: max(flat.shape[0] // entries, 1)]


def _here(parameter: Any) -> Any:
    """The part of a parameter that this process holds, real and without its graph."""
    tensor = parameter.detach()
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if tensor.is_complex():
        import torch

        return torch.view_as_real(tensor.resolve_conj())
    return tensor


@dataclass(slots=True)
class Probe:
    """Copies of some parameters at one moment.

    Attributes:
        layers: indices of the parameters.
        begun: count of events at that moment.
        copies: (m,) sampled entries of each.
        witnesses: weak references to the gradients that they had.
        norms: norms of these gradients as last seen.
    """

    layers: list[int]
    begun: int
    copies: list[Any]
    witnesses: list[Any] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, layers: Sequence[int], parameters: Sequence[Any], begun: int) -> Probe:
        """Copy the parameters as they are; at most LAYERS of them."""
        chosen = list(layers)[:LAYERS]
        return cls(chosen, begun, [sample(parameters[i]).clone() for i in chosen])

    def watch(self, gradients: Sequence[Any]) -> None:
        """Remember which gradients they have."""
        self.witnesses = [weakref.ref(gradients[i]) for i in self.layers]

    def distances(self, parameters: Sequence[Any]) -> Any:
        """(3 k,) tensor: by parameter the length of its way since, its length then, and the product of the two.

        The product is that of the vectors: minus both lengths says that it shrank towards zero, as by weight decay.
        """
        import torch

        rows: list[Any] = []
        for layer, old in zip(self.layers, self.copies, strict=True):
            then = old.float()
            way = sample(parameters[layer]).float() - then
            rows += [torch.linalg.vector_norm(way), torch.linalg.vector_norm(then), torch.dot(way, then)]
        return torch.stack([row.to(rows[0].device, non_blocking=True) for row in rows])


def can_probe(parameter: Any) -> bool:
    """Whether it is a dense floating-point or complex tensor with numbers in it."""
    kind = getattr(parameter, "layout", None)
    return str(kind) == "torch.strided" and (parameter.is_floating_point() or parameter.is_complex())
