"""Curvature along the update, from successive gradients: what can be known of the sharpness without ``loss_fn``."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from dynguard import Signal
from dynguard_plugins.stability.eos_thresholds import UnknownThresholdError, edge

if TYPE_CHECKING:
    from dynguard.events import GradientEvent

SAMPLE = 65_536  # coordinates of a model
KEPT = 500


class Along:
    """At two steps in a row, every ``every``: s is what the weights moved in between, y what the gradient changed.

    s.y / s.S^-1 s, with S as in :mod:`eos_thresholds`, is a Rayleigh quotient of the matrix whose largest eigenvalue
    is stable up to 1: a lower bound of it, as far as the two gradients are of the same data. The sums are made on the
    device and read with the bus's one read.
    """

    def __init__(self, every: int) -> None:
        self.every = max(every, 2)
        self.ratios: list[tuple[int, float]] = []
        self._before: tuple[list[int], list[Any], list[Any], list[Any]] | None = None

    def see(self, event: GradientEvent) -> Signal | None:
        """Keep the sample at one step, compare it at the next."""
        if event.step % self.every == 0:
            self._before = self._sample(event)
            return None
        before, self._before = self._before, None
        if event.step % self.every != 1 or before is None or event.rejected is True:
            return None
        indices, weights, gradients, shares = before
        import torch

        top: Any = 0.0
        bottom: Any = 0.0
        for k, i in enumerate(indices):
            gradient = event.gradients[i]
            if gradient is None or gradient.layout is not torch.strided:
                return None
            s = _part(event.parameters[i], len(weights[k])) - weights[k]
            y = _part(gradient, len(weights[k])) - gradients[k]
            top = top + torch.dot(s, y).to(event.norms.device)
            bottom = bottom + (s.square() / shares[k]).sum().to(event.norms.device)
        step = event.step
        return Signal(top / bottom, False, list, learn=lambda values: self._learn(step, values))

    def _learn(self, step: int, values: list[float]) -> None:
        if values and math.isfinite(values[0]):
            self.ratios.append((step, values[0]))
            del self.ratios[:-KEPT]

    def _sample(self, event: GradientEvent) -> tuple[list[int], list[Any], list[Any], list[Any]] | None:
        import torch

        assert event.training is not None
        try:
            limits = edge(event.training, event.parameters)
        except UnknownThresholdError:
            return None
        total = sum(p.numel() for p in event.parameters)
        found: tuple[list[int], list[Any], list[Any], list[Any]] = ([], [], [], [])
        for i, (p, g) in enumerate(zip(event.parameters, event.gradients, strict=True)):
            if g is None or limits.scales[i] is None or g.layout is not torch.strided or g.is_complex():
                continue
            count = max(1, p.numel() * SAMPLE // max(total, SAMPLE)) if p.numel() else 0
            if count:
                share = limits.scales[i]
                for values, value in zip(
                    found, (i, _part(p, count), _part(g, count), _part(share, count)), strict=True
                ):
                    values.append(value)
        return found if found[0] else None

    def rows(self) -> list[tuple[int, float]]:
        """(step, ratio) of the last 20, rounded."""
        return [(step, float(f"{ratio:.4g}")) for step, ratio in self.ratios[-20:]]


def _part(tensor: Any, count: int) -> Any:
    """``count`` entries at even distances, a float32 copy; a number stays one."""
    if not hasattr(tensor, "detach"):
        return tensor
    flat = tensor.detach().reshape(-1)
    stride = max(1, flat.numel() // count)
    return flat[::stride][:count].float().clone()
