"""The judge: runs one step through the plugins, decides, and carries the decision out on the source."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dynguard.actions import Action, Arbiter, Intervention, Policy, Verdict
from dynguard.bus import Bus
from dynguard.errors import GradientSpikeError
from dynguard.events import GradientEvent, LossEvent
from dynguard.findings import Finding, Metrics, Names, Record, Severity
from dynguard.signals import Signal

if TYPE_CHECKING:
    from dynguard.torch.source import Source

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
        policy: how findings become an action.
        put: where records go: ``put(record, urgent)``.
        parameters_every: every how many steps the parameters are looked at after the update.
        diagnose_every: every how many steps slow faults are asked for.
    """

    def __init__(
        self,
        bus: Bus,
        policy: Policy,
        put: Callable[[Record, bool], None],
        *,
        parameters_every: int,
        diagnose_every: int,
    ) -> None:
        self.bus = bus
        self.policy = policy
        self.put = put
        self.parameters_every = parameters_every
        self.diagnose_every = diagnose_every
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

    def before(self, source: Source, loss: Any) -> None:
        """Judge the step that is about to happen, and act. Raises GradientSpikeError only on a RAISE verdict."""
        from dynguard.torch.reading import read

        observed = self.observed
        if loss is not None and (observed.used or not observed.losses):
            observed.renew()
            observed.losses.append(loss)
        observed.used = True
        source.refresh()
        event = source.gradient_event(observed.losses, observed.batches)
        answers = self.bus.gradients(event) if not observed.answers else observed.answers + self.bus.gradients(event)
        reading = read(answers, event, self._nonsense)
        if source.changed:
            source.changed = False
            self.put(Names(vector="gradient_norm", names=source.names, source=source.name), False)
        self.put(Metrics(source.step, reading.values, {"gradient_norm": reading.norms}, source.name), False)
        arbiter = self.arbiter(source.name)
        if reading.fired:
            found = self.explain(reading.fired, source.step, source.name)
            verdict = arbiter.decide(found)
            self.report(found)
            self._act(source, event, verdict, found)
        else:
            arbiter.consecutive = 0
            source.rejected = False
        if not source.skipped:
            self.bus.adjust(event)

    def after(self, source: Source) -> None:
        """Look at what the update did, when due; ask for slow faults, when due."""
        step = source.step + 1
        self.steps = max(self.steps, step)
        if self.bus.parameters.calls and not step % self.parameters_every:
            self._look_again(source)
        if not step % self.diagnose_every:
            self.diagnose(source.step, source.name)

    def _look_again(self, source: Source) -> None:
        from dynguard.torch.reading import any_fired

        event = source.parameter_event()
        fired = any_fired(self.bus.parameters(event), event.norms, self._nonsense_parameters)
        if fired:
            found = self.explain(fired, source.step, source.name)
            verdict = self.arbiter(source.name).decide(found)
            self.report(found)
            self._conclude(source, verdict)

    def diagnose(self, step: int, source: str = "") -> list[Finding]:
        """Ask every detector for slow faults, and report them."""
        found: list[Finding] = []
        for name, call in self.bus.channels["diagnose"].calls:
            items = self.bus.guard(name, "diagnose", lambda call=call: call() or ())  # type: ignore[misc]
            found += self._signed(name, items, step, source, "diagnose")
        self.report(found)
        return found

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

    def _act(self, source: Source, event: GradientEvent, verdict: Verdict, found: Sequence[Finding]) -> None:
        source.rejected = verdict.carried_out and verdict.action >= Action.SKIP
        if verdict.carried_out and verdict.action is Action.CLIP:
            source.clip(*_limits(found))
        elif verdict.carried_out and verdict.action in (Action.SKIP, Action.ROLLBACK):
            source.skip()
        self._conclude(source, verdict)

    def _conclude(self, source: Source, verdict: Verdict) -> None:
        accepted = verdict.action is Action.PROCEED and bool(verdict.reason)
        if not verdict.action.intervenes and not accepted:
            return
        intervention = verdict.intervention(source.step, source.name)
        self.interventions.append(intervention)
        self.put(intervention, True)
        if not verdict.carried_out:
            return
        if verdict.action is Action.RAISE:
            raise self.stop(verdict, source.step)
        self.bus.channels["on_intervention"].each(intervention)

    def stop(self, verdict: Verdict, step: int) -> GradientSpikeError:
        """The error that ends a run, with its findings and interventions."""
        where = f" in {verdict.subject!r}" if verdict.subject else ""
        return GradientSpikeError(
            f"dynguard stopped the run at step {step}: {verdict.reason}{where} (detector {verdict.detector!r}). "
            "The weights are those before this step. See error.findings and error.interventions.",
            self.findings,
            self.interventions,
        )

    def _nonsense(self, name: str, error: Exception) -> None:
        self.bus.failed(name, "on_gradients", error)

    def _nonsense_parameters(self, name: str, error: Exception) -> None:
        self.bus.failed(name, "on_parameters", error)


def _limits(found: Sequence[Finding]) -> tuple[dict[str, float], dict[str, float]]:
    """(limit, norm) by subject, "" for all gradients together, from the evidence of the findings that ask to clip.

    ``global_limit`` with ``global_norm`` bounds all gradients, ``gradient_limit`` with ``gradient_norm`` the subject's.
    """
    limits: dict[str, float] = {}
    norms: dict[str, float] = {}
    for finding in found:
        values = {e.name: float(e.value) for e in finding.evidence if isinstance(e.value, (int, float))}
        for subject, scope in ((finding.subject, "gradient"), ("", "global")):
            if finding.action is Action.CLIP and f"{scope}_limit" in values:
                limits[subject] = values[f"{scope}_limit"]
                norms[subject] = values.get(f"{scope}_norm", 0.0)
    return limits, norms
