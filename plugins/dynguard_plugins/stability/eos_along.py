"""Curvature along the update, from successive gradients: what can be known of the sharpness without ``loss_fn``."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from dynguard import Signal
from dynguard_plugins.stability.eos_thresholds import UnknownThresholdError, edge

if TYPE_CHECKING:
    from dynguard.events import GradientEvent

SAMPLE = 65_536  # coordinates of a model
KEPT = 500
WINDOW = 8  # checks that must agree
AT_EDGE, REARMED = 0.97, 0.8
# parameters by number, and of each: weights, gradients, scales, coupled decay
Sample: TypeAlias = tuple[list[int], list[Any], list[Any], list[Any], list[float]]


class Along:
    """At two steps in a row, every ``every``: s is what the weights moved in between, y what the gradient changed.

    (s.y + decay s.s) / s.S^-1 s, with S as in :mod:`eos_thresholds`, is a Rayleigh quotient of the matrix whose largest
    eigenvalue is stable up to 1: a lower bound of it, as far as the two gradients are of the same data. The sums are
    made on the device and read with the bus's one read. Where the batches differ by more than the weights' move
    accounts for, y is noise, and for plain gradient descent the quotient is 1 / 2 whatever the curvature is.
    """

    def __init__(self, every: int) -> None:
        self.every = max(every, 2)
        self.ratios: list[tuple[int, float]] = []
        self.told = False
        self.why = ""  # why nothing can be seen
        self._before: Sample | None = None

    def see(self, event: GradientEvent) -> Signal | None:
        """Keep the sample at one step, compare it at the next."""
        if event.step % self.every == 0:
            self._before = self._sample(event)
            return None
        before, self._before = self._before, None
        if event.step % self.every != 1 or before is None or event.rejected is True:
            return None
        indices, weights, gradients, shares, decays = before
        import torch

        top: Any = 0.0
        bottom: Any = 0.0
        for k, i in enumerate(indices):
            gradient = event.gradients[i]
            if gradient is None or gradient.layout is not torch.strided:
                return None
            shown = shares[k] if hasattr(shares[k], "shape") else torch.full_like(weights[k], shares[k])
            s = (_part(event.parameters[i], len(weights[k])) - weights[k]) * (shown > 0)  # some are left out
            y = _unscaled(_part(gradient, len(weights[k])), event) - gradients[k] + decays[k] * s
            top = top + torch.dot(s, y).to(event.norms.device)
            bottom = bottom + (s.square() / shown.clamp_min(1e-38)).sum().to(event.norms.device)
        step = event.step
        return Signal(top / bottom, False, list, learn=lambda values: self._learn(step, values))

    def _learn(self, step: int, values: list[float]) -> None:
        if values and math.isfinite(values[0]):
            self.ratios.append((step, values[0]))
            del self.ratios[:-KEPT]

    def edge(self) -> tuple[int, float, float] | None:
        """(checks, median ratio, half the range of the middle 80 %) where the last checks agree on the edge, once."""
        last = sorted(ratio for _, ratio in self.ratios[-WINDOW:])
        if len(last) < WINDOW:
            return None
        middle, spread = statistics.median(last), (last[-2] - last[1]) / 2
        if middle < REARMED:
            self.told = False
        if self.told or middle < AT_EDGE or spread > middle / 4:
            return None
        self.told = True
        return len(last), middle, spread

    def _sample(self, event: GradientEvent) -> Sample | None:
        import torch

        assert event.training is not None
        try:
            limits = edge(event.training, event.parameters)
        except UnknownThresholdError as error:
            self.why = str(error)
            return None
        total = sum(p.numel() for p in event.parameters)
        found: Sample = ([], [], [], [], [])
        for i, (p, g) in enumerate(zip(event.parameters, event.gradients, strict=True)):
            if g is None or limits.scales[i] is None or g.layout is not torch.strided or g.is_complex():
                continue
            count = max(1, p.numel() * SAMPLE // max(total, SAMPLE)) if p.numel() else 0
            if count:
                found[0].append(i)
                found[1].append(_part(p, count))
                found[2].append(_unscaled(_part(g, count), event))
                found[3].append(_part(limits.scales[i], count))
                found[4].append(limits.decay[i])
        return found if found[0] else None

    def rows(self) -> list[tuple[int, float]]:
        """(step, ratio) of the last 20, rounded."""
        return [(step, float(f"{ratio:.4g}")) for step, ratio in self.ratios[-20:]]

    def state_dict(self) -> dict[str, Any]:
        """What was seen and told; a sample that waits for the next step is not kept."""
        return {"ratios": [list(row) for row in self.ratios], "told": self.told}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up ``state_dict()``."""
        self.ratios = [(int(step), float(ratio)) for step, ratio in state["ratios"]]
        self.told = bool(state["told"])


def _unscaled(part: Any, event: GradientEvent) -> Any:
    return part if event.scale is None else part / event.scale.to(part.device)


def _part(tensor: Any, count: int) -> Any:
    """``count`` entries at even distances, a float32 copy; a number stays one."""
    if not hasattr(tensor, "detach"):
        return tensor
    flat = tensor.detach().reshape(-1)
    stride = max(1, flat.numel() // count)
    return flat[::stride][:count].float().clone()
