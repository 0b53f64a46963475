"""``eos``: how far the loss's sharpness is from what the optimizer's step can bear, and when it will get there."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from dynguard import Finding, Section, Signal, Table, hookimpl, validated
from dynguard_plugins.stability import eos_telling as telling
from dynguard_plugins.stability.eos_along import Along
from dynguard_plugins.stability.eos_forecast import forecast
from dynguard_plugins.stability.eos_thresholds import Edge, UnknownThresholdError, edge

if TYPE_CHECKING:
    from dynguard.events import GradientEvent

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

    Without ``loss_fn`` only the curvature along the update is followed, from successive gradients on a sample of the
    coordinates: a lower bound of the sharpness, and noisy where batches differ. It is reported and never alarms.

    Cost: ``products`` + 1 gradient evaluations every ``every`` steps (by default 4 in 50, about 8 % of a step), up to
    33 at the first check; three vectors of the size of the parameters. Nothing of an evaluation stays: dropout masks,
    BatchNorm statistics and random states are those of a run without it.

    Args:
        every: steps between checks.
        batch: ``latest`` observed, or the ``first`` (kept for the whole run).
        products: products with the Hessian per check.
        tolerance: relative residual above which a number is not believed.
        per_layer: measure one parameter's own block at each check, in turn, instead of the whole model.
        method: ``double_backward`` is exact, at about twice the cost; it falls back where a kernel has no second
            derivative.
    """

    @validated
    def __init__(
        self,
        *,
        every: Annotated[int, Field(ge=1)] = 50,
        batch: Literal["latest", "first"] = "latest",
        products: Annotated[int, Field(ge=1)] = 3,
        tolerance: Annotated[float, Field(gt=0)] = 0.2,
        per_layer: bool = False,
        method: Literal["finite_difference", "double_backward"] = "finite_difference",
    ) -> None:
        self.every, self.batch, self.products = every, batch, products
        self.tolerance, self.per_layer, self.method = tolerance, per_layer, method
        self._watched: dict[str, dict[str, Watched]] = {}
        self._first: dict[str, Any] = {}
        self._along: dict[str, Along] = {}
        self._said: set[str] = set()
        self._failures: dict[str, int] = {}

    @hookimpl(trylast=True)
    def on_gradients(self, event: GradientEvent) -> Signal | None:
        """Measure, when due."""
        training = event.training
        if training is None:
            return None
        if training.loss_fn is None or not (event.batches or event.source in self._first):
            return self._along.setdefault(event.source, Along(self.every)).see(event)
        if self.batch == "first" and event.source not in self._first:
            self._first[event.source] = event.batches[-1]
        if not event.step or event.step % self._period(event.source):
            return None
        found, ratio = self._check(event)
        return Signal(ratio, bool(found), lambda: found)

    def _period(self, source: str) -> int:
        return self.every * (10 if self._failures.get(source, 0) >= PATIENCE else 1)

    def _check(self, event: GradientEvent) -> tuple[list[Finding], float]:
        """The findings of a check, and its ratio (NaN where there is none)."""
        from dynguard.torch.probe import ProbeError

        try:
            check = self._measure(event)
        except (ProbeError, UnknownThresholdError) as error:
            self._failures[event.source] = self._failures.get(event.source, 0) + 1
            return self._unmeasurable(event.step, str(error)), math.nan
        if not check.residual <= self.tolerance:
            why = f"the iteration left a residual of more than {self.tolerance:g} of the value"
            return self._unmeasurable(event.step, why), math.nan
        self._failures[event.source] = 0
        return self._tell(event, check), check.ratio

    def _measure(self, event: GradientEvent) -> Check:
        from dynguard.torch.curvature import Curvature, sharpness
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
        scales, decay = [limits.scales[i] for i in chosen], [limits.decay[i] for i in chosen]
        try:
            found = sharpness(
                Curvature(probe, scales=scales, decay=decay, method=self.method),
                start=watched.vector, products=self.products, tolerance=self.tolerance / 4,
            )  # fmt: skip
        except ProbeError as error:
            if self.method == "finite_difference":
                raise
            log.warning("eos: no second derivative (%s); finite differences of the gradient from here on", error)
            self.method = "finite_difference"
            return self._measure(event)
        watched.vector = found.vector if found.residual <= self.tolerance else None
        size = found.value * limits.threshold if limits.threshold is not None else None
        return Check(event.step, found.value, size, limits.threshold, found.residual, found.gradients, subject,
                     limits.preconditioned)  # fmt: skip

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
            return [telling.at_edge(check, lr)]
        if check.ratio < LEAST_RATIO or check.step <= watched.forecast_until or watched.told_edge:
            return []
        expected = forecast([c.step for c in watched.checks], [c.ratio for c in watched.checks])
        if expected is None or expected.steps > HORIZON * self.every:
            return []
        watched.forecast_until = check.step + math.ceil(min(expected.latest, 2 * HORIZON * self.every))
        return [telling.crossing(check, expected, lr)]

    def _unmeasurable(self, step: int, why: str) -> list[Finding]:
        key = why[:60]
        if key in self._said:
            return []
        self._said.add(key)
        return [telling.unmeasurable(step, why)]

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
                    (source, subject, c.step, _short(c.sharpness), _short(c.threshold), _short(c.ratio),
                     _short(c.residual), c.gradients) for c in shown
                ]  # fmt: skip
        tables = [Table(columns=columns, rows=tuple(rows))] if rows else []
        text = "Sharpness on a batch against the largest that the optimizer's step is stable at (ratio 1)."
        along = tuple((source, *row) for source, a in self._along.items() for row in a.rows())
        if along:
            text += " Along the update (no loss_fn): a lower bound, noisy where batches differ."
            tables.append(Table(columns=("source", "step", "ratio along the update"), rows=along))
        return Section(title="Edge of stability", text=text, tables=tuple(tables)) if tables else None

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
            "said": sorted(self._said),
            "failures": dict(self._failures),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up ``state_dict()``."""
        self._watched = {
            source: {
                subject: Watched([Check(**c) for c in w["checks"]], None, w["told_edge"], w["forecast_until"])
                for subject, w in layers.items()
            }
            for source, layers in state["sources"].items()
        }
        self._said, self._failures = set(state["said"]), dict(state["failures"])


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
