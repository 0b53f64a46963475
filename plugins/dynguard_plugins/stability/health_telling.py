"""What ``health`` says of layers that move without a gradient or stand still."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynguard import Evidence, Finding, Prescription, Severity

MATERIAL = 1e-6  # of a parameter's length: less is no way
NAMED = 5


@dataclass(slots=True)
class Moved:
    """A parameter with the way that it went: ``way``, its ``length`` then, and their vectors' ``product``."""

    layer: int
    name: str
    used: int
    row: int
    confidence: float | None
    way: float
    length: float
    product: float

    @property
    def material(self) -> bool:
        """Whether it moved at all, rounding aside."""
        return self.way > MATERIAL * self.length

    @property
    def share(self) -> float:
        """Its way in units of its length."""
        return self.way / self.length if self.length > 0 else float("inf")

    @property
    def shrank(self) -> bool:
        """Whether it went straight towards zero, as weight decay moves it."""
        return self.product <= -0.999 * self.way * self.length


def subject(names: Sequence[str]) -> str:
    """The module that all the names lie in, else the first of them."""
    parts = [name.split(".") for name in names]
    common = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        common.append(level[0])
    return ".".join(common) or names[0]


def _named(moved: Sequence[Moved]) -> str:
    names = ", ".join(repr(m.name) for m in moved[:NAMED])
    return names + (f" and {len(moved) - NAMED} more" if len(moved) > NAMED else "")


def _evidence(moved: Sequence[Moved], **more: float) -> tuple[Evidence, ...]:
    far = max(moved, key=lambda m: m.share)
    numbers = {"layers": len(moved), **more, "way": far.way, "parameter_norm": far.length}
    return tuple(Evidence(name=name, value=value) for name, value in numbers.items())


def zombie(moved: Sequence[Moved], step: int, severity: Severity) -> Finding:
    """A layer that moves though its gradient is zero."""
    decay = all(m.shrank for m in moved)
    cause = "weight decay shrinks it" if decay else "stale momentum moves it"
    row = min(m.row for m in moved)
    return Finding(
        kind="zombie_layer",
        severity=severity,
        step=step,
        subject=subject([m.name for m in moved]),
        premise=f"the gradient of {_named(moved)} is present but exactly zero at {row} steps in a row; {cause}",
        implies="a part of the model that the loss does not use is changed all the same"
        if not decay
        else "a part of the model that the loss does not use decays towards zero",
        expected_effect="without a gradient the optimizer leaves the layer alone",
        confidence=min((m.confidence for m in moved if m.confidence is not None), default=None),
        evidence=_evidence(moved, zero_gradient_steps=row),
        prescriptions=(_set_to_none(),),
    )


def dead(still: Sequence[Moved], step: int, severity: Severity) -> Finding:
    """A layer that gets no gradient and does not move."""
    row = min(m.row for m in still)
    never = not any(m.used for m in still)
    return Finding(
        kind="dead_layer",
        severity=severity,
        step=step,
        subject=subject([m.name for m in still]),
        premise=f"the gradient of {_named(still)} {'was always' if never else 'is now'} exactly zero, for {row} steps, "
        "and it does not move",
        implies="it is not trained: its units are dead, it is cut off from the loss, or its gradient underflows",
        expected_effect="with a gradient it is trained; else it can be left out of the optimizer",
        confidence=None if never else min((m.confidence for m in still if m.confidence is not None), default=None),
        evidence=_evidence(still, zero_gradient_steps=row),
        prescriptions=(
            Prescription(
                parameter="learning rate, initialisation or activation",
                why="ReLU units that are never positive have no gradient: a smaller rate or a leaky activation "
                "keeps them alive; a detach() or no_grad() on the way cuts the layer off",
                undo="set it back",
            ),
        ),
    )


def frozen(moved: Sequence[Moved], step: int) -> Finding:
    """A frozen parameter that the optimizer moves."""
    decay = all(m.shrank for m in moved)
    return Finding(
        kind="moved_frozen",
        step=step,
        subject=subject([m.name for m in moved]),
        premise=f"frozen (requires_grad=False) but changed in {moved[0].row} updates: {_named(moved)}; a stale "
        f"gradient is left there, on which {'weight decay' if decay else 'the optimizer'} goes on acting",
        implies="weights that were meant to stay as they are drift away",
        expected_effect="without a gradient the optimizer leaves it alone",
        evidence=_evidence(moved, updates=moved[0].row),
        prescriptions=(
            _set_to_none(),
            Prescription(
                parameter="optimizer.param_groups", current="holds the frozen parameters", proposed="leaves them out",
                why="what is not in the optimizer can't be moved by it", undo="add them again",
            ),
        ),
    )  # fmt: skip


def _set_to_none() -> Prescription:
    return Prescription(
        parameter="set_to_none", current=False, proposed=True,
        why="optimizer.zero_grad(set_to_none=True), or parameter.grad = None: momentum and weight decay act on "
        "whatever has a gradient, even a zero one",
        undo="optimizer.zero_grad(set_to_none=False)",
    )  # fmt: skip
