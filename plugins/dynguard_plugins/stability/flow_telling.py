"""The findings of ``flow``, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dynguard import Evidence, Finding, Prescription, Severity
from dynguard_plugins.stability.flow_judge import STEEP, UNITS_IN_A_ROW, Chain, Stalled

MOST = 8  # layers that are named


def frozen(names: Sequence[str], step: int) -> Finding:
    """Layers whose learning rate is 0."""
    return Finding(
        kind="stagnation", severity=Severity.INFO, step=step, subject=names[0] if len(names) == 1 else "",
        premise=f"{_listed(names)}: the learning rate is exactly 0, so the weights rest although they have a gradient",
        implies="a parameter group is frozen, as its learning rate says; if that is not meant, it does not learn",
        expected_effect="none is needed where this is meant; requires_grad=False would also save its backward pass",
        evidence=(Evidence(name="lr", value=0.0), Evidence(name="parameters", value=len(names))),
    )  # fmt: skip


CAUSES = {
    "second_moment": (
        "the optimizer's second moment is far above the squares of the present gradient, as after a spike, so that "
        "the update is next to nothing until it has decayed (1 / (1 - beta2) steps)",
        Prescription(
            parameter="optimizer state", proposed="reset the layer's moments with their step counter",
            why="the second moment remembers a gradient that is long gone",
        ),
    ),
    "rounding": (
        "the update is smaller than half of the weights' last digit and vanishes in rounding",
        Prescription(parameter="lr", proposed="higher, for this layer's group", why="updates must exceed the rounding"),
    ),
    "unknown": (
        "neither the learning rate nor the optimizer's second moment explains it: something between the gradient and "
        "the weights holds the update back (a clip, a hook, a wrapper, a constraint)",
        Prescription(
            parameter="what acts between backward and step", proposed="look at clips, hooks and constraints",
            why="the gradient is alive and the learning rate is not zero",
        ),
    ),
}  # fmt: skip


def stalled(found: Stalled, name: str, step: int) -> Finding:
    """A layer that stopped moving although its gradient is alive."""
    why, prescription = CAUSES[found.cause]
    return Finding(
        kind="stagnation", step=step, subject=name,
        premise=f"{name} moved by {found.numbers['relative_movement']:.2g} of its length over a window in which its "
        f"gradient norm was {found.numbers['gradient_norm']:.3g}, no less than before",
        implies=f"the layer does not learn: {why}",
        expected_effect="the layer moves again once the cause is gone",
        evidence=(
            *(Evidence(name=key, value=value) for key, value in found.numbers.items()),
            Evidence(name="cause", value=found.cause),
        ),
        prescriptions=(prescription,),
    )  # fmt: skip


def dead_units(share: float, rows: int, name: str, step: int, severity: Severity) -> Finding:
    """A layer in which many units get no gradient."""
    return Finding(
        kind="dead_units", severity=severity, step=step, subject=name,
        premise=f"in {name} {share:.0%} of {rows} units looked at had a gradient of exactly zero at all sampled steps "
        f"of {UNITS_IN_A_ROW} windows, while other units had one",
        implies="these units give the same whatever comes in (a ReLU that is never active) and can't come back by "
        "themselves: the layer is narrower than it looks",
        expected_effect="with live units the layer has its full width",
        evidence=(Evidence(name="dead_share", value=share), Evidence(name="units_seen", value=rows)),
        prescriptions=(
            Prescription(
                parameter="lr or activation", proposed="a lower learning rate or a leaky activation (GELU, LeakyReLU)",
                why="units die when one large step pushes them below zero for all inputs",
            ),
        ),
    )  # fmt: skip


def chain(found: Chain, names: Sequence[str], step: int) -> Finding:
    """Gradients that grow or vanish from layer to layer."""
    growing = found.factor > 1
    ratio = found.factor if growing else 1 / found.factor
    first, last = names[found.layers[0]], names[found.layers[-1]]
    return Finding(
        kind="exploding_gradients" if growing else "vanishing_gradients",
        severity=Severity.WARNING if ratio > STEEP else Severity.INFO,
        step=step, subject=first,
        premise=f"from {last} back to {first} the gradient norm {'grows' if growing else 'falls'} by a factor of "
        f"{ratio:.3g} per layer, over {len(found.layers)} layers",
        implies="the first layers take steps far too large for the last ones" if growing
        else "the first layers hardly learn",
        expected_effect="with a factor near 1 all layers learn at one learning rate",
        evidence=tuple(Evidence(name=name, value=float(value)) for name, value in _numbers(found).items()),
        prescriptions=(
            Prescription(
                parameter="initialisation or architecture",
                proposed="variance-preserving initialisation, normalisation or residual connections",
                why="the product of the layers' Jacobians grows or shrinks geometrically with depth",
            ),
        ),
    )  # fmt: skip


def _numbers(found: Chain) -> Mapping[str, float]:
    return {
        "factor_per_layer": found.factor, "layers": len(found.layers), "r_squared": found.fit,
        "first_gradient_norm": found.first, "last_gradient_norm": found.last,
    }  # fmt: skip


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
    return ", ".join(names[:MOST]) + more
