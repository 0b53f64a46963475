"""``clip_saturated``: a gradient norm that is the same number at every step, because a clip makes it so."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dynguard import Evidence, Finding, Prescription, Severity
from dynguard_plugins.stability.health_live import Live, around
from dynguard_plugins.stability.health_rates import group_rates

if TYPE_CHECKING:
    from dynguard.events import GradientEvent

# torch's clip multiplies by max_norm / (norm + 1e-6): the result varies by at most 1e-6 / max_norm, and by rounding.
EXACT = 5e-5
ROUNDED = 4e-3  # fp16 and bf16 gradients
CLIP_EPSILON = 1e-6
LOOSEST = 1e-3
LONG = 50  # steps in a row after which a clip that always acts is worth a word
LEAST_SCALE, MOST_SCALE = 8, 24  # exponents of the loss scales that are looked for
USUAL_SCALE = 16
MAX_NORMS = (0.1, 100.0)
TINY_NORM = 1e-3
TINY_UPDATE = 1e-6  # of the weights' norm


@dataclass(slots=True)
class Saturation:
    """What explains a constant norm: the severity, the words, and the loss scale with which it makes a round number."""

    severity: Severity
    premise: str
    implies: str
    scale: float | None = None
    max_norm: float | None = None
    update: float | None = None


class Clip:
    """Counts the steps in a row whose global norm is the same number.

    A gradient that merely stands still is told apart by its layers: a clip fixes their total, not their shares.

    Args:
        steps: so many in a row before a clip of scaled gradients, or one that stalls the run, is told.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.row = 0
        self.level = math.nan
        self.tolerance = EXACT
        self.told: set[str] = set()
        self.narrow = False
        self.due = False
        self._first: Any = None
        self._latest: Any = None

    def see(self, norms: Any) -> None:
        """Take in the (n,) norms of a step on the host."""
        wide = norms.astype(np.float64)
        total = math.sqrt(float(wide.dot(wide)))
        if abs(total - self.level) <= self.tolerance * self.level:
            self.row += 1
            if self.row == self.steps or self.row == LONG:
                self.due = True
                self._latest = norms
            return
        self.row, self.level, self._first = 1, total if total > 0 else math.nan, norms
        self.tolerance = ROUNDED if self.narrow else EXACT + min(CLIP_EPSILON / max(total, 1e-9), LOOSEST)

    def judge(self, event: GradientEvent) -> list[Finding]:
        """The finding of a row that is long enough; rare, so objects are searched and the device may be read."""
        self.due = False
        if not self._is_a_clip():
            return []
        why = self._saturation(event)
        if why is None or why.severity.value in self.told:
            return []
        self.told |= {why.severity.value, Severity.INFO.value}
        return [self._finding(event, why)]

    def _is_a_clip(self) -> bool:
        if self._first is None or len(self._first) != len(self._latest):
            return False
        if np.count_nonzero(self._latest) < 2:  # one layer has no shares to vary; a clip's bound is a round number
            return is_round(self.level) or before_unscale(self.level) is not None
        moved = float(np.abs(self._latest - self._first).max())
        return moved > 20 * min(self.tolerance, LOOSEST) * self.level

    def _saturation(self, event: GradientEvent) -> Saturation | None:
        live = _around(event)
        scale = _loss_scale(live)
        scaled = _with_scale(self.level, scale) if scale else before_unscale(self.level)
        if scaled is not None:
            return _clipped_before_unscale(self.level, *scaled, self.row)
        update = _relative_update(event, live, self.level) if self.level < TINY_NORM else None
        if update is not None and update < TINY_UPDATE:
            return _stalled(self.level, update, self.row)
        return _always(self.level, self.row) if self.row >= LONG else None

    def _finding(self, event: GradientEvent, why: Saturation) -> Finding:
        evidence: dict[str, float | None] = {
            "global_norm": self.level, "steps_in_a_row": self.row, "loss_scale": why.scale, "max_norm": why.max_norm,
            "norm_times_scale": why.scale and self.level * why.scale, "coefficient": why.scale and 1.0 / why.scale,
            "relative_update": why.update,
        }  # fmt: skip
        return Finding(
            kind="clip_saturated",
            severity=why.severity,
            step=event.step,
            premise=why.premise,
            implies=why.implies,
            expected_effect="the updates get the size that gradient and learning rate say",
            evidence=tuple(Evidence(name=name, value=value) for name, value in evidence.items() if value is not None),
            prescriptions=(_prescription(self.level, why),),
        )

    def state_dict(self) -> dict[str, Any]:
        """The row and what was told; the norms at its start are kept for their shares."""
        return {"row": self.row, "level": self.level, "tolerance": self.tolerance, "told": sorted(self.told),
                "narrow": self.narrow, "due": self.due, "first": self._first, "latest": self._latest}  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up ``state_dict()``."""
        self.row, self.level, self.tolerance = state["row"], state["level"], state["tolerance"]
        self.told, self.narrow, self.due = set(state["told"]), state["narrow"], state["due"]
        self._first, self._latest = state["first"], state["latest"]


def is_round(value: float) -> bool:
    """Whether people write such a number: up to two digits, or a third that is 5 (1, 0.05, 12, 2.5, 0.125)."""
    if not (value > 0 and math.isfinite(value)):
        return False
    mantissa = value / 10.0 ** math.floor(math.log10(value))
    hundreds = round(mantissa * 100)
    near = abs(mantissa * 100 - hundreds) <= 3e-4 * hundreds
    return near and (hundreds % 10 == 0 or hundreds % 25 == 0)


def before_unscale(norm: float) -> tuple[float, float] | None:
    """(max_norm, loss scale) if ``norm`` is a round number from 0.1 to 100 over a power of two from 2^8 to 2^24.

    That is what ``clip_grad_norm_`` on gradients that are still multiplied by a loss scale leaves after unscaling. A
    norm that is round itself is a plain clip. Of several pairs, the one whose scale is nearest to the usual 2^16.
    """
    if is_round(norm) or not norm > 0:
        return None
    fits = []
    for power in range(LEAST_SCALE, MOST_SCALE + 1):
        product = norm * 2.0**power
        first_digit = product / 10.0 ** math.floor(math.log10(product))
        if MAX_NORMS[0] * 0.999 <= product <= MAX_NORMS[1] * 1.001 and _one_digit(first_digit):
            fits.append((product, 2.0**power, abs(power - USUAL_SCALE)))
    if not fits:
        return None
    product, scale, _ = min(fits, key=lambda fit: fit[2])
    return product, scale


def _one_digit(mantissa: float) -> bool:
    return any(abs(mantissa - usual) <= 3e-4 * usual for usual in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9, 10))


def _with_scale(norm: float, scale: float) -> tuple[float, float] | None:
    """(max_norm, scale) if ``norm`` times the scale in use is a plausible clip and ``norm`` itself is none."""
    product = norm * scale
    plausible = MAX_NORMS[0] / 100 <= product <= MAX_NORMS[1] * 10
    odd = norm < TINY_NORM if not is_round(product) else not is_round(norm)
    return (product, scale) if scale > 1 and plausible and odd else None


def _loss_scale(live: Live) -> float | None:
    """The scale of the one GradScaler that steps this optimizer; None where there is none."""
    scales = [float(scaler.get_scale()) for scaler in live.scalers if scaler.is_enabled()]
    return scales[0] if len(scales) == 1 else None


def _around(event: GradientEvent) -> Live:
    return around(event.parameters[0]) if len(event.parameters) else Live()


def _relative_update(event: GradientEvent, live: Live, norm: float) -> float | None:
    """lr * norm / norm of the weights; None for optimizers that divide by the size of past gradients."""
    plain = [o for o in live.optimizers if "momentum" in o.defaults and "alpha" not in o.defaults]
    weights = _weights_norm(event.parameters)
    if not plain or not weights:
        return None
    gain = 1.0 / max(1.0 - float(plain[0].defaults["momentum"]), 1e-3)
    rate = max(group_rates(event), default=0.0)
    return rate * gain * norm / weights if rate > 0 else None


def _weights_norm(parameters: Sequence[Any]) -> float:
    """L2 norm of all parameters: one read of the device."""
    import torch

    norms = [torch.linalg.vector_norm(p.detach().float()) for p in parameters if p.is_floating_point()]
    return float(torch.stack([norm.to(norms[0].device) for norm in norms]).norm()) if norms else 0.0


def _clipped_before_unscale(norm: float, max_norm: float, scale: float, row: int) -> Saturation:
    return Saturation(
        Severity.WARNING,
        f"the global gradient norm was {norm:.4g} at {row} steps in a row, which is {max_norm:.4g} over a loss scale "
        f"of 2^{math.log2(scale):.4g}: clip_grad_norm_ before scaler.unscale_",
        "the clip is applied to gradients that are still multiplied by the loss scale, so every update is shorter by "
        "that factor and the run hardly learns",
        scale,
        max_norm,
    )


def _stalled(norm: float, update: float, row: int) -> Saturation:
    return Saturation(
        Severity.WARNING,
        f"the global gradient norm was {norm:.4g} at {row} steps in a row: a clip acts at every step, and an update is "
        f"{update:.2g} of the weights",
        "the clip leaves so little that the weights stand still",
        update=update,
    )


def _always(norm: float, row: int) -> Saturation:
    return Saturation(
        Severity.INFO,
        f"the global gradient norm was {norm:.4g} at {row} steps in a row: a clip acts at every step",
        "all gradients are brought to one length, so max_norm times the learning rate is the step size",
    )


def _prescription(norm: float, why: Saturation) -> Prescription:
    if why.scale is not None:
        return Prescription(
            parameter="scaler.unscale_(optimizer)", current="not called before clip_grad_norm_",
            proposed="called before clip_grad_norm_", why="clip the gradients themselves, not their scaled copies",
            undo="take the call out",
        )  # fmt: skip
    return Prescription(
        parameter="max_norm", current=norm, why="choose it from the norms before clipping: above most of them",
        undo="set it back",
    )  # fmt: skip
