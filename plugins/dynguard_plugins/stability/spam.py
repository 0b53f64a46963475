"""``spam``: element-wise clipping of spikes, and momentum that starts afresh before it carries one for long."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from dynguard import Section, Table, hookimpl, validated
from dynguard_plugins.stability.spam_clip import ElementClip

if TYPE_CHECKING:
    from dynguard.actions import Intervention
    from dynguard.events import GradientEvent, Training

log = logging.getLogger("dynguard")

Name = Literal["clip", "skip", "rollback"]
COUNTERS = ("updates", "age", "position", "span", "start", "due", "resets", "slow")


class Watched:
    """What is known about one source."""

    def __init__(self, clip: ElementClip) -> None:
        self.clip = clip
        self.updates = 0  # that this plugin has seen
        self.age = 0  # updates since the last reset
        self.position = 0  # updates since the learning rate was reduced,
        self.span = 0  # over how many it comes back,
        self.start = 0.0  # and to what factor it was reduced
        self.due = False  # an intervention asks for a reset
        self.resets = 0
        self.slow = 0  # updates at a reduced learning rate
        self.refused: list[str] = []  # why something could not be reset

    def slow_down(self, start: float, span: int) -> None:
        """Reduce the learning rate from the next update on, over ``span`` updates."""
        self.position, self.start, self.span = 0, start, span


class Spam:
    """Spike-aware clipping, and resets of momentum with a warm-up after them.

    SPAM (Huang et al. 2025, arXiv 2501.06842) and Stable-SPAM (arXiv 2502.17055) are optimizers; this is a guard that
    does three of their things to the user's own: it clips entries before the update
    (:class:`~dynguard_plugins.stability.spam_clip.ElementClip` says where that differs), starts the optimizer's moments
    afresh every ``interval`` updates, and lets the learning rate come back along a half cosine over ``warmup`` updates
    after that, the first of them at a factor above 0. It has no sparse momentum and no norm clipping of Stable-SPAM's
    (AdaGN; plugin ``clip`` has others), and none of the papers' results is claimed for it.

    A reset zeroes first and second moments **and the step counters**, so that the bias correction works again; without
    the counters updates would grow to 6.5 times the usual at the defaults of Adam (where v alone is zeroed, the very
    next one to ``1 / sqrt(1 - beta2)`` = 31.6 times). RMSprop and Adadelta correct nothing: only momentum is reset.
    Optimizers without moments under known names (Adagrad, plain SGD) are left alone. Both are said once, and in the
    summary. A reset takes place after clipping and before the update, whose gradient is then the first that the moments
    see.

    The learning rate is multiplied for the very update only, weight decay with it where the optimizer couples them: a
    scheduler sees the rates that it has set, always.

    A reset on an intervention follows a **clip** by default: that step does enter the moments. A skipped step has left
    no trace in them, so that a reset would only cost what they know, and a rollback has restored those of a good step,
    counters included. Both can be asked for, e.g. where what led to the skip is thought to be in the momentum already.
    The repair of single layers after an ``update_spike`` counts as none of these.

    Cost per step, in passes over memory of the gradients' size: spike-aware clipping some 20 (v and g are read, limits
    of at most 2^22 entries at a time are made and compared), adaclip some 9; a reset writes all moments once per
    ``interval``; the warm-up costs nothing. Nothing is read from the device.

    Args:
        clip: ``spike_aware`` (needs an element-wise mean of squares), ``adaclip``, ``auto`` (the former where it can
            be, else the latter) or ``none``.
        theta: of spike_aware; an entry may be sqrt(theta) times the root of its second moment.
        gamma: decay of adaclip's level.
        interval: updates between two resets, None for none.
        warmup: updates over which the learning rate comes back after a reset.
        reset_on: interventions after which the moments are reset before the next update, too.
        lr_reduction: factor to which such an intervention reduces the learning rate, in place of the warm-up and also
            where there was nothing to reset; None leaves the warm-up.
        recovery_steps: updates over which it returns from there.
        cooldown: updates after a reset during which interventions ask for no other: a row of them makes one.
    """

    @validated
    def __init__(
        self,
        *,
        clip: Literal["auto", "spike_aware", "adaclip", "none"] = "auto",
        theta: Annotated[float, Field(gt=1)] = 5000.0,
        gamma: Annotated[float, Field(gt=0, lt=1)] = 0.999,
        interval: Annotated[int, Field(ge=2)] | None = 500,
        warmup: Annotated[int, Field(ge=0)] = 150,
        reset_on: tuple[Name, ...] = ("clip",),
        lr_reduction: Annotated[float, Field(gt=0, le=1)] | None = None,
        recovery_steps: Annotated[int, Field(ge=1)] = 100,
        cooldown: Annotated[int, Field(ge=1)] = 150,
    ) -> None:
        self.clip, self.theta, self.gamma = clip, theta, gamma
        self.interval, self.warmup, self.reset_on = interval, warmup, reset_on
        self.lr_reduction, self.recovery_steps, self.cooldown = lr_reduction, recovery_steps, cooldown
        self._watched: dict[str, Watched] = {}

    @hookimpl
    def adjust_gradients(self, event: GradientEvent) -> None:
        """Clip the entries, reset when due, and set the learning rate of this update."""
        training = event.training
        if training is None:
            return
        watched = self._of(event.source)
        watched.clip.clip(event)
        if watched.due or (self.interval and watched.age >= self.interval):
            self._start_afresh(watched, training, event)
        factor = recovery(watched.position, watched.span, watched.start)
        if factor < 1.0:
            watched.slow += 1
            training.scale_learning_rate(factor)
        watched.updates += 1
        watched.age += 1
        watched.position += 1

    def _start_afresh(self, watched: Watched, training: Training, event: GradientEvent) -> None:
        asked, watched.due, watched.age = watched.due, False, 0
        done = _reset(watched, training.optimizer, event)
        watched.resets += done
        if asked and self.lr_reduction is not None:
            watched.slow_down(self.lr_reduction, self.recovery_steps)
        elif done:
            watched.slow_down(0.0, self.warmup)

    @hookimpl
    def on_intervention(self, intervention: Intervention) -> None:
        """Ask for a reset at the next update that happens; a row of interventions asks for one."""
        if intervention.action.value not in self.reset_on or intervention.reason == "update_spike":
            return
        watched = self._of(intervention.source)
        if watched.age >= self.cooldown or not watched.resets:
            watched.due = True

    def _of(self, source: str) -> Watched:
        watched = self._watched.get(source)
        if watched is None:
            watched = self._watched[source] = Watched(ElementClip(self.clip, self.theta, self.gamma))
        return watched

    @hookimpl
    def summarize(self) -> Section | None:
        """How much was clipped, how often the moments were reset, and what can't be reset."""
        rows = tuple(
            (source, w.updates, w.clip.clipped, w.clip.seen, w.resets, w.slow, "; ".join(w.refused))
            for source, w in self._watched.items()
            if w.updates
        )
        if not rows:
            return None
        columns = ("source", "updates", "entries clipped", "of", "resets", "updates at a lower rate", "not reset")
        every = f"every {self.interval} updates" if self.interval else "never by itself"
        text = f"Clip {self.clip}; moments reset {every}; after {', '.join(self.reset_on) or 'no intervention'}."
        return Section(title="SPAM", text=text, tables=(Table(columns=columns, rows=rows),))

    def state_dict(self) -> dict[str, Any]:
        """Counters, the position in the warm-up, and adaclip's levels."""
        return {
            source: {name: getattr(w, name) for name in COUNTERS}
            | {"clip": w.clip.state_dict(), "refused": list(w.refused)}
            for source, w in self._watched.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up ``state_dict()``."""
        self._watched = {}
        for source, saved in state.items():
            watched = self._of(source)
            for name in COUNTERS:
                setattr(watched, name, saved[name])
            watched.refused = list(saved["refused"])
            watched.clip.load_state_dict(saved["clip"])


def _reset(watched: Watched, optimizer: Any, event: GradientEvent) -> bool:
    """Start the moments of all parameters afresh; whether there were any. Says once why where it can't be done."""
    from dynguard.torch.moments import can_reset, reset_moments

    done = False
    for name, parameter in zip(event.names, event.parameters, strict=True):
        why = can_reset(optimizer, parameter)
        done |= bool(reset_moments(optimizer, parameter))
        never = why and (optimizer.state.get(parameter) or not optimizer.state)
        if never and why not in watched.refused:
            watched.refused.append(why)
            log.warning("spam: the moments of %r can't be reset, or only their momentum: %s", name, why)
    return done


def recovery(position: int, span: int, start: float) -> float:
    """Factor of the learning rate on its way back from ``start`` to 1 along a half cosine.

    Args:
        position: updates since it was reduced, from 0.
        span: number of updates at a reduced rate.
        start: the first factor. At 0 the first update gets what the second of ``span + 1`` would get: one at rate 0
            would move nothing and yet count in the moments.
    """
    if start == 0.0:
        position, span = position + 1, span + 1
    if position >= span:
        return 1.0
    return start + (1.0 - start) * 0.5 * (1.0 - math.cos(math.pi * position / span))
