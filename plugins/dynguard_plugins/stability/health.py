"""``health``: slow faults and mistakes in the training loop, from numbers that a step has on the host anyway."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field

from dynguard import Finding, Signal, hookimpl, validated
from dynguard.arrays import local
from dynguard_plugins.stability.health_clip import Clip
from dynguard_plugins.stability.health_layers import Layers
from dynguard_plugins.stability.health_moves import Moves
from dynguard_plugins.stability.health_precision import NARROW, Precision
from dynguard_plugins.stability.health_rates import Rates
from dynguard_plugins.stability.health_stray import Stray

if TYPE_CHECKING:
    from dynguard.events import GradientEvent

Receiver = Callable[[list[float]], list[Finding]]


class Watched:
    """All that is known about one source, and the findings that wait to be told."""

    PARTS = ("rates", "clip", "layers", "moves", "precision")

    def __init__(self, *, lr_ratio: float, clip_steps: int, zero_steps: int, dead_steps: int) -> None:
        self.rates = Rates(lr_ratio)
        self.clip = Clip(clip_steps)
        self.layers = Layers(zero_steps, dead_steps)
        self.moves = Moves(self.layers)
        self.precision = Precision()
        self.stray = Stray()
        self.pending: list[Finding] = []
        self.suspicious = False

    def see(self, step: int, norms: Any, have: Sequence[Any], stray: bool) -> None:
        """Take in the (n,) norms of a step on the host.

        Args:
            step: of the event.
            norms: (n,) gradient norms.
            have: n entries, None where there is no gradient; or none at all if that is not known.
            stray: whether the gradients look used already.
        """
        count = int(np.count_nonzero(norms))
        self.suspicious = self.layers.see(norms, have, count)
        self.clip.see(norms)
        if self.moves.waiting:
            self.moves.see(norms)
        again = self.stray.see(step, norms, stray)
        if again is not None:
            self.pending.append(again)

    def looks(self, event: GradientEvent) -> list[tuple[Any, Receiver]]:
        """What was suspected earlier and is now to be looked at: (numbers on the device, who takes them)."""
        if self.clip.due:
            self.pending += self.clip.judge(event)
        suspects = self.layers.suspects() if self.suspicious else ()
        found = list(self.moves.due(event, suspects))
        narrow = self.precision.due(event)
        return found if narrow is None else [*found, narrow]

    def tell(self) -> Iterable[Finding]:
        """The findings that wait; they are told once."""
        told, self.pending = self.pending, []
        return told

    def state_dict(self) -> dict[str, Any]:
        """The state of all parts. Probes under way, and the identity of gradients, do not outlive a process."""
        return {name: getattr(self, name).state_dict() for name in self.PARTS} | {
            "pending": list(self.pending), "stray_told": self.stray.told, "suspicious": self.suspicious,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up ``state_dict()``."""
        for name in self.PARTS:
            getattr(self, name).load_state_dict(state[name])
        self.pending, self.stray.told = list(state["pending"]), state["stray_told"]
        self.suspicious = state["suspicious"]


