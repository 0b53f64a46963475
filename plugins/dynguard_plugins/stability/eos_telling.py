"""What ``eos`` says."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

from dynguard import Action, Evidence, Finding, Prescription, Severity

if TYPE_CHECKING:
    from dynguard_plugins.stability.eos import Check
    from dynguard_plugins.stability.eos_forecast import Forecast


def _evidence(check: Check, **more: float) -> tuple[Evidence, ...]:
    numbers = {"ratio": check.ratio, "sharpness": check.sharpness, "threshold": check.threshold,
               "residual": check.residual, "gradients": check.gradients, **more}  # fmt: skip
    return tuple(Evidence(name=n, value=v) for n, v in numbers.items() if v is not None and math.isfinite(v))


def _lower(check: Check, lr: float | None, to: float) -> tuple[Prescription, ...]:
    if lr is None or check.ratio <= 0:
        return ()
    return (
        Prescription(
            parameter="lr",
            current=lr,
            proposed=float(f"{lr * to / check.ratio:.3g}"),
            why=f"the same sharpness would then be at {to:g} of the threshold",
            undo="set the learning rate back",
        ),
    )


def at_edge(check: Check, lr: float | None, least: float) -> Finding:
    """The sharpness has reached what the optimizer's step can bear, ``least`` being the ratio that counts as that."""
    what = "preconditioned sharpness" if check.preconditioned else "sharpness"
    size = f"{check.sharpness:.4g} against a threshold of {check.threshold:.4g}" if check.threshold else "in its units"
    return Finding(
        kind="edge_of_stability",
        severity=Severity.WARNING,
        step=check.step,
        subject=check.subject,
        action=Action.WARN,
        premise=f"the {what} has reached {check.ratio:.3g} of what this learning rate is stable at ({size}), at two "
        "checks in a row",
        implies="the steepest direction oscillates from step to step: the loss goes up and down, progress comes from "
        "the other directions; spikes of it are not the data's doing",
        expected_effect="a lower learning rate, or a longer warm-up, gives a smooth descent; at the edge training may "
        "still make progress",
        confidence=_sure(check, least),
        evidence=_evidence(check),
        prescriptions=_lower(check, lr, 0.8),
    )


def _sure(check: Check, least: float) -> float:
    """Chance that the ratio is above ``least`` if its error is normal, with the residual as its standard deviation."""
    return statistics.NormalDist(least, max(check.residual * check.ratio, 1e-9)).cdf(check.ratio)


def crossing(check: Check, expected: Forecast, lr: float | None) -> Finding:
    """The sharpness will reach the edge soon."""
    return Finding(
        kind="edge_of_stability",
        severity=Severity.INFO,
        step=check.step,
        subject=check.subject,
        action=Action.WARN,
        premise=f"the sharpness is at {check.ratio:.3g} of the threshold and doubles every {expected.doubling:.0f} "
        f"steps: it crosses in {expected.steps:.0f} steps ({expected.earliest:.0f} .. {expected.latest:.0f}), if the "
        "learning rate stays as it is",
        implies="training becomes unstable in its steepest direction then",
        # No confidence: neighbouring checks are not independent, and of 38 forecasts 5 kept within the interval.
        evidence=_evidence(check, steps_to_crossing=expected.steps, earliest=expected.earliest, latest=expected.latest),
        prescriptions=_lower(check, lr, 0.5),
    )


def along_edge(step: int, source: str, seen: tuple[int, float, float]) -> Finding:
    """Without ``loss_fn``: the curvature along the update, a lower bound, is at the edge."""
    checks, ratio, spread = seen
    return Finding(
        kind="edge_of_stability",
        severity=Severity.INFO,
        step=step,
        source=source,
        action=Action.WARN,
        premise=f"the curvature along the update is {ratio:.3g} times what this learning rate is stable at (median of "
        f"{checks} checks, +- {spread:.2g}); it is a lower bound of the sharpness, from the change of the gradient "
        "between steps, and noisy where their batches differ",
        implies="updates undo one another along the steepest direction",
        expected_effect="with loss_fn given, the sharpness itself is measured",
        evidence=(Evidence(name="ratio", value=ratio), Evidence(name="spread", value=spread)),
    )


def unmeasurable(step: int, why: str) -> Finding:
    """No number can be given, and why."""
    return Finding(
        kind="unmeasurable",
        severity=Severity.INFO,
        step=step,
        action=Action.WARN,
        premise=f"the sharpness can't be measured: {why}",
        implies="nothing is known about the edge of stability here",
        evidence=(Evidence(name="reason", value=why[:200]),),
    )
