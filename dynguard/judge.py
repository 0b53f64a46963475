"""The judge: runs one step through the plugins, decides, and carries the decision out on the source."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dynguard import selfreport
from dynguard.actions import Action, Arbiter, Intervention, Verdict
from dynguard.bus import FAILURES, Bus
from dynguard.errors import GradientSpikeError
from dynguard.events import EmbeddingEvent, GradientEvent, LossEvent
from dynguard.findings import Finding, Metrics, Names, Record, Severity, superseded
from dynguard.settings import Settings
from dynguard.signals import Signal

if TYPE_CHECKING:
    from dynguard.torch.reading import Reading
    from dynguard.torch.source import Source
    from dynguard.torch.watch import Watch

log = logging.getLogger("dynguard")

OVERFLOW = "found_inf"  # what a GradScaler tells a fused optimizer; recorded as a metric of the step
KEPT = 10_000  # findings and interventions kept in memory; sinks get all


@dataclass(slots=True)
class Observed:
    """What the user observed for the step to come, until an optimizer has taken it and something new is observed."""

    losses: list[Any] = field(default_factory=list)
    batches: list[Any] = field(default_factory=list)
    answers: list[tuple[str, Signal]] = field(default_factory=list)
    used: bool = False

    def renew(self) -> None:
        """Forget what a step has used already."""
        if self.used:
            self.losses, self.batches, self.answers, self.used = [], [], [], False


class Judge:
    """Judges the steps of all sources with the plugins of one bus.

    Args:
        bus: the plugins.
        settings: how findings become an action, and how often to look.
        put: where records go: ``put(record, urgent)``.
        on_rollback: told (intervention, step of the snapshot) after a rollback.
    """

    def __init__(
        self,
        bus: Bus,
        settings: Settings,
        put: Callable[[Record, bool], None],
        on_rollback: Callable[[Intervention, int], Any] | None = None,
    ) -> None:
        self.bus = bus
        self.settings = settings
        self.policy = settings.policy
        self.put = put
        self.on_rollback = on_rollback
        self.watch: Watch | None = None
        self.findings: deque[Finding] = deque(maxlen=KEPT)
        self.interventions: deque[Intervention] = deque(maxlen=KEPT)
        self.observed = Observed()
        self.steps = 0
        self._arbiters: dict[str, Arbiter] = {}

    def arbiter(self, source: str) -> Arbiter:
        """The arbiter of one source: one network's skips don't count against another's."""
        if source not in self._arbiters:
            self._arbiters[source] = Arbiter(self.policy)
        return self._arbiters[source]

    def observe(self, event: LossEvent) -> None:
        """Take in a loss; the detectors' answers wait for the step."""
        observed = self.observed
        if event.loss is not None:
            observed.losses.append(event.loss)
        if event.batch is not None:
            observed.batches.append(event.batch)
        observed.answers += self.bus.loss(event)

    # -- before the update

    def before(self, source: Source, loss: Any) -> None:
        """Judge the step that is about to happen, and act. Raises GradientSpikeError only on a RAISE verdict."""
        from dynguard.torch import deferred
        from dynguard.torch.embeddings import embedding_events
        from dynguard.torch.reading import read

        watch = self.watch
        assert watch is not None
        watch.dropped.pop(source.name, None)
        observed = self.observed
        if loss is not None and (observed.used or not observed.losses):
            observed.renew()
            observed.losses.append(loss)
        observed.used = True
        source.refresh()
        event = source.gradient_event(observed.losses, observed.batches)
        answers = [*observed.answers, *self.bus.gradients(event)]
        tables: list[EmbeddingEvent] = []
        if watch.lookups is not None:
            tables = self._tables(event, embedding_events(event, watch.lookups))
            for table in tables:
                answers += self.bus.embeddings(table)
            watch.lookups.forget_all_but([s.owned for s in watch.sources])
        if watch.keeper is not None:
            answers += watch.keeper.answers(source)
        if source.changed:
            source.changed = False
            self.put(Names(vector="gradient_norm", names=source.names, source=source.name), False)
        deferring = source.defers_now
        if deferring:
            for late in deferred.exchange(source, answers, event, self._nonsense, watch):
                self.conclude_late(source, late)
        else:
            self._decide(source, event, read(answers, event, self._nonsense, watch.ranks))
        if not source.skipped and self.policy.mode == "guard":
            for table in tables:
                self.bus.adjust_rows(table)
            self.bus.adjust(event)
        if deferring:
            deferred.let_go(event)

    def _tables(self, event: GradientEvent, events: Iterable[EmbeddingEvent]) -> list[EmbeddingEvent]:
        """The events of the tables; look-ups that can't be made out (ids out of range, say) cost no judgement."""
        found: list[EmbeddingEvent] = []
        try:
            found.extend(events)
        except FAILURES as error:
            log.warning("the look-ups of step %d can't be made out: %s: %s", event.step, type(error).__name__, error)
        return found

    def _decide(self, source: Source, event: GradientEvent, reading: Reading) -> None:
        self._record(source, event.step, reading)
        if reading.values.get(OVERFLOW) == 1.0:  # a GradScaler's own skip, carried out by a fused optimizer
            source.rejected = True
            self._look_at_dropped(source, event)
            return
        if not reading.fired and not reading.fired_elsewhere:
            self.arbiter(source.name).clean()
            source.rejected = False
            return
        found, verdict = self._weigh(source, event, reading)
        self.report(found)
        self._act(source, verdict, found)

    def _record(self, source: Source, step: int, reading: Reading) -> None:
        self.put(Metrics(step, reading.values, {"gradient_norm": reading.norms}, source.name), False)

    def _weigh(self, source: Source, event: GradientEvent, reading: Reading) -> tuple[list[Finding], Verdict]:
        """What is known about a step that fired, and the verdict that all ranks come to."""
        watch = self.watch
        assert watch is not None
        found = superseded(self.explain(reading.fired, event.step, source.name))
        can_roll_back = False
        if watch.keeper is not None:
            try:
                found = watch.keeper.examine(source, event, found)
            except FAILURES as error:
                log.warning("the origin of a fault could not be looked for: %s", error, exc_info=error)
            can_roll_back = watch.keeper.can_roll_back
        verdict = self.arbiter(source.name).decide(found, can_roll_back=can_roll_back)
        if watch.ranks is not None:
            verdict = watch.ranks.agree(verdict, event.norms.device)
        return found, verdict

    def conclude_late(self, source: Source, late: Any) -> None:
        """A step judged on the device whose numbers have now arrived: say what happened, and do what is left to do."""
        self._record(source, late.event.step, late.reading)
        quiet = not late.reading.fired and not late.reading.fired_elsewhere
        if quiet or late.reading.values.get(OVERFLOW) == 1.0:
            self.arbiter(source.name).clean()
            return
        found, verdict = self._weigh(source, late.event, late.reading)
        self.report(found)
        accepted = verdict.action is Action.PROCEED and bool(verdict.reason)
        if late.dropped and verdict.action < Action.SKIP and not accepted:
            verdict = verdict.model_copy(update={"action": Action.SKIP})  # a clip came too late
        if verdict.action in (Action.ROLLBACK, Action.RAISE):
            self._act(source, verdict, found)
        elif verdict.action is Action.SKIP or accepted:
            self._note(source, verdict, late.event.step)

    # -- after the update

    def after(self, source: Source) -> None:
        """Look at what the update did, when due; keep what is good; ask for slow faults, when due."""
        step = source.step + 1
        self.steps = max(self.steps, step)
        if self.bus.parameters.calls and not step % self.settings.parameters_every:
            self._look_again(source)
        if self.watch is not None and self.watch.keeper is not None:
            self.watch.keeper.after_step(self.steps)
        if not step % self.settings.diagnose_every:
            self.diagnose(source.step, source.name)

    def _look_again(self, source: Source) -> None:
        from dynguard.torch.reading import any_fired

        event = source.parameter_event()
        fired = any_fired(self.bus.parameters(event), event.norms, self._nonsense_parameters)
        if fired:
            found = self.explain(fired, source.step, source.name)
            keeper = self.watch.keeper if self.watch is not None else None
            verdict = self.arbiter(source.name).decide(found, can_roll_back=keeper is not None and keeper.can_roll_back)
            self.report(found)
            if verdict.action in (Action.ROLLBACK, Action.RAISE):
                self._act(source, verdict, found)

    def dropped(self, source: Source, scaler: Any) -> None:
        """A GradScaler has dropped a step: undo what its forward poisoned, and stop where it drops every one."""
        assert self.watch is not None
        observed, self.observed.used = self.observed, True
        if self.watch.lookups is not None:
            for parameter in source.parameters:
                self.watch.lookups.take(parameter)
        self._look_at_dropped(source, source.gradient_event(observed.losses, observed.batches))
        collapse = self.watch.scaler_collapse(source, scaler)
        if collapse is not None:
            verdict = self.arbiter(source.name).decide([collapse])
            self.report([collapse])
            self._note(source, verdict, source.step)
            if verdict.carried_out and verdict.action is Action.RAISE:
                raise self.stop(verdict, source.step)
        source.step += 1
        self.steps = max(self.steps, source.step)

    def _look_at_dropped(self, source: Source, event: GradientEvent) -> None:
        """What a step that a GradScaler dropped has left behind: a loss that is no overflow, poisoned buffers."""
        keeper = self.watch.keeper if self.watch is not None else None
        found = selfreport.dropped_loss([float(v) for v in event.losses], event.step, source.name)
        if keeper is not None:
            found = keeper.examine(source, event, found) or keeper.poisoned_buffers(source)
        if not found:
            return
        self.report(found)
        top = max(found, key=lambda f: (f.action.rank, bool(f.subject)))
        carried_out = self.policy.mode == "guard"
        if carried_out and keeper is not None:
            keeper.undo()
        verdict = Verdict(action=top.action, subject=top.subject, detector=top.detector, reason=top.kind,
                          carried_out=carried_out)  # fmt: skip
        if verdict.action is Action.ROLLBACK:
            self._act(source, self.arbiter(source.name).decide(found, can_roll_back=keeper is not None
                      and keeper.can_roll_back), found)  # fmt: skip
        else:
            self._note(source, verdict, event.step)

    def diagnose(self, step: int, source: str = "") -> list[Finding]:
        """Ask every detector for slow faults, and report them."""
        found: list[Finding] = []
        for name, call in self.bus.channels["diagnose"].calls:
            items = self.bus.guard(name, "diagnose", lambda call=call: call() or ())  # type: ignore[misc]
            found += self._signed(name, items, step, source, "diagnose")
        self.report(found)
        return found

    def finish(self, sources: Sequence[Source]) -> None:
        """The run ends: what was judged on the device and has not been told yet is told now."""
        from contextlib import suppress

        if self.watch is not None:
            self.watch.ranks = None  # the others may have ended already: nothing is waited for any more
        for source in sources:
            if source.deferred:
                from dynguard.torch import deferred

                for late in deferred.collect(source, wait=True):
                    with suppress(GradientSpikeError):  # the run is over: there is nothing left to stop
                        self.conclude_late(source, late)

    # -- findings

    def explain(self, fired: Iterable[tuple[str, Signal]], step: int, source: str) -> list[Finding]:
        """The findings of all signals that fired, signed with detector, step and source."""
        found: list[Finding] = []
        for name, signal in fired:
            found += self._signed(name, self.bus.guard(name, "explain", signal.explain), step, source, "explain")
        return found

    def _signed(self, name: str, items: Sequence[Any], step: int, source: str, hook: str) -> list[Finding]:
        found = []
        for item in items:
            if not isinstance(item, Finding):
                self.bus.failed(name, hook, TypeError(f"{hook} yields Findings; got {type(item).__name__}"))
                continue
            update: dict[str, Any] = {}
            if not item.detector:
                update["detector"] = name
            if not item.source and source:
                update["source"] = source
            if "step" not in item.model_fields_set:
                update["step"] = step
            found.append(item.model_copy(update=update) if update else item)
        return found

    def report(self, found: Iterable[Finding]) -> None:
        """Keep findings and send them to the sinks."""
        for finding in found:
            self.findings.append(finding)
            self.put(finding, finding.severity >= Severity.WARNING)

    # -- deeds

    def _act(self, source: Source, verdict: Verdict, found: Sequence[Finding]) -> None:
        """Carry the verdict out on the source, then tell."""
        action = verdict.action if verdict.carried_out else Action.PROCEED
        source.rejected = action >= Action.SKIP
        to_step = None
        if action is Action.CLIP:
            source.clip(*limits(found))
        elif action in (Action.SKIP, Action.ROLLBACK):
            source.skip()
        keeper = self.watch.keeper if self.watch is not None else None
        if keeper is not None and action is Action.SKIP:
            keeper.undo()
        elif keeper is not None and keeper.can_roll_back and action in (Action.ROLLBACK, Action.RAISE):
            if action is Action.ROLLBACK or any(f.kind == "nonfinite_param" for f in found):
                to_step = keeper.roll_back()
                verdict = verdict.model_copy(
                    update={"reason": f"{verdict.reason}; back to the weights of step {to_step}"}
                )
            else:
                keeper.undo()
        elif keeper is not None and action is Action.RAISE:
            keeper.undo()
        intervention = self._note(source, verdict, source.step)
        if intervention is None or not verdict.carried_out:
            return
        if action is Action.RAISE:
            raise self.stop(verdict, source.step)
        if to_step is not None and self.on_rollback is not None:
            self._tell_rollback(intervention, to_step)

    def _tell_rollback(self, intervention: Intervention, to_step: int) -> None:
        assert self.on_rollback is not None
        try:
            self.on_rollback(intervention, to_step)
        except FAILURES as error:
            log.warning("on_rollback failed: %s: %s; training goes on", type(error).__name__, error, exc_info=error)

    def _note(self, source: Source | None, verdict: Verdict, step: int) -> Intervention | None:
        """Put an intervention on record and tell the guards."""
        accepted = verdict.action is Action.PROCEED and bool(verdict.reason)
        if not verdict.action.intervenes and not accepted:
            return None
        intervention = verdict.intervention(step, "" if source is None else source.name)
        self.interventions.append(intervention)
        self.put(intervention, True)
        if verdict.carried_out and verdict.action is not Action.RAISE:
            self.bus.channels["on_intervention"].each(intervention)
        return intervention

    def stop(self, verdict: Verdict, step: int) -> GradientSpikeError:
        """The error that ends a run, with its findings and interventions."""
        where = f" in {verdict.subject!r}" if verdict.subject else ""
        return GradientSpikeError(
            f"dynguard stopped the run at step {step}: {verdict.reason}{where} (detector {verdict.detector!r}). "
            "This step was not taken. See error.findings and error.interventions.",
            self.findings,
            self.interventions,
        )

    def _nonsense(self, name: str, error: Exception) -> None:
        self.bus.failed(name, "on_gradients", error)

    def _nonsense_parameters(self, name: str, error: Exception) -> None:
        self.bus.failed(name, "on_parameters", error)


def limits(found: Sequence[Finding]) -> tuple[dict[str, float], dict[str, float]]:
    """(limit, norm) by subject, "" for all gradients together, from the evidence of the findings.

    ``global_limit`` with ``global_norm`` bounds all gradients, ``gradient_limit`` with ``gradient_norm`` the subject's.
    """
    bounds: dict[str, float] = {}
    norms: dict[str, float] = {}
    for finding in found:
        values = {e.name: float(e.value) for e in finding.evidence if isinstance(e.value, (int, float))}
        for subject, scope in ((finding.subject, "gradient"), ("", "global")):
            if f"{scope}_limit" in values:
                bounds[subject] = values[f"{scope}_limit"]
                norms[subject] = values.get(f"{scope}_norm", 0.0)
    return bounds, norms
