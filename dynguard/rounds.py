"""Boosting rounds: a TreeEvent goes through the detectors, and a RAISE stops training by the library's own path."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from dynguard.actions import Action, Verdict
from dynguard.bus import FAILURES
from dynguard.events import TreeEvent
from dynguard.findings import Finding, Metrics, superseded
from dynguard.signals import Signal

if TYPE_CHECKING:
    from dynguard.judge import Judge

Answer = tuple[str, Signal]


class Rounds:
    """Judges the boosting rounds of all callbacks of one manager.

    A round can't be skipped, clipped or rolled back: what asks for less than RAISE is told and nothing more.
    """

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        self._last: dict[str, int] = {}
        self._stopped: set[str] = set()

    def judge_round(self, event: TreeEvent) -> bool:
        """Whether training is to stop after this round."""
        if event.round < self._last.get(event.source, 0):  # another model
            self._stopped.discard(event.source)
        self._last[event.source] = event.round
        verdict = self.look(event)
        if verdict is None or verdict.action is not Action.RAISE or event.source in self._stopped:
            return event.source in self._stopped and self.judge.policy.mode == "guard"
        self._stopped.add(event.source)
        intervention = verdict.intervention(event.round, event.source)
        self.judge.interventions.append(intervention)
        self.judge.put(intervention, True)
        return verdict.carried_out

    def look(self, event: TreeEvent) -> Verdict | None:
        """Ask the detectors and report; the verdict where something was found."""
        judge = self.judge
        answers = list(self._checked(judge.bus.trees(event)))
        values = {f"{data}-{name}": float(value) for data, by in event.metrics.items() for name, value in by.items()}
        values.update({name: float(np.max(s.score)) for name, s in answers if np.size(s.score)})
        judge.put(Metrics(event.round, values, {}, event.source), False)
        judge.steps = max(judge.steps, event.round + 1)
        fired = [(name, signal) for name, signal in answers if np.any(np.asarray(signal.fired) == 1)]
        found = superseded(judge.explain(fired, event.round, event.source))
        judge.report(found)
        if not (event.round + 1) % judge.settings.diagnose_every:
            found += judge.diagnose(event.round, event.source)
        return self._verdict(found)

    def replay(self, events: Iterable[TreeEvent]) -> list[Finding]:
        """The findings on a model that is trained already: nothing is stopped, so nothing intervenes."""
        before, last = len(self.judge.findings), None
        for event in events:
            last = event
            self.look(event)
        if last is not None:
            self.judge.diagnose(last.round, last.source)
        return list(self.judge.findings)[before:]

    def _checked(self, answers: Iterable[tuple[str, Any]]) -> Iterator[Answer]:
        for name, signal in answers:
            try:
                if not isinstance(signal, Signal):
                    raise TypeError(f"a detector returns a Signal or None; got {type(signal).__name__}")
                np.asarray(signal.score, dtype=float)
                if signal.learn is not None:
                    signal.learn(np.atleast_1d(np.asarray(signal.score, dtype=float)).tolist())
            except FAILURES as error:
                self.judge.bus.failed(name, "on_trees", error)
            else:
                yield name, signal

    def _verdict(self, found: list[Finding]) -> Verdict | None:
        if not found:
            return None
        top = max(found, key=lambda f: (f.action.rank, f.severity.rank, bool(f.subject)))
        action = top.action if top.action is Action.RAISE else min(top.action, Action.WARN, key=lambda a: a.rank)
        return Verdict(
            action=action,
            subject=top.subject,
            detector=top.detector,
            reason=top.kind,
            carried_out=self.judge.policy.mode == "guard",
            subjects=tuple(dict.fromkeys(f.subject for f in found if f.kind == top.kind and f.subject)),
        )
