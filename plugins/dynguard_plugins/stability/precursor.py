"""``precursor``: what foretells a spike (stale second moments, growing logits), and its repair before the update."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field

from dynguard import Action, Evidence, Finding, Section, Severity, Signal, Table, hookimpl, validated
from dynguard.arrays import local
from dynguard_plugins.rounding import short
from dynguard_plugins.stability.baseline import namespace
from dynguard_plugins.stability.precursor_logits import Logits
from dynguard_plugins.stability.precursor_updates import AHEAD, Screen, Updates, exact, raise_second

if TYPE_CHECKING:
    from dynguard.actions import Intervention
    from dynguard.events import GradientEvent, RunInfo, Training

log = logging.getLogger("dynguard")

ORDINARY = math.log(10.0)  # of the global norm: beyond it the gradient itself is a spike, and another detector's
QUIET = 0.01  # of what is usual for an entry: a layer whose second moment remembers less was quiet
AWAKE = 0.03  # the same of the present gradient: not one that is rounding noise throughout
STALE = 20.0  # |g| over sqrt(v), beyond what all layers have in common, from which on a second moment is stale
SURE = 0.8  # of ``peak``: what the entries must confirm of what the norms say
AGAIN = 100  # steps before a layer is told again


class Watched:
    """What is known about one source."""

    def __init__(self) -> None:
        self.updates = Updates()
        self.told: dict[str, int] = {}
        self.pending: tuple[int, Training, list[tuple[int, Any, float]]] | None = None
        self.names: tuple[str, ...] = ()
        self.repaired: dict[str, int] = {}
        self.largest: Any = 0.0
        self.betas: tuple[float, float] | None = None
        self.betas_told = False


class Precursor:
    """What foretells a spike: an update out of line though the gradient is ordinary, and logits that grow.

    **Stale second moments** (``update_spike``). After a quiet stretch Adam's v is far below what the next real gradient
    brings, and the bias correction no longer helps: the updates that follow are several times the learning rate in
    every coordinate at once, and the loss spikes some steps later without a spike of the gradient before it
    (allenai/OLMo#245; Molybog et al. 2023, arXiv 2304.09871; Wortsman et al. 2023, arXiv 2304.13013, section 3.4).
    Looked for at every step in all layers from the norms alone; what stands out is looked at entry by entry, and told
    before the update is made. Only a layer that was quiet counts: one whose second moment remembers, entry for entry,
    less than 1 % of what is usual in the model, and whose gradient now is 20 times that or more, beyond what all layers
    have in common. A bad batch on a layer whose second moment is up to date, and a global norm beyond 10x, are left to
    ``spike``. A table's rows that are looked up for the first time are no finding as long as other rows are in use.

    The repair touches the layers concerned only, once. ``moment_reset`` starts their moments and step counters afresh,
    so that the bias correction works again. ``update_clip`` lifts their second moments to the mean square of the
    present gradient, which bounds this update and those to come as StableAdamW's clipping would do step by step, and
    leaves momentum and step counter alone; optimizers without bias correction (RMSprop) always get this. A layer that
    is repaired is not also skipped by ``spike``.

    **Growing logits** (``logit_growth``): see :class:`~dynguard_plugins.stability.precursor_logits.Logits`.

    **Betas** with ``beta1 >= sqrt(beta2)``, for which Adam need not converge (Reddi et al. 2018, arXiv 1904.09237,
    theorem 4's condition), are told once as ``spiky_betas`` (info).

    What it does not do: foretell spikes that come of too high a learning rate with second moments up to date. On 96
    such spikes of small models its scores did no better than chance (``benchmarks/precursor.py``), which is why they
    raise no alarm.

    Cost: some 60 operations on arrays of one entry per layer at each step, one pass over the second moments every 50
    steps, and once in ``every`` forward passes a maximum over the output and a few attention logits per layer.

    Args:
        repair: what to do about a stale second moment.
        peak: size that the update would reach within 16 steps if the gradient stays, in learning rates per
            coordinate, from which on a layer is looked at. An up-to-date second moment gives 1 at most; the largest at
            betas .9 and .999 is 6.5.
        logits: whether to sample logits.
        every: forward passes between two samples.
    """

    @validated
    def __init__(
        self,
        *,
        repair: Literal["moment_reset", "update_clip", "none"] = "moment_reset",
        peak: Annotated[float, Field(gt=1)] = 1.5,
        logits: bool = True,
        every: Annotated[int, Field(ge=1)] = 20,
    ) -> None:
        self.repair, self.peak = repair, peak
        self.logits = Logits(every) if logits else None
        self._watched: dict[str, Watched] = {}

    @hookimpl
    def on_gradients(self, event: GradientEvent) -> Signal | None:
        """Screen all layers by their norms; look closer only where something stands out."""
        if event.training is None:
            return None
        if self.logits is not None:
            self.logits.watch(event)
        watched = self._watched.setdefault(event.source, Watched())
        watched.pending, watched.names = None, event.names
        if watched.betas is None:
            watched.betas = _betas(event.training)
        norms, total = local(event.norms), local(event.global_norm)
        with np.errstate(all="ignore"):
            watched.updates.settle(event)
            if not watched.updates.ready(event, norms):
                return None
            screen = watched.updates.look(event, norms, total)
            fired = (screen.peak > self.peak) & stale(screen)
            top = screen.peak.max() if len(norms) else 0.0
            watched.largest = namespace(norms).maximum(_like(watched.largest, top), top)
        parameters = event.parameters  # a late event has let go of them
        return Signal(
            top,
            fired,
            lambda: self._explain(event, parameters, watched, fired, screen),
            action=Action.WARN
            if self.repair == "none"
            else Action.SKIP,  # deferred: dropped, and repaired a step later
            drop=None if self.repair == "none" else fired,
        )

    def _explain(
        self, event: GradientEvent, parameters: Sequence[Any], watched: Watched, fired: Any, screen: Screen
    ) -> Iterator[Finding]:
        hits = [i for i, hit in enumerate(fired.tolist()) if hit]
        ratios, norms = screen.ratio.tolist(), event.norms.tolist()
        repairs = []
        for i in hits:
            now, then, share = exact(event, i, AHEAD[-1])
            if then <= SURE * self.peak:  # NaN where the gradient is gone (deferred reads): the norms decide
                continue
            repairs.append((i, parameters[i], norms[i] ** 2 / max(parameters[i].numel(), 1)))
            name = event.names[i]
            if self.repair == "none" and event.step - watched.told.get(name, -AGAIN) < AGAIN:
                continue
            watched.told[name] = event.step
            yield self._finding(event, i, parameters[i].numel(), (ratios[i], now, then, share))
        if repairs and event.training is not None and self.repair != "none":
            watched.pending = (event.step, event.training, repairs)

    def _finding(
        self, event: GradientEvent, index: int, count: int, numbers: tuple[float, float, float, float]
    ) -> Finding:
        ratio, now, then, share = numbers
        name, repairs = event.names[index], self.repair != "none"
        evidence = {
            "update_rms": now, "update_rms_to_come": then, "entries_out_of_line": share,
            "gradient_over_root_second_moment": min(ratio, 1e30), "gradient_norm": float(event.norms[index]),
            "global_norm": float(event.global_norm), "entries": count,
        }  # fmt: skip
        grows = "would be out of line: "
        if math.isfinite(now):
            grows = f"is {now:.3g} learning rates per coordinate and would grow to {then:.3g}: "
        return Finding(
            kind="update_spike",
            severity=Severity.ERROR if repairs else Severity.WARNING,
            step=event.step,
            subject=name,
            action=Action.CLIP if repairs else Action.WARN,
            premise=f"the update of {name!r} {grows}its gradient is {min(ratio, 1e30):.3g} times "
            f"what its second moment remembers, after a quiet stretch, "
            "while the global norm is ordinary",
            implies="the optimizer's second moment is stale and its step counter too old for the bias correction: the "
            "loss would spike some steps later",
            expected_effect=_EFFECT.get(self.repair, ""),
            confidence=share if math.isfinite(share) else None,
            evidence=tuple(Evidence(name=n, value=v) for n, v in evidence.items() if math.isfinite(v)),
            supersedes=("grad_spike", "loss_spike") if repairs else (),
        )

    @hookimpl
    def on_intervention(self, intervention: Intervention) -> None:
        """Carry the repair out, before the update (or a step late where reads are deferred)."""
        watched = self._watched.get(intervention.source)
        if watched is None or watched.pending is None:
            return
        step, training, repairs = watched.pending
        mine = intervention.detector == "precursor" or intervention.reason == "update_spike"
        if intervention.step != step or not (intervention.action is Action.CLIP or mine):
            return
        watched.pending = None
        from dynguard.torch.moments import can_reset, reset_moments

        optimizer = training.optimizer
        for i, parameter, square in repairs:
            name = watched.names[i]
            watched.repaired[name] = watched.repaired.get(name, 0) + 1
            if self.repair == "update_clip" or can_reset(optimizer, parameter):
                raise_second(optimizer, parameter, optimizer.param_groups[training.groups[i]], square)
            else:
                reset_moments(optimizer, parameter)
        watched.updates.forget()

    @hookimpl
    def diagnose(self) -> Iterator[Finding]:
        """Logits that grow, and betas that are spiky by themselves."""
        if self.logits is not None:
            yield from self.logits.diagnose()
        for source, watched in self._watched.items():
            b1, b2 = watched.betas or (0.0, 0.0)
            if not watched.betas_told and b2 and b1 >= math.sqrt(b2):
                watched.betas_told = True
                yield _spiky(source, b1, b2)

    @hookimpl
    def on_run_end(self, run: RunInfo) -> None:
        """Take the hooks off."""
        if self.logits is not None:
            self.logits.detach()

    @hookimpl
    def summarize(self) -> Section | None:
        """What was repaired, and the largest logits."""
        repaired = tuple((s, n, count) for s, w in self._watched.items() for n, count in w.repaired.items())
        logits = self.logits.samples() if self.logits is not None else {}
        rows = tuple(
            (p, len(v), short(v[0][1]), short(max(x for _, x in v)), short(v[-1][1])) for p, v in logits.items() if v
        )
        tables = []
        if repaired:
            tables.append(Table(title="Repaired", columns=("source", "parameter", self.repair), rows=repaired))
        if rows:
            tables.append(
                Table(title="Largest logit", columns=("module", "samples", "first", "largest", "last"), rows=rows)
            )
        if not tables:
            return None
        largest = max((float(w.largest) for w in self._watched.values()), default=0.0)
        text = f"Largest update foreseen: {largest:.3g} learning rates per coordinate."
        return Section(title="Precursors of spikes", text=text, tables=tuple(tables))

    def state_dict(self) -> dict[str, Any]:
        """What was told and repaired, the usual global norm, the samples of logits. Moments are the optimizer's."""
        return {
            "sources": {
                s: {"updates": w.updates.state_dict(), "told": dict(w.told), "repaired": dict(w.repaired),
                    "largest": float(w.largest)}
                for s, w in self._watched.items()
            },
            "logits": None if self.logits is None else self.logits.state_dict(),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up ``state_dict()``."""
        self._watched = {}
        for source, saved in state["sources"].items():
            watched = self._watched[source] = Watched()
            watched.updates.load_state_dict(saved["updates"])
            watched.told, watched.repaired = dict(saved["told"]), dict(saved["repaired"])
            watched.largest = saved["largest"]
        if self.logits is not None and state["logits"] is not None:
            self.logits.load_state_dict(state["logits"])


_EFFECT = {
    "moment_reset": "moments and step counter of this parameter start afresh: the next updates are at most one "
    "learning rate per coordinate",
    "update_clip": "the second moment of this parameter is lifted to the present gradient's mean square: the next "
    "updates are about one learning rate per coordinate",
}


def stale(screen: Screen) -> Any:
    """(n,) bool: layers that were quiet, are awake now, and stand out beyond what all layers have in common."""
    together = namespace(screen.ratio).exp(screen.rise)
    quiet = (screen.remembered < QUIET) & (screen.present > AWAKE) & (screen.rise < ORDINARY)
    return quiet & (screen.ratio > STALE) & (screen.ratio > STALE * together)


def _like(value: Any, like: Any) -> Any:
    """The largest so far, where the numbers are now."""
    if isinstance(like, (float, np.generic)):
        return float(value)
    return value.to(like) if hasattr(value, "to") else like * 0.0 + value


def _betas(training: Training) -> tuple[float, float]:
    """The betas of the first group that has some; zeros where there are none."""
    for group in training.optimizer.param_groups:
        betas = group.get("betas")
        if isinstance(betas, (tuple, list)) and len(betas) == 2:
            return float(betas[0]), float(betas[1])
    return 0.0, 0.0


def _spiky(source: str, b1: float, b2: float) -> Finding:
    worst = (1 - b1) / math.sqrt(1 - b2)
    return Finding(
        kind="spiky_betas",
        severity=Severity.INFO,
        source=source,
        action=Action.WARN,
        premise=f"beta1 = {b1:g} is not below sqrt(beta2) = {math.sqrt(b2):.4g}",
        implies="momentum outlives the second moment: an update can stay large when its gradients have long gone",
        expected_effect="Adam's convergence proofs ask for beta1 < sqrt(beta2)",
        evidence=(
            Evidence(name="beta1", value=b1),
            Evidence(name="beta2", value=b2),
            Evidence(name="largest_single_step", value=worst, unit="learning rates"),
        ),
    )
