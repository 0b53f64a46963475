"""``clip``: bounds the gradients of every step that happens, by one of five published rules."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field

from dynguard import Action, Section, Table, hookimpl, validated
from dynguard.arrays import local
from dynguard.errors import OptionError
from dynguard_plugins.stability.clip_numbers import choose, is_tensor
from dynguard_plugins.stability.clip_rules import AdaGC, AutoClip, Measured, Norm, Rule, ZClip
from dynguard_plugins.stability.clip_scaling import scale
from dynguard_plugins.stability.clip_units import UnitWise

if TYPE_CHECKING:
    from dynguard.actions import Intervention
    from dynguard.events import GradientEvent

log = logging.getLogger("dynguard")

Positive = Annotated[float | None, Field(gt=0)]
# The published default of every option that a rule has.
DEFAULTS: dict[str, dict[str, Any]] = {
    "norm": {"max_norm": 1.0},
    "zclip": {"decay": 0.97, "z_threshold": 2.5, "warmup": 25, "max_norm": None},
    "adagc": {"ratio": 1.05, "decay": 0.98, "warmup": 100, "max_norm": 1.0},
    "autoclip": {"percentile": 10.0, "history": 10_000, "max_norm": None},
    "agc": {"ratio": 0.01, "eps": 1e-3, "exclude": None},
}
RULES: dict[str, type] = {"norm": Norm, "zclip": ZClip, "adagc": AdaGC, "autoclip": AutoClip}


@dataclass(slots=True)
class Watched:
    """What is known about one source: its rule, the step that waits to be accepted, and how much was clipped."""

    rule: Rule | UnitWise
    pending: int | None = None  # a step that the rule has looked at and that may still turn out rejected
    narrowed: int | None = None  # a step whose gradients the verdict has clipped already
    steps: int = 0
    clipped: Any = 0
    least: Any = 1.0


class Clip:
    """Bounds the gradients of every step that happens, by a fixed norm or by what is usual in this run.

    The norms are those that the step was judged by: the gradients are not read again to be measured (``agc`` alone
    looks at units within layers). Nothing is read from a device; in host memory, gradients that need no clipping are
    not touched. A norm that is zero, non-finite or of a rejected step never enters what a rule has learned.

    Args:
        rule: ``norm`` (Pascanu et al. 2013), ``zclip`` (Kumar et al. 2025), ``adagc`` (Wang et al. 2025), ``autoclip``
            (Seetharaman et al. 2020) or ``agc`` (Brock et al. 2021).
        max_norm: norm: limit of the global norm, 1.0. adagc: the same during warm-up, 1.0. zclip, autoclip: a limit on
            top of the learned one, none.
        decay: zclip, adagc: of the running means, 0.97 and 0.98.
        z_threshold: zclip: standard deviations above the mean from which on a norm is clipped, 2.5.
        warmup: zclip, adagc: steps before the rule proper begins, 25 and 100.
        ratio: adagc: limit in units of the layer's mean, 1.05. agc: limit in units of the weights' norm, 0.01.
        percentile: autoclip: percentile of the norms that is the limit, 10.
        history: autoclip: how many of the newest norms count, 10,000.
        eps: agc: least norm of a unit's weights, 1e-3.
        exclude: agc: patterns of parameter names to leave alone; by default those of the last layer.
    """

    @validated
    def __init__(
        self,
        *,
        rule: Literal["norm", "zclip", "adagc", "autoclip", "agc"] = "norm",
        max_norm: Positive = None,
        decay: Annotated[float | None, Field(gt=0, lt=1)] = None,
        z_threshold: Positive = None,
        warmup: Annotated[int | None, Field(ge=1)] = None,
        ratio: Positive = None,
        percentile: Annotated[float | None, Field(ge=0, le=100)] = None,
        history: Annotated[int | None, Field(ge=1)] = None,
        eps: Positive = None,
        exclude: tuple[str, ...] | None = None,
    ) -> None:
        given = {
            "max_norm": max_norm, "decay": decay, "z_threshold": z_threshold, "warmup": warmup, "ratio": ratio,
            "percentile": percentile, "history": history, "eps": eps, "exclude": exclude,
        }  # fmt: skip
        own = DEFAULTS[rule]
        for name, value in given.items():
            if value is not None and name not in own:
                raise OptionError(
                    f"plugin 'Clip': option {name!r} is not one of rule {rule!r}, which has: {', '.join(own)}"
                )
        self.rule = rule
        self.options = own | {name: value for name, value in given.items() if value is not None}
        self._watched: dict[str, Watched] = {}

    @hookimpl(tryfirst=True)  # the norms are those of the gradients as they came
    def adjust_gradients(self, event: GradientEvent) -> None:
        """Scale what is above its limit."""
        watched = self._of(event.source)
        rule = watched.rule
        with np.errstate(all="ignore"):
            if isinstance(rule, UnitWise):
                least = rule.clip(event)
            else:
                measured = _measure(event, again=watched.narrowed == event.step)
                rule.place(measured)
                _settle(watched, rule, event)
                factor = rule.factor(measured)
                watched.pending = event.step
                scale(event.gradients, factor)
                least = factor.min() if np.ndim(factor) and len(factor) else factor
            _note(watched, least)

    @hookimpl
    def on_intervention(self, intervention: Intervention) -> None:
        """Take note of gradients that the verdict has clipped, steps that are undone, and regimes that are accepted."""
        watched = self._of(intervention.source)
        if intervention.action is Action.CLIP:
            watched.narrowed = intervention.step
        elif intervention.action is Action.ROLLBACK:
            watched.pending = None
        elif intervention.action is Action.PROCEED and not isinstance(watched.rule, UnitWise):
            watched.pending = None
            watched.rule.restart()

    @hookimpl
    def summarize(self) -> Section | None:
        """How many steps were clipped, and by how much at most."""
        rows = tuple(
            (source, w.steps, int(w.clipped), round(float(w.least), 6))
            for source, w in self._watched.items()
            if w.steps
        )
        if not rows:
            return None
        options = ", ".join(f"{name} {value}" for name, value in self.options.items() if value is not None)
        return Section(
            title="Gradient clipping",
            text=f"Rule {self.rule}: {options}.",
            tables=(Table(columns=("source", "steps", "clipped", "smallest factor"), rows=rows),),
        )

    def state_dict(self) -> dict[str, Any]:
        """What the rule knows of all sources, as plain numbers."""
        return {
            "rule": self.rule,
            "sources": {
                source: {
                    "rule": {} if isinstance(w.rule, UnitWise) else w.rule.state_dict(),
                    "pending": w.pending, "steps": w.steps, "clipped": int(w.clipped), "least": float(w.least),
                }
                for source, w in self._watched.items()
            },
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up ``state_dict()``; what another rule has learned is left aside."""
        self._watched = {}
        if state["rule"] != self.rule:
            log.warning("clip: the saved state is of rule %r; rule %r starts afresh", state["rule"], self.rule)
            return
        for source, saved in state["sources"].items():
            watched = self._of(source)
            if not isinstance(watched.rule, UnitWise):
                watched.rule.load_state_dict(saved["rule"])
            watched.pending, watched.steps = saved["pending"], saved["steps"]
            watched.clipped, watched.least = saved["clipped"], saved["least"]

    def _of(self, source: str) -> Watched:
        watched = self._watched.get(source)
        if watched is None:
            rule = UnitWise(**self.options) if self.rule == "agc" else RULES[self.rule](**self.options)
            watched = self._watched[source] = Watched(rule)
        return watched


def _measure(event: GradientEvent, *, again: bool) -> Measured:
    """The norms that the step was judged by, or those after the verdict has clipped the gradients."""
    statistics: Any = event
    if again:
        from dynguard.torch.statistics import Statistics

        statistics = Statistics(event.gradients, scale=event.scale)
    norms, total = local(statistics.norms), local(statistics.global_norm)
    return Measured(event.names, norms, total if is_tensor(total) else np.float64(total))


def _settle(watched: Watched, rule: Rule, event: GradientEvent) -> None:
    """Let the rule learn from the step before, unless that was rejected or undone."""
    waiting, watched.pending = watched.pending, None
    if waiting is None or event.step <= waiting:
        return
    rejected: Any = local(event.rejected) if event.step == waiting + 1 else False  # else of a skip since
    if is_tensor(rejected):
        rule.accept(rejected.logical_not())
    elif not rejected:
        rule.accept(True)


def _note(watched: Watched, least: Any) -> None:
    watched.steps += 1
    watched.clipped = watched.clipped + (least < 1)
    watched.least = choose(least < watched.least, least, watched.least)
