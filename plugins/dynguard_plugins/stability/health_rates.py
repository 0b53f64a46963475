"""``lr_jump``: a learning rate that rises at once by far, as after a resume that lost the schedule."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dynguard import Evidence, Finding, Prescription, Severity
from dynguard_plugins.stability.health_live import Live, around

if TYPE_CHECKING:
    from dynguard.events import GradientEvent

YOUNG = 5  # steps in which a learning rate may still be set up
MANUAL_RATIO = 10.0  # a jump that no scheduler made is told from here on
BEYOND = 3.0  # times the highest rate so far: no restart goes there
SAME = 0.2  # relative distance within which two jumps go to the same height
SEARCHES = 20  # looks for schedulers per run


def group_rates(event: GradientEvent) -> list[float]:
    """Learning rate per parameter group where the event knows groups, else per parameter; 0 for one on a device."""
    rates: Sequence[Any] = getattr(event.learning_rates, "_values", event.learning_rates)
    return [rate if isinstance(rate, (int, float)) else 0.0 for rate in rates]


def _member(event: GradientEvent, group: int) -> int:
    """Index of a parameter of the group."""
    of: Sequence[int] | None = getattr(event.learning_rates, "_group_of", None)
    return group if of is None else of.index(group)


class Rates:
    """The learning rates of one source, group by group.

    Attributes:
        last, highest: rate of every group at the last step, and its highest so far.
        fell: whether the rates have ever come down.
        changes: steps at which some rate has changed: what a schedule has done so far, in its own units.

    Args:
        ratio: a rise by this factor from one step to the next is a jump.
    """

    FIELDS = ("last", "highest", "fell", "changes", "steps", "searches", "told")

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio
        self.steps = 0
        self.searches = 0
        self.told: list[float] = []
        self._start([])

    def _start(self, rates: list[float]) -> None:
        self.last = rates
        self.highest = list(rates)
        self.fell = False
        self.changes = 0

    def see(self, event: GradientEvent) -> list[Finding]:
        """Compare with the last step; the findings, mostly none."""
        now, last = group_rates(event), self.last
        self.steps += 1
        if now == last:
            return []
        if len(now) != len(last):
            self._start(now)  # groups were added: which is which is not known
            return []
        ratio, found = self.ratio, []
        jumped = [g for g, (a, b) in enumerate(zip(last, now, strict=True)) if 0 < ratio * a <= b]
        if jumped and self.steps > YOUNG and event.rejected is not True:  # a rollback brings back older rates
            found = self._judge(event, jumped, now)
        self.highest = [a if a > b else b for a, b in zip(self.highest, now, strict=True)]
        self.fell = self.fell or sum(now) < sum(last)
        self.changes += 1
        self.last = now
        return found

    def _judge(self, event: GradientEvent, groups: list[int], now: list[float]) -> list[Finding]:
        """One finding for the groups that jumped together, at most; a height that was told before is no news."""
        group = max(groups, key=lambda g: now[g] / self.last[g])
        height = now[group]
        if self.searches >= SEARCHES or any(abs(height - told) <= SAME * told for told in self.told):
            return []
        self.searches += 1
        index = _member(event, group)
        live = around(event.parameters[index]) if index < len(event.parameters) else Live()
        verdict = self._verdict(live, group, height, whole=len(groups) == len(now))
        if verdict is None:
            return []
        self.told.append(height)
        return [self._finding(event, groups, group, height, *verdict)]

    def _verdict(self, live: Live, group: int, height: float, *, whole: bool) -> tuple[Severity, str, Any] | None:
        """(severity, what is known, scheduler) of a jump of ``group`` to ``height``; None where it was asked for.

        A scheduler whose own rate is the new one made the jump. It continues the run if it has taken at least half as
        many steps, in its own units, as the rate has changed before; one that was made anew has not. ``whole`` says
        that all groups jumped: one alone may be a layer that joins the training.
        """
        makers = [s for s in live.schedulers if _made(s, height)]
        if any(s.last_epoch >= max(1.0, (self.changes + 1) / 2) for s in makers):
            return None
        if makers:
            newest = min(makers, key=lambda s: int(s.last_epoch))
            known = f"its {type(newest).__name__} is at last_epoch={newest.last_epoch}, so it was made anew"
            return (Severity.WARNING if self.fell else Severity.INFO), known, newest
        if self.fell and _made_anew(live, height):
            return Severity.WARNING, "the optimizer holds no state, so it was made anew", None
        if height < MANUAL_RATIO * self.last[group]:
            return None
        if whole and self.fell and height > BEYOND * self.highest[group]:
            return Severity.WARNING, f"no scheduler set it, and it was never above {self.highest[group]:.4g}", None
        return Severity.INFO, "no scheduler set it: a restart by hand, or a resume without its schedule", None

    def _finding(
        self,
        event: GradientEvent,
        groups: list[int],
        group: int,
        height: float,
        severity: Severity,
        known: str,
        scheduler: Any,
    ) -> Finding:
        last, epoch = self.last[group], None if scheduler is None else int(scheduler.last_epoch)
        evidence: dict[str, Any] = {
            "lr_before": last, "lr_after": height, "ratio": height / last, "highest_lr": self.highest[group],
            "groups": ", ".join(map(str, groups)), "changes_before": self.changes,
            "scheduler": None if scheduler is None else type(scheduler).__name__, "last_epoch": epoch,
        }  # fmt: skip
        return Finding(
            kind="lr_jump",
            severity=severity,
            step=event.step,
            subject=f"param_groups[{groups[0]}]" if len(groups) == 1 < len(self.last) else "",
            premise=f"the learning rate rose at once from {last:.4g} to {height:.4g} (x{height / last:.4g}); {known}",
            implies="the schedule starts again from its beginning: large steps undo what was learnt at small ones",
            expected_effect="with the schedule's own state the rate goes on where it was",
            evidence=tuple(Evidence(name=name, value=value) for name, value in evidence.items() if value is not None),
            prescriptions=_prescriptions(group, last, height, epoch, self.changes),
        )

    def state_dict(self) -> dict[str, Any]:
        """Rates, their history in numbers, and what was told."""
        return {name: copy.copy(getattr(self, name)) for name in self.FIELDS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up ``state_dict()``."""
        for name in self.FIELDS:
            setattr(self, name, copy.copy(state[name]))