class Health:
    """Slow faults and mistakes in the loop: lost schedules, wrong clips, layers that rest or move when they should not.

    Told are ``lr_jump`` (the learning rate leaps and no scheduler that continues the run asked for it),
    ``clip_saturated`` (the gradient norm is the same number at every step; a clip before ``scaler.unscale_`` is known
    by its norm, a round number over the loss scale), ``zombie_layer`` and ``dead_layer`` (a gradient that is present
    but exactly zero, with a parameter that moves or does not), ``moved_frozen`` (a parameter with
    ``requires_grad=False`` that the optimizer moves), ``lost_updates`` (updates that vanish in the rounding of bf16 or
    fp16 weights) and ``stray_step`` (``optimizer.step()`` twice on the same gradients).

    A clean step costs a few comparisons of numbers that are read anyway. What looks wrong is looked at again, with
    copies of parameters or the scheduler and scaler themselves, before anything is said. All findings ask to warn
    only. Off the CPU they come one step later, and the largest layer's gradient norm is recorded as the score.

    Args:
        lr_ratio: a learning rate that rises by this factor in one step is a jump.
        clip_steps: steps in a row with one global norm before it is taken for a clip.
        zero_steps: steps in a row with a zero gradient before a layer is looked at.
        dead_steps: steps in a row with a zero gradient after which a layer that stands still is dead.
    """

    @validated
    def __init__(
        self,
        *,
        lr_ratio: Annotated[float, Field(gt=1)] = 5.0,
        clip_steps: Annotated[int, Field(ge=5)] = 15,
        zero_steps: Annotated[int, Field(ge=3)] = 5,
        dead_steps: Annotated[int, Field(ge=10)] = 50,
    ) -> None:
        self.lr_ratio, self.clip_steps = lr_ratio, clip_steps
        self.zero_steps, self.dead_steps = zero_steps, dead_steps
        self._watched: dict[str, Watched] = {}

    @hookimpl(trylast=True)  # the norms are made by whoever asks first, and are not this plugin's cost
    def on_gradients(self, event: GradientEvent) -> Signal | None:
        """Compare the step with the last ones; None where there is nothing to say and nothing to read."""
        watched = self._watched.get(event.source)
        if watched is None:
            watched = self._watched[event.source] = self._fresh()
            watched.clip.narrow = any(str(getattr(g, "dtype", "")) in NARROW for g in event.gradients)
        jumps = watched.rates.see(event)
        if jumps:
            watched.pending += jumps
        watched.stray.before(event)
        norms = local(event.norms)
        if isinstance(norms, np.ndarray):
            watched.see(event.step, norms, event.gradients, watched.stray.suspect)
            looks = watched.looks(event)
            return _signal(watched, looks) if looks or watched.pending else None
        return self._on_device(event, watched, norms)

    def _on_device(self, event: GradientEvent, watched: Watched, norms: Any) -> Signal:
        """The same where the norms will be read by the bus: they come back through ``learn``."""
        have = [None if g is None else True for g in event.gradients] if watched.layers.absent else ()
        step, stray = event.step, watched.stray.suspect

        def see(values: list[float]) -> list[Finding]:
            watched.see(step, np.array(values, np.float32), have, stray)
            return []

        return _signal(watched, [(norms, see), *watched.looks(event)])

    def _fresh(self) -> Watched:
        return Watched(
            lr_ratio=self.lr_ratio, clip_steps=self.clip_steps, zero_steps=self.zero_steps, dead_steps=self.dead_steps
        )

    @hookimpl
    def diagnose(self) -> Iterator[Finding]:
        """What was found at the last step of a run, which no further step tells."""
        for source, watched in self._watched.items():
            for finding in watched.tell():
                yield finding.model_copy(update={"source": source}) if source else finding

    def state_dict(self) -> dict[str, Any]:
        """Counts, rates and what was told, of all sources."""
        return {source: watched.state_dict() for source, watched in self._watched.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up ``state_dict()``."""
        self._watched = {source: self._fresh() for source in state}
        for source, saved in state.items():
            self._watched[source].load_state_dict(saved)


def _signal(watched: Watched, looks: list[tuple[Any, Receiver]]) -> Signal:
    """A signal whose score brings the looks' numbers to the host with the bus's one read."""
    if not looks:
        return Signal(float(len(watched.pending)), True, watched.tell)

    def learn(values: list[float]) -> None:
        start = 0
        for numbers, receive in looks:
            stop = start + numbers.shape[0]
            watched.pending += receive(values[start:stop])
            start = stop

    return Signal(_joined([numbers for numbers, _ in looks]), bool(watched.pending), watched.tell, learn=learn)


def _joined(parts: list[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    import torch

    return torch.cat([part.to(parts[0], non_blocking=True) for part in parts])
