"""A sample of every tower's weights, before and after one update, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dynguard.torch.embeddings import some_of
from dynguard_plugins.stability.flow_sample import Layout

if TYPE_CHECKING:
    from dynguard.events import EmbeddingEvent, GradientEvent

ROWS = 256


class Taken:
    """Strided samples of all parameters, and rows of the tables that the step looked up.

    Args:
        event: whose parameters are sampled from now on.
        groups: indices of the parameters by tower.
    """

    def __init__(self, event: GradientEvent, groups: Sequence[Sequence[int]]) -> None:
        self.layout = Layout(event.parameters)
        self.groups = groups
        self._shapes = [tuple(p.shape) for p in event.parameters]
        device = self.layout.device
        self._weights = torch.tensor([len(shape) > 1 for shape in self._shapes], device=device)
        self._members = torch.zeros((len(groups), len(self._shapes)), dtype=torch.bool)
        for g, indices in enumerate(groups):
            self._members[g, list(indices)] = True
        self._members = self._members.to(device)
        sizes = torch.ones(self.layout.count)
        for s in self.layout.sections:
            sizes[s.index] = s.numel / (s.stop - s.start)
        self._scale = sizes.to(device)
        self._start, _ = self.layout.gather(event.parameters)
        self._before: Tensor | None = None
        self._norms: Tensor | None = None
        self._rows: dict[int, tuple[Tensor, Tensor]] = {}
        self._step = -1
        self._rates: list[Any] = []

    def fits(self, event: GradientEvent) -> bool:
        """Whether these are the parameters that were sampled."""
        return len(event.parameters) == len(self._shapes)

    def before(self, event: GradientEvent) -> None:
        """Sample the weights as they are before the update."""
        self._before, _ = self.layout.gather(event.parameters)
        self._norms = event.norms.detach().to(self.layout.device, torch.float32)
        self._rows, self._step = {}, event.step
        rates = event.learning_rates
        self._rates = [
            0.0 if not p.requires_grad else rates[i] if i < len(rates) else 1.0 for i, p in enumerate(event.parameters)
        ]

    def rows(self, event: EmbeddingEvent) -> None:
        """Sample the rows that this step looked up."""
        if event.step != self._step or not isinstance(event.weight, Tensor) or event.weight.ndim != 2:
            return
        rows = some_of(event.rows, event.counts, ROWS)
        self._rows[event.index] = rows, event.weight.index_select(0, rows).float()

    def after(self, event: GradientEvent) -> Tensor | None:
        """(3, towers) velocity, gradient norm and drift; None or NaN where that update was rejected."""
        before, norms = self._before, self._norms
        self._before = None
        if before is None or norms is None or event.step != self._step + 1 or event.rejected is True:
            return None
        now, _ = self.layout.gather(event.parameters)
        length = self.layout.sums(before.square())
        velocity = (self.layout.sums((now - before).square_()) / length).sqrt_()
        for index, (rows, old) in self._rows.items():
            way = event.parameters[index].detach().index_select(0, rows).float() - old
            ratio = torch.linalg.vector_norm(way) / torch.linalg.vector_norm(old)
            velocity[index] = ratio.to(velocity.device)
        self._rows = {}
        usable = self._weights & (length > 0)
        fast = torch.where(self._members & usable, velocity, -1.0).amax(1)
        fast = torch.where(fast < 0, torch.nan, fast)  # a tower of biases only, or whose sample is all zero
        gradient = torch.where(self._members, norms.square(), 0.0).sum(1).sqrt()
        way = self.layout.sums((now - self._start).square_()) * self._scale
        total = self.layout.sums(self._start.square()) * self._scale
        drift = (_by_tower(self._members, way) / _by_tower(self._members, total)).sqrt()
        found = torch.stack([fast, gradient, drift])
        if isinstance(event.rejected, Tensor):
            found = torch.where(event.rejected.to(found.device), torch.nan, found)
        return found

    def rests(self, tower: int) -> bool:
        """Whether a tower was frozen or its learning rates 0 at the newest sample. Reads rates that lie on a device."""
        return bool(self._rates) and all(float(self._rates[i]) == 0.0 for i in self.groups[tower])


def _by_tower(members: Tensor, values: Tensor) -> Tensor:
    return torch.where(members, values, 0.0).sum(1)
