"""``flow``: the health of the gradient flow, layer by layer: signal, movement, dead units, growth over depth."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field

from dynguard import Finding, Section, Severity, Table, hookimpl, validated
from dynguard_plugins.stability import flow_telling as telling
from dynguard_plugins.stability.flow_judge import Layers, median
from dynguard_plugins.stability.health_precision import NARROW

if TYPE_CHECKING:
    from dynguard.events import GradientEvent
    from dynguard_plugins.stability.flow_sample import Window

WAITING = 32  # windows that wait on the device to be read; older ones are let go


class Watched:
    """What is known about one source.

    Attributes:
        layers: what the windows so far say.
        waiting: finished windows that have not been read yet.
        told: what was told, by kind.
    """

    def __init__(self) -> None:
        self.layers = Layers()
        self.waiting: list[Any] = []
        self.told: dict[str, list[str]] = {}
        self.names: tuple[str, ...] = ()
        self.narrow: frozenset[int] = frozenset()
        self.units: frozenset[int] = frozenset()
        self.tables: frozenset[int] = frozenset()
        self.layout: Any = None
        self.gathering: Any = None
        self.last = -1
        self.findings: list[Finding] = []

    def once(self, kind: str, subject: str) -> bool:
        """Whether this is the first time that ``kind`` is told of ``subject``."""
        told = self.told.setdefault(kind, [])
        if subject in told:
            return False
        told.append(subject)
        return True

    def learn(self, event: GradientEvent) -> None:
        """Lay out the sample anew: parameters have joined."""
        from dynguard_plugins.stability.flow_sample import Layout

        self.names, self.tables = event.names, event.tables
        self.layout = Layout(event.parameters)
        self.narrow = frozenset(i for i, p in enumerate(event.parameters) if str(p.dtype) in NARROW)
        rows = _rows_are_units(event.training.model) if event.training is not None else set()
        self.units = frozenset(i for i, p in enumerate(event.parameters) if id(p) in rows) - event.tables
        self.gathering = None


class Flow:
    """Signal-to-noise, movement, dead units and growth over depth of every layer's gradient.

    Told are ``stagnation`` (a layer that stopped moving while its gradient is alive, with the cause as far as it can
    be known: a learning rate of 0, which is only an aside; a second moment blown up by a spike that is long gone;
    rounding), ``dead_units`` (rows of a Linear or Conv weight whose gradient is exactly zero at every sampled step of
    three windows while others have one), ``exploding_gradients`` and ``vanishing_gradients`` (gradient norms of at
    least six like layers that change geometrically with depth). A layer whose gradient is zero as a whole, and updates
    lost in bf16 or fp16, are told by ``health``.

    The signal-to-noise ratio in ``summarize()`` is ``|E g|^2 / tr Var g`` over successive steps (McCandlish et al.
    2018, "An empirical model of large-batch training", arXiv:1812.06162), on a sample of entries; its inverse is the
    gradient noise scale in batches. As successive steps have different weights, the variance holds what the gradient
    itself changed within a window, so the ratio is a lower bound where training moves fast.

    Cost: every ``every`` steps n small copies of at most 2,048 entries of each of n gradients and some 10 passes over
    at most 65,536 numbers; three times a ``window`` the same of the parameters, and once of the optimizer's second
    moments. Nothing is read from the device but in ``diagnose``, ``summarize`` and ``state_dict``; until then up to 32
    windows of 131 kB wait there.

    Args:
        every: steps between samples of the gradients.
        window: steps that are judged together; at least 5 samples.
        dead_info: share of dead units in a layer from which on it is told as an aside.
        dead_warning: share from which on it is a warning. Half of the units of a deep ReLU net may be dead from its
            (default) initialisation on, and it still learns.
    """

    @validated
    def __init__(
        self,
        *,
        every: Annotated[int, Field(ge=1)] = 4,
        window: Annotated[int, Field(ge=5)] = 100,
        dead_info: Annotated[float, Field(gt=0, le=1)] = 0.3,
        dead_warning: Annotated[float, Field(gt=0, le=1)] = 0.8,
    ) -> None:
        self.every, self.window = every, max(window, 5 * every)
        self.dead_info, self.dead_warning = dead_info, dead_warning
        self._watched: dict[str, Watched] = {}

    @hookimpl(trylast=True)  # the norms are made by whoever asks first, and are not this plugin's cost
    def on_gradients(self, event: GradientEvent) -> None:
        """Sample, when due; the numbers stay on the device."""
        if not len(event.parameters) or not hasattr(event.parameters[0], "layout"):
            return  # no tensors
        watched = self._watched.get(event.source)
        if watched is None:
            watched = self._watched[event.source] = Watched()
        gathering = watched.gathering
        if gathering is not None and event.step > watched.last:
            if gathering.pending is not None or event.rejected is not False:
                gathering.settle(event.rejected if event.step == watched.last + 1 else False)
            if gathering.way is None:
                gathering.look(event)
        watched.last = event.step if event.step >= watched.last else -1
        if watched.last < 0:
            watched.gathering, watched.last = None, event.step  # rolled back: what was gathered is of another past
        if watched.layout is None or watched.layout.count != len(event.parameters):
            watched.learn(event)
        if watched.layout.sections:
            self._gather(watched, event)

    def _gather(self, watched: Watched, event: GradientEvent) -> None:
        from dynguard_plugins.stability.flow_sample import Gathering

        gathering = watched.gathering
        if gathering is not None and event.step - gathering.begun >= self.window:
            watched.waiting = [*watched.waiting, gathering.finish(event)][-WAITING:]
            gathering = None
        if gathering is None:
            gathering = watched.gathering = Gathering.of(event, watched.layout)
        if not (event.step - gathering.begun) % self.every:
            gathering.take(event)

    @hookimpl
    def diagnose(self) -> Iterator[Finding]:
        """What the windows since the last time say. Reads the device."""
        for source, watched in self._watched.items():
            self._read(watched)
            found, watched.findings = watched.findings, []
            yield from (f.model_copy(update={"source": source}) if source else f for f in found)

    def _read(self, watched: Watched) -> None:
        """Judge the windows that wait, in their order."""
        waiting, watched.waiting = watched.waiting, []
        for window in waiting:
            watched.layers.take(window, watched.units)
            watched.findings += self._judge(watched, window)

    def _judge(self, watched: Watched, window: Window) -> Iterator[Finding]:
        layers, names, step = watched.layers, window.names, window.step
        resting = [names[i] for i in layers.frozen() if watched.once("frozen", names[i])]
        if resting:
            yield telling.frozen(resting, step)
        for found in layers.stalled(watched.narrow, watched.tables, window.adaptive):
            if watched.once("stalled", names[found.layer]):
                yield telling.stalled(found, names[found.layer], step)
        for layer, share in layers.dead.items():
            if share >= self.dead_info:
                yield from self._dead(watched, layer, names[layer], step)
        for chain in layers.chains(names):
            kind = "exploding" if chain.factor > 1 else "vanishing"
            finding = telling.chain(chain, names, step)
            if watched.once(f"{kind}_{finding.severity}", ""):
                yield finding

    def _dead(self, watched: Watched, layer: int, name: str, step: int) -> Iterable[Finding]:
        share, rows = watched.layers.dead[layer], len(watched.layers.streaks[layer])
        serious = share >= self.dead_warning and layer not in watched.narrow
        if not serious and name in watched.told.get("dead_warning", ()):
            return
        if watched.once("dead_warning" if serious else "dead_info", name):
            yield telling.dead_units(share, rows, name, step, Severity.WARNING if serious else Severity.INFO)

    @hookimpl
    def summarize(self) -> Section | None:
        """A table of all layers: velocity, gradient norm, signal-to-noise ratio, dead units, status."""
        tables = []
        for source, watched in self._watched.items():
            self._read(watched)
            if watched.layers.history:
                tables.append(_table(source, watched))
        if not tables:
            return None
        return Section(
            title="Gradient flow",
            text="Velocity is the length of one update over that of the weights, gradient norm and signal-to-noise "
            "ratio |E g|^2 / tr Var g are those of a window of steps; medians over the windows. The inverse of the "
            "ratio is the gradient noise scale in batches.",
            tables=tuple(tables),
        )

    def state_dict(self) -> dict[str, Any]:
        """What the windows said and what was told. A window under way starts anew."""
        saved = {}
        for source, watched in self._watched.items():
            self._read(watched)
            saved[source] = {
                "layers": watched.layers.state_dict(), "names": list(watched.names),
                "told": {kind: list(subjects) for kind, subjects in watched.told.items()},
                "findings": [f.model_dump_json() for f in watched.findings],
            }  # fmt: skip
        return saved

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up ``state_dict()``."""
        self._watched = {}
        for source, saved in state.items():
            watched = self._watched[source] = Watched()
            watched.layers.load_state_dict(saved["layers"])
            watched.names = tuple(saved["names"])
            watched.told = {kind: list(subjects) for kind, subjects in saved["told"].items()}
            watched.findings = [Finding.model_validate_json(text) for text in saved["findings"]]


