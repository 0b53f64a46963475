"""Actions, interventions and the policy that turns what detectors found into one verdict.

Actions are ordered by how far they go: ``PROCEED < WARN < CLIP < SKIP < ROLLBACK < RAISE``. When several
detectors fire at one step, the farthest action wins and only that one is carried out.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    from dynguard.findings import Finding


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
    feature that the deciding finding names, ``subjects`` those of all findings of the same kind. ``carried_out`` is
    False for a dry run.
    """

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")

    step: int
    action: Action
    subject: str = ""
    detector: str = ""
    reason: str = ""
    source: str = ""
    carried_out: bool = True
    subjects: tuple[str, ...] = ()


class Verdict(BaseModel):
    """The one decision about a step: the action, the finding that decided it, and why the policy changed it if so."""

    model_config = ConfigDict(frozen=True)

    action: Action
    subject: str = ""
    detector: str = ""
    reason: str = ""
    carried_out: bool = True
    subjects: tuple[str, ...] = ()

    def intervention(self, step: int, source: str) -> Intervention:
        """The audit record of this verdict."""
        return Intervention(step=step, source=source, **self.model_dump())


PROCEED = Verdict(action=Action.PROCEED)
# Kinds that a further batch can't cure: no new regime to accept, whatever the policy says.
NON_FINITE = frozenset({"nan_grad", "inf_grad", "nan_loss", "inf_loss", "nan_forward", "nan_buffer", "nonfinite_param"})


class Policy(BaseModel):
    """How findings become one action.

    Attributes:
        mode: ``guard`` carries actions out; ``observe`` only says what it would have done.
        max_consecutive_skips: so many steps may be skipped in a row; the next one is decided by
            ``exhausted``, so that a run is never starved in silence.
        cooldown: for so many judged steps after a rollback a finding that asks for another one gets a skip instead:
            what is wrong may lie in the very next batches. A row of skips that is too long still ends in a rollback.
        exhausted: ``accept`` takes as many steps again with gradients clipped to their usual size, and then what comes
            as a new regime; ``rollback`` goes back to a snapshot; ``raise`` stops.
            A row of non-finite steps is never accepted: it is rolled back where there is a snapshot, else raised.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: Literal["guard", "observe"] = "guard"
    max_consecutive_skips: int = Field(default=8, ge=1)
    exhausted: Literal["accept", "rollback", "raise"] = "accept"
    cooldown: int = Field(default=5, ge=0)


class Arbiter:
    """Turns the findings about a step of one source into a verdict, and counts how many were held back in a row."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.consecutive = 0
        self.cooling = 0

    def clean(self) -> None:
        """A step was taken: the row of skips is over."""
        self.consecutive = 0
        self.cooling = max(0, self.cooling - 1)

    def decide(self, findings: Sequence[Finding], *, can_roll_back: bool = False) -> Verdict:
        """The verdict: the farthest action asked for, bounded by the policy."""
        if not findings:
            return PROCEED
        top = max(findings, key=lambda f: (f.action.rank, f.severity.rank, bool(f.subject)))
        subjects = tuple(dict.fromkeys(f.subject for f in findings if f.kind == top.kind and f.subject))
        verdict = Verdict(
            action=top.action, subject=top.subject, detector=top.detector, reason=top.kind, subjects=subjects
        )
        if verdict.action is Action.ROLLBACK and self.cooling and can_roll_back:
            reason = f"{verdict.reason}; rolled back only just before"
            verdict = verdict.model_copy(update={"action": Action.SKIP, "reason": reason})
        skipping = verdict.action is Action.SKIP
        if skipping:
            verdict = self._bounded(verdict, findings, can_roll_back)
        if verdict.action is Action.ROLLBACK and not can_roll_back:
            verdict = self._without_snapshot(verdict)
        # Held-back steps count in a dry run too: it must say what a guard would have done.
        held = verdict.action is Action.SKIP or (skipping and verdict.action is Action.CLIP)
        self.consecutive = self.consecutive + 1 if held else 0
        rolled_back = verdict.action is Action.ROLLBACK
        self.cooling = self.policy.cooldown if rolled_back else max(0, self.cooling - 1)
        if self.policy.mode == "observe":
            verdict = verdict.model_copy(update={"carried_out": False})
        return verdict

    def _bounded(self, verdict: Verdict, findings: Sequence[Finding], can_roll_back: bool) -> Verdict:
        if self.consecutive < self.policy.max_consecutive_skips:
            return verdict
        row = f"{verdict.reason} after {self.consecutive} steps in a row"
        asked = {f.kind for f in findings if f.action.rank >= Action.SKIP.rank}
        if asked & NON_FINITE or self.policy.exhausted == "rollback":
            return verdict.model_copy(
                update={"action": Action.ROLLBACK if can_roll_back else Action.RAISE, "reason": row}
            )
        if asked == {"empty_batch"}:
            return verdict  # there is nothing to learn from it, however often it comes
        if self.policy.exhausted == "raise":
            return verdict.model_copy(update={"action": Action.RAISE, "reason": row})
        if self.consecutive < 2 * self.policy.max_consecutive_skips:
            # Bounded steps first: they let a run out of a corner that skipping would keep it in.
            return verdict.model_copy(update={"action": Action.CLIP, "reason": row})
        return verdict.model_copy(update={"action": Action.PROCEED, "reason": f"{row}: accepted as a new regime"})

    def _without_snapshot(self, verdict: Verdict) -> Verdict:
        action = Action.SKIP if self.consecutive < self.policy.max_consecutive_skips else Action.RAISE
        return verdict.model_copy(update={"action": action, "reason": f"{verdict.reason}; no snapshot to roll back to"})
