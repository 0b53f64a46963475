"""``eos``: how far the loss's sharpness is from what the optimizer's step can bear, and when it will get there."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from dynguard import Figure, Finding, Section, Signal, Table, hookimpl, validated
from dynguard.errors import OptionError
from dynguard_plugins.rounding import short
from dynguard_plugins.stability import eos_telling as telling
from dynguard_plugins.stability.eos_along import Along
from dynguard_plugins.stability.eos_forecast import forecast
from dynguard_plugins.stability.eos_thresholds import Edge, UnknownThresholdError, edge

if TYPE_CHECKING:
    from dynguard.events import GradientEvent
    from dynguard.torch.curvature import Sharpness
    from dynguard.torch.probe import Probe

log = logging.getLogger("dynguard")

AT_EDGE = 0.97  # of the threshold, less what a measurement may be off
REARMED = 0.8
LEAST_RATIO = 0.5  # below it no forecast is made
HORIZON = 10  # checks ahead that a forecast looks
KEPT = 2000
PATIENCE = 5  # failed checks, after which only every tenth is tried


@dataclass(slots=True)
class Check:
    """One measurement: ``ratio`` of the sharpness to the threshold; the others where there are such numbers."""

    step: int
    ratio: float
    sharpness: float | None
    threshold: float | None
    residual: float
    gradients: int
    subject: str = ""
    preconditioned: bool = False


@dataclass(slots=True)
class Watched:
    """What is known about one source, or one of its layers."""

    checks: list[Check] = field(default_factory=list)
    vector: Any = None  # to start from; measured afresh after a resume
    doubtful: int = 0  # measurements in a row that left too large a residual
    step: float | None = None  # of the difference, where the usual one was too short
    told_edge: bool = False
    forecast_until: int = -1  # a forecast holds up to this step

    @property
    def last(self) -> Check | None:
        """The newest measurement."""
        return self.checks[-1] if self.checks else None


class Eos:
    """Sharpness against the edge of stability: where it is, and a forecast of when it gets there.

    Full-batch training drives the largest eigenvalue of the Hessian up until it reaches what the optimizer's step can
    bear, 2 / lr for gradient descent, and hovers there (Cohen et al. 2021, arXiv 2103.00065; for Adam and its kin the
    preconditioned one, Cohen et al. 2022, arXiv 2207.14484). Every ``every`` steps it is measured by Lanczos iteration
    on ``loss_fn`` and the newest observed batch, started from the vector found last. A sharpness on one mini-batch is
    an upper estimate of that of all data (largest eigenvalues are convex), so in mini-batch training a larger or fixed
    batch (``batch="first"``) says more.

    Told are the edge (``edge_of_stability``, a warning, once until it has been left), a forecast of the crossing (info)
    and ``unmeasurable`` (info), where the residual is large or the loss can't be evaluated: never a made-up number.

    A forecast goes by the present learning rate, whatever a scheduler will do, and past sharpness is taken at it.

    Without ``loss_fn`` only the curvature along the update is followed, from successive gradients on a sample of the
    coordinates: a lower bound of the sharpness, and noisy where batches differ. It is told as info at most.

    Cost: ``products`` + 1 gradient evaluations every ``every`` steps (by default 4 in 50, about 8 % of a step), up to
    33 at the first check; three vectors of the size of the parameters. Nothing of an evaluation stays: dropout masks,
    BatchNorm statistics and random states are those of a run without it.

    Args:
        every: steps between checks.
        batch: ``latest`` observed, the ``first`` observed (kept for the whole run, not copied), or a batch of your own.
        products: products with the Hessian per check.
        tolerance: relative residual above which a number is not believed.
        per_layer: measure one parameter's own block at each check, in turn, instead of the whole model: the cost is the
            same, a parameter's turn comes every ``every`` x parameters steps.
        method: ``double_backward`` is exact, at about twice the cost; where a kernel has no second derivative it is
            left for finite differences, with a log warning. Weights in half precision are always measured by it.
    """

    @validated
    def __init__(
        self,
        *,
        every: Annotated[int, Field(ge=1)] = 50,
        batch: Any = "latest",
        products: Annotated[int, Field(ge=1)] = 3,
        tolerance: Annotated[float, Field(gt=0)] = 0.2,
        per_layer: bool = False,
        method: Literal["finite_difference", "double_backward"] = "finite_difference",
    ) -> None:
        if isinstance(batch, str) and batch not in ("latest", "first"):
            raise OptionError(f"plugin 'Eos': option 'batch': give 'latest', 'first' or a batch; got {batch!r}.")
        self.every, self.batch, self.products = every, batch, products
        self.tolerance, self.per_layer, self.method = tolerance, per_layer, method
        self._watched: dict[str, dict[str, Watched]] = {}
        self._first: dict[str, Any] = {}
        self._along: dict[str, Along] = {}
        self._said: set[str] = set()
        self._failures: dict[str, int] = {}
        self._methods: dict[str, Literal["finite_difference", "double_backward"]] = {}

    @hookimpl(trylast=True)
    def on_gradients(self, event: GradientEvent) -> Signal | None:
        """Measure, when due."""
        training = event.training
        if training is None:
            return None
        if not isinstance(self.batch, str):
            self._first[event.source] = self.batch
        elif self.batch == "first" and event.batches:
            self._first.setdefault(event.source, event.batches[-1])
        if training.loss_fn is None or not (event.batches or event.source in self._first):
            return self._along.setdefault(event.source, Along(self.every)).see(event)
        if not event.step or event.step % self._period(event.source):
            return None
        found, ratio = self._check(event)
        return Signal(ratio, bool(found), lambda: found) if found or math.isfinite(ratio) else None

    @hookimpl
    def diagnose(self) -> Iterable[Finding]:
        """What is known without ``loss_fn``."""
        for source, along in self._along.items():
            seen = along.edge()
            if seen:
                yield telling.along_edge(along.ratios[-1][0], source, seen)
            if along.why:
                yield from self._unmeasurable(0, along.why, source)

    def _period(self, source: str) -> int:
        return self.every * (10 if self._failures.get(source, 0) >= PATIENCE else 1)

    def _check(self, event: GradientEvent) -> tuple[list[Finding], float]:
        """The findings of a check, and its ratio (NaN where there is none)."""
        from dynguard.torch.probe import ProbeError

        try:
            check = self._measure(event)
        except (ProbeError, UnknownThresholdError) as error:
            self._failures[event.source] = self._failures.get(event.source, 0) + 1
            return self._unmeasurable(event.step, str(error), event.source), math.nan
        if not (check.residual <= self.tolerance and math.isfinite(check.ratio)):
            self._failures[event.source] = self._failures.get(event.source, 0) + 1
            why = f"the iteration left a residual of more than {self.tolerance:g} of the value"
            return self._unmeasurable(event.step, why, event.source), math.nan
        self._failures[event.source] = 0
        return self._tell(event, check), check.ratio

    def _measure(self, event: GradientEvent) -> Check:
        from dynguard.torch.probe import Probe, ProbeError

        training = event.training
        assert training is not None
        assert training.loss_fn is not None
        limits = edge(training, event.parameters)
        chosen = self._chosen(event, limits)
        if not chosen:
            raise ProbeError("no parameter has a gradient and an optimizer state yet")
        subject = event.names[chosen[0]] if self.per_layer else ""
        watched = self._watched.setdefault(event.source, {}).setdefault(subject, Watched())
        batch = self._first.get(event.source, event.batches[-1] if event.batches else None)
        probe = Probe(training.model, training.loss_fn, batch, [event.parameters[i] for i in chosen])
        found = self._sharpness(
            event.source, watched, probe, [limits.scales[i] for i in chosen], [limits.decay[i] for i in chosen]
        )
        watched.doubtful = 0 if found.residual <= self.tolerance else watched.doubtful + 1
        watched.vector = found.vector if watched.doubtful < 2 else None  # the second time the vector is given up
        limit = limits.threshold
        size = found.value * limit if limit is not None else None
        return Check(event.step, found.value, size, limit, found.residual, found.gradients, subject,
                     limits.preconditioned)  # fmt: skip

    def _sharpness(
        self, source: str, watched: Watched, probe: Probe, scales: list[Any], decay: list[float]
    ) -> Sharpness:
        """Measure, by finite differences where the method asked for fails (and they do not)."""
        from dynguard.torch.curvature import HALF, Curvature, sharpness
        from dynguard.torch.probe import ProbeError

        half = any(p.dtype in HALF for p in probe.parameters)
        method = "double_backward" if half else self._methods.get(source, self.method)

        def measure(method: Literal["finite_difference", "double_backward"]) -> Sharpness:
            curvature = Curvature(probe, scales=scales, decay=decay, method=method, step=watched.step)
            found = sharpness(curvature, start=watched.vector, products=self.products, tolerance=self.tolerance / 4)
            if found.coarse:
                watched.step = curvature.step
            if found.residual > self.tolerance:
                watched.step = None  # the longer one is no better
            return found

        try:
            return measure(method)
        except ProbeError as error:
            if half or method == "finite_difference":
                raise
            found = measure("finite_difference")  # where this fails too, it was not for want of a second derivative
            log.warning("eos: no second derivative (%s); finite differences of the gradient from here on", error)
            self._methods[source] = "finite_difference"
            return found

    def _chosen(self, event: GradientEvent, limits: Edge) -> list[int]:
        """Which parameters the probe moves: those that train; of these one in turn where layers are told apart."""
        able = [
            i
            for i, (p, g) in enumerate(zip(event.parameters, event.gradients, strict=True))
            if g is not None
            and limits.scales[i] is not None
            and p.requires_grad
            and p.is_floating_point()
            and p.numel()
        ]
        if not self.per_layer or not able:
            return able
        return [able[(event.step // self.every) % len(able)]]

    def _tell(self, event: GradientEvent, check: Check) -> list[Finding]:
        watched = self._watched[event.source][check.subject]
        before = watched.last
        watched.checks.append(check)
        del watched.checks[:-KEPT]
        rates = {float(r) for r in event.learning_rates}
        lr = next(iter(rates)) if len(rates) == 1 else None
        if check.ratio < REARMED:
            watched.told_edge = False
        if before is not None and min(check.ratio, before.ratio) >= AT_EDGE:
            if watched.told_edge:
                return []
            watched.told_edge = True
            return [telling.at_edge(check, lr, AT_EDGE)]
        if check.ratio < LEAST_RATIO or check.step <= watched.forecast_until or watched.told_edge:
            return []
        expected = forecast([c.step for c in watched.checks], [_at(c, check.threshold) for c in watched.checks])
        horizon = HORIZON * (check.step - before.step if before is not None else self.every)
        if expected is None or expected.steps > horizon:
            return []
        watched.forecast_until = check.step + math.ceil(min(expected.latest, 2 * horizon))
        return [telling.crossing(check, expected, lr)]

    def _unmeasurable(self, step: int, why: str, source: str) -> list[Finding]:
        key = f"{source}: {why[:60]}"
        if key in self._said:
            return []
        self._said.add(key)
        return [telling.unmeasurable(step, why).model_copy(update={"source": source})]

    def checks(self, source: str = "", subject: str = "") -> list[Check]:
        """All measurements of a source (and layer) so far, oldest first."""
        watched = self._watched.get(source, {}).get(subject)
        return list(watched.checks) if watched else []

    @hookimpl
    def summarize(self) -> Section | None:
        """What was measured."""
        columns = ("source", "layer", "step", "sharpness", "threshold", "ratio", "residual", "gradients")
        rows: list[tuple[Any, ...]] = []
        for source, layers in self._watched.items():
            for subject, watched in layers.items():
                shown = watched.checks[:: max(1, len(watched.checks) // 20)]
                rows += [
                    (source, subject, c.step, short(c.sharpness), short(c.threshold), short(c.ratio),
                     short(c.residual), c.gradients) for c in shown
                ]  # fmt: skip
        tables = [Table(columns=columns, rows=tuple(rows))] if rows else []
        text = "Sharpness on a batch against the largest that the optimizer's step is stable at (ratio 1)."
        along = tuple((source, *row) for source, a in self._along.items() for row in a.rows())
        if along:
            text += " Along the update (no loss_fn, or no batch observed): a lower bound, noisy where batches differ."
            tables.append(Table(columns=("source", "step", "ratio along the update"), rows=along))
        if not tables:
            return None
        figures = tuple(
            _figure(s, w.checks) for s, layers in self._watched.items() for w in layers.values() if w.checks
        )
        return Section(title="Edge of stability", text=text, tables=tuple(tables), figures=figures[:4])

    def state_dict(self) -> dict[str, Any]:
        """All measurements and what was told. The vector to start from is not kept: the first check is a cold one."""
        return {
            "sources": {
                source: {
                    subject: {"checks": [asdict(c) for c in w.checks], "told_edge": w.told_edge,
                              "forecast_until": w.forecast_until}
                    for subject, w in layers.items()
                }
                for source, layers in self._watched.items()
            },
            "along": {source: a.state_dict() for source, a in self._along.items()},
            "said": sorted(self._said),
            "failures": dict(self._failures),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up ``state_dict()``."""
        self._watched = {
            source: {
                subject: Watched(
                    [Check(**c) for c in w["checks"]], told_edge=w["told_edge"], forecast_until=w["forecast_until"]
                )
                for subject, w in layers.items()
            }
            for source, layers in state["sources"].items()
        }
        self._said, self._failures = set(state["said"]), dict(state["failures"])
        self._along = {}
        for source, saved in state.get("along", {}).items():
            self._along[source] = Along(self.every)
            self._along[source].load_state_dict(saved)


def _at(check: Check, threshold: float | None) -> float:
    """The ratio that a past sharpness would have at the present threshold."""
    return check.ratio if check.sharpness is None or threshold is None else check.sharpness / threshold


def _figure(source: str, checks: list[Check]) -> Figure:
    shown = checks[:: max(1, len(checks) // 200)]
    name = " ".join(part for part in (source, checks[-1].subject) if part)
    return Figure(
        title=f"Sharpness over threshold{': ' + name if name else ''}",
        x=tuple(c.step for c in shown),
        series={"ratio": tuple(short(c.ratio) for c in shown), "edge": (1.0,) * len(shown)},
        x_label="step",
        y_label="ratio",
        alt=f"ratio of sharpness to threshold over {len(checks)} checks, {checks[0].ratio:.3g} at first, "
        f"{checks[-1].ratio:.3g} at last",
    )