def _rows_are_units(model: Any) -> set[int]:
    """``id`` of the weights of Linear and Conv modules: each row holds what comes into one unit."""
    from torch import nn

    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    several = model.values() if isinstance(model, Mapping) else model if isinstance(model, (list, tuple)) else [model]
    modules = (m for item in several if isinstance(item, nn.Module) for m in item.modules())
    return {id(m.weight) for m in modules if isinstance(m, kinds)}


def _table(source: str, watched: Watched) -> Table:
    layers = watched.layers
    with np.errstate(all="ignore"):
        velocity = median(layers.series("speed") / layers.series("weight"))
    gradient, snr = median(layers.series("gradient")), median(layers.series("snr"))
    rows = tuple(
        (
            name, _number(velocity[i]), _number(gradient[i]), _number(max(snr[i], 0.0)),
            round(layers.dead[i], 4) if i in layers.dead else None, _status(watched, i, name),
        )
        for i, name in enumerate(watched.names[: len(snr)])
    )  # fmt: skip
    return Table(title=source, columns=("layer", "velocity", "gradient norm", "SNR", "dead units", "status"), rows=rows)


def _status(watched: Watched, layer: int, name: str) -> str:
    if layer in watched.layers.frozen():
        return "frozen"
    if watched.layers.slow.get(layer, 0) > 1 and name in watched.told.get("stalled", ()):
        return "stagnant"
    if name in watched.told.get("dead_warning", ()):
        return "dead units"
    return "moving" if watched.layers.last["net"][layer] > 0 else "at rest"


def _number(value: float) -> float | None:
    return float(f"{value:.4g}") if np.isfinite(value) else None
