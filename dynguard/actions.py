"""Actions, interventions and the policy that turns what detectors found into one verdict.

Actions are ordered by how far they go: ``PROCEED < WARN < CLIP < SKIP < ROLLBACK < RAISE``. When several
detectors fire at one step, the farthest action wins and only that one is carried out.
"""

from __future__ import annotations

from enum import Enum

from pydantic import BaseModel, ConfigDict



class Action(Enum):
    """What to do about a step, from doing nothing to stopping the run.

    ``PROCEED`` leaves the step alone in silence, ``WARN`` says so but leaves it alone, ``CLIP`` bounds the gradients
    and steps, ``SKIP`` drops the update (weights and optimizer state stay as they are), ``ROLLBACK`` goes back to the
    newest verified snapshot, ``RAISE`` stops the run with an error that carries the findings.
    """

    PROCEED = "proceed"
    WARN = "warn"
    CLIP = "clip"
    SKIP = "skip"
    ROLLBACK = "rollback"
    RAISE = "raise"

    @property
    def rank(self) -> int:
        """Position in the order, 0 (PROCEED) to 5 (RAISE)."""
        return _RANK[self]

    @property
    def intervenes(self) -> bool:
        """Whether the action changes the run (CLIP and beyond)."""
        return self.rank >= _RANK[Action.CLIP]

    def __lt__(self, other: object) -> bool:
        return self.rank < other.rank if isinstance(other, Action) else NotImplemented

    def __le__(self, other: object) -> bool:
        return self.rank <= other.rank if isinstance(other, Action) else NotImplemented

    def __gt__(self, other: object) -> bool:
        return self.rank > other.rank if isinstance(other, Action) else NotImplemented

    def __ge__(self, other: object) -> bool:
        return self.rank >= other.rank if isinstance(other, Action) else NotImplemented

    def __str__(self) -> str:
        return self.value


_RANK = {action: rank for rank, action in enumerate(Action)}


class Intervention(BaseModel):
    """What was done to the run (or, in ``mode="observe"``, what would have been done), one per step and source.

    ``step`` counts optimizer steps from 0 (boosting rounds for trees). ``subject`` is the parameter, module, table or
    feature that the deciding finding names. ``carried_out`` is False for a dry run.
    """

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")

    step: int
    action: Action
    subject: str = ""
    detector: str = ""
    reason: str = ""
    source: str = ""
    carried_out: bool = True


class Verdict(BaseModel):
    """The one decision about a step: the action, the finding that decided it, and why the policy changed it if so."""

    model_config = ConfigDict(frozen=True)

    action: Action
    subject: str = ""
    detector: str = ""
    reason: str = ""
    carried_out: bool = True

    def intervention(self, step: int, source: str) -> Intervention:
        """The audit record of this verdict."""
        return Intervention(
            step=step, action=self.action, subject=self.subject, detector=self.detector, reason=self.reason,
            source=source, carried_out=self.carried_out,
        )  # fmt: skip


PROCEED = Verdict(action=Action.PROCEED)
