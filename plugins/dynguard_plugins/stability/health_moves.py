"""``zombie_layer``, ``dead_layer``, ``moved_frozen``: what moves without a gradient, and what does not move at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from dynguard import Finding, Severity
from dynguard_plugins.stability.health_layers import NEVER, Layers
from dynguard_plugins.stability.health_probe import LAYERS, Probe, can_probe
from dynguard_plugins.stability.health_telling import Moved, dead, frozen, zombie

if TYPE_CHECKING:
    from dynguard.events import GradientEvent

Receiver = Callable[[list[float]], list[Finding]]
WAIT = 3  # updates between the copy and the look
QUIET = 16  # steps in which the answer comes
FROZEN_EVERY, FROZEN_WAIT = 32, 8  # steps between looks for frozen parameters, and updates that one is watched for
AGAIN = 200  # events before a frozen parameter that rested is looked at again
PROBES = 200  # looks per run


class Moves:
    """Probes the parameters of layers whose gradient is zero, and of those that are frozen but still have one.

    Args:
        layers: the rows of zero gradients.
    """

    def __init__(self, layers: Layers) -> None:
        self.layers = layers
        self.clock = 0
        self.probes = 0
        self.told: dict[str, set[int]] = {"zombie": set(), "frozen": set()}
        self._probe: Probe | None = None
        self._frozen: Probe | None = None
        self._rested: dict[int, int] = {}

    def due(self, event: GradientEvent, suspects: Sequence[int]) -> Iterable[tuple[Any, Receiver]]:
        """Start what the suspicion asks for; give (numbers on the device, who takes them) of what is finished."""
        self.clock += 1
        if not suspects and not self.waiting and self.clock % FROZEN_EVERY:
            return ()
        return self._work(event, suspects)

    def _work(self, event: GradientEvent, suspects: Sequence[int]) -> Iterator[tuple[Any, Receiver]]:
        if self._probe is not None:
            yield from self._finish(event, self._probe)
        if self._frozen is not None:
            yield from self._finish_frozen(event, self._frozen)
        if suspects:
            self._start(event, suspects)
        if self._frozen is None and not self.clock % FROZEN_EVERY:
            self._start_frozen(event, range(len(event.parameters)))

    @property
    def waiting(self) -> bool:
        """Whether a probe is under way."""
        return self._probe is not None or self._frozen is not None

    # -- layers whose gradient is zero

    def _start(self, event: GradientEvent, suspects: Sequence[int]) -> None:
        if self._frozen is None:
            self._start_frozen(event, suspects)
        if self._probe is not None or self.probes >= PROBES:
            return
        chosen = [i for i in suspects if _trainable(event, i) and _rate(event, i)][:LAYERS]
        if not chosen:
            return
        self.probes += 1
        self._probe = Probe.of(chosen, event.parameters, self.clock)
        for layer in chosen:
            self.layers.due[layer] = self.layers.row[layer] + QUIET

    def _finish(self, event: GradientEvent, probe: Probe) -> Iterator[tuple[Any, Receiver]]:
        if event.rejected is True:
            self._probe = None  # an update that was held back proves nothing: the suspicion starts it again
        elif self.clock - probe.begun >= WAIT:
            self._probe = None
            names, step = event.names, event.step
            yield probe.distances(event.parameters), lambda values: self._answer(probe, values, names, step)

    def _answer(self, probe: Probe, values: list[float], names: Sequence[str], step: int) -> list[Finding]:
        """Sort the probed layers into those that moved and those that stood still."""
        layers, moved, still = self.layers, [], []
        for layer, numbers in zip(probe.layers, ways(values), strict=True):
            row = int(layers.row[layer])
            if row < WAIT:
                continue  # its gradient has come back
            way = Moved(layer, names[layer], layers.used(layer), row, 1.0 - layers.chance(layer), *numbers)
            if way.material:
                layers.due[layer] = NEVER if layer in self.told["zombie"] else row + 2 * layers.dead_steps
                moved += [way] * (layer not in self.told["zombie"])
                self.told["zombie"].add(layer)
            elif row >= layers.dead_steps:
                layers.due[layer] = NEVER
                still.append(way)
            else:
                layers.due[layer] = layers.dead_steps
        return [*_split(moved, step, zombie, len(names)), *_split(still, step, dead, len(names))]

    # -- frozen parameters

    def _start_frozen(self, event: GradientEvent, among: Sequence[int]) -> None:
        """Watch parameters that need no gradient but have one that the optimizer will use."""
        chosen = [
            i
            for i in among
            if not getattr(event.parameters[i], "requires_grad", True)
            and event.gradients[i] is not None
            and i not in self.told["frozen"]
            and self._rested.get(i, 0) <= self.clock
            and can_probe(event.parameters[i])
        ][:LAYERS]
        if chosen and self.probes < PROBES:
            self.probes += 1
            self._frozen = Probe.of(chosen, event.parameters, self.clock)
            self._frozen.watch(event.gradients)

    def see(self, norms: Any) -> None:
        """Take in the norms of a step: a watched gradient that grows is a fresh one, so its parameter is not frozen."""
        probe = self._frozen
        if probe is None:
            return
        now = [float(norms[i]) for i in probe.layers]
        last = probe.norms or now
        self._keep(probe, [new <= old * (1 + 1e-5) for new, old in zip(now, last, strict=True)], now)

    def _keep(self, probe: Probe, good: Sequence[bool], norms: Sequence[float] = ()) -> None:
        """Go on with those of the probe's parameters that are ``good``."""
        for layer, ok in zip(probe.layers, good, strict=True):
            if not ok:
                self._rested[layer] = self.clock + AGAIN
        norms = norms or probe.norms
        for name in ("layers", "copies", "witnesses"):
            setattr(probe, name, [v for v, ok in zip(getattr(probe, name), good, strict=True) if ok])
        probe.norms = [v for v, ok in zip(norms, good, strict=True) if ok] if norms else []
        if not probe.layers:
            self._frozen = None

    def _finish_frozen(self, event: GradientEvent, probe: Probe) -> Iterator[tuple[Any, Receiver]]:
        stale = [
            ref() is event.gradients[i] and not event.parameters[i].requires_grad
            for i, ref in zip(probe.layers, probe.witnesses, strict=True)
        ]
        self._keep(probe, stale)
        if self._frozen is None or self.clock - probe.begun < FROZEN_WAIT:
            return
        self._frozen = None
        self._rested.update(dict.fromkeys(probe.layers, self.clock + AGAIN))
        names, step = event.names, event.step
        yield probe.distances(event.parameters), lambda values: self._answer_frozen(probe, values, names, step)

    def _answer_frozen(self, probe: Probe, values: list[float], names: Sequence[str], step: int) -> list[Finding]:
        moved = []
        for layer, numbers in zip(probe.layers, ways(values), strict=True):
            found = Moved(layer, names[layer], 0, FROZEN_WAIT, None, *numbers)
            if found.material:
                moved.append(found)
                self.told["frozen"].add(layer)
        return [frozen(moved, step)] if moved else []

    def state_dict(self) -> dict[str, Any]:
        """What was told; a probe that is under way starts anew."""
        return {
            "clock": self.clock, "probes": self.probes, "rested": dict(self._rested),
            "told": {kind: sorted(layers) for kind, layers in self.told.items()},
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up ``state_dict()``."""
        self.clock, self.probes, self._rested = state["clock"], state["probes"], dict(state["rested"])
        self.told = {kind: set(layers) for kind, layers in state["told"].items()}
        self._probe = self._frozen = None


def ways(values: list[float]) -> Iterator[tuple[float, float, float]]:
    """(way, length, product) by parameter, from what Probe.distances() gave."""
    return zip(values[0::3], values[1::3], values[2::3], strict=True)


def _split(moved: list[Moved], step: int, tell: Callable[..., Finding], layers: int) -> Iterator[Finding]:
    """A finding for layers that had a gradient once, and one, mostly an aside, for those that never had."""
    once = [m for m in moved if m.used]
    never = [m for m in moved if not m.used]
    if once:
        yield tell(once, step, Severity.WARNING)
    if never:
        yield tell(never, step, Severity.WARNING if 2 * len(never) >= layers else Severity.INFO)


def _trainable(event: GradientEvent, layer: int) -> bool:
    return getattr(event.parameters[layer], "requires_grad", False) and can_probe(event.parameters[layer])


def _rate(event: GradientEvent, layer: int) -> bool:
    """Whether the layer's learning rate lets it move; one on a device is taken to."""
    rate = event.learning_rates[layer] if len(event.learning_rates) else 0.0
    return not isinstance(rate, (int, float)) or rate > 0