def _close(rate: Any, height: float) -> bool:
    return isinstance(rate, (int, float)) and math.isclose(rate, height, rel_tol=1e-6)


def _made(scheduler: Any, height: float) -> bool:
    """Whether the scheduler set this rate; one that only joins others (ChainedScheduler) counts no steps of its own."""
    counts = isinstance(getattr(scheduler, "last_epoch", None), (int, float))
    return counts and any(_close(rate, height) for rate in getattr(scheduler, "_last_lr", ()))


def _made_anew(live: Live, height: float) -> bool:
    """Whether the optimizer at this rate is of a kind that keeps state but has none."""
    at = [o for o in live.optimizers if any(_close(group.get("lr"), height) for group in o.param_groups)]
    keeps = [o for o in at if "betas" in o.defaults or o.defaults.get("momentum")]
    return bool(keeps) and not any(o.state for o in keeps)


def _prescriptions(group: int, last: float, height: float, epoch: int | None, changes: int) -> tuple[Prescription, ...]:
    rate = Prescription(
        parameter=f"optimizer.param_groups[{group}]['lr']", current=height, proposed=last,
        why="go on at the rate of the step before", undo="set it back",
    )  # fmt: skip
    if epoch is None:
        return (rate,)
    scheduler = Prescription(
        parameter="last_epoch", current=epoch, proposed=changes,
        why="save scheduler.state_dict() with the checkpoint and load it at resume, or make it with last_epoch",
        undo="make the scheduler without last_epoch",
    )  # fmt: skip
    return scheduler, rate
