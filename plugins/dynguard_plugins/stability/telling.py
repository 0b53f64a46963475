"""What ``spike`` says once something fired: findings with evidence, from numbers that may now be read."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynguard import Action, Evidence, Finding, Severity

if TYPE_CHECKING:
    from dynguard.events import GradientEvent
    from dynguard_plugins.stability.baseline import Baseline, Score
    from dynguard_plugins.stability.spike import Watched
    from dynguard_plugins.stability.tail import Threshold

# torch's names of the weights that are applied once per time step: nn.RNN, LSTM, GRU and their cells.
RECURRENT = re.compile(r"(^|\.)weight_hh(_l\d+)?(_reverse)?$")
ROWS_SHOWN = 100
SLIGHT = 4.0  # a spike of some layers below this ratio is told and left alone
SMALL = 10.0  # a spike below this ratio is clipped to the usual size rather than skipped


@dataclass(slots=True)
class Facts:
    """Everything about a step that fired; arrays are read here, on the host."""

    event: GradientEvent
    baseline: Baseline
    score: Score
    x: Any
    spiking: Any
    thresholds: Sequence[Threshold]
    mild: Any
    pending: dict[str, Any]
    watched: Watched
    same: bool = False  # the data of the step before

    @property
    def loss(self) -> float | None:
        """The observed loss, or None."""
        return None if self.event.loss is None else float(self.event.loss)

    def norms(self) -> list[float]:
        """Gradient norms by layer."""
        return [float(n) for n in self.event.norms.tolist()]


def _evidence(**values: Any) -> tuple[Evidence, ...]:
    return tuple(Evidence(name=name, value=value) for name, value in values.items() if value is not None)


def tell(facts: Facts, action: Action, nan_action: Action) -> Iterator[Finding]:
    """The findings of a step: a non-finite gradient, else a non-finite loss, else what spiked."""
    bad = nonfinite_layers(facts)
    if bad:
        yield nonfinite_gradient(facts, bad, nan_action)
    elif facts.loss is not None and not math.isfinite(facts.loss):
        yield nonfinite_loss(facts, nan_action)
    else:
        yield from spikes(facts, action)
        yield from drifts(facts)


def nonfinite_layers(facts: Facts) -> list[tuple[int, int, int]]:
    """(layer, NaN entries, infinite entries) of every layer whose gradient holds such entries.

    A float32 norm overflows at finite entries above 1.8e19: those layers are not listed. Where the gradients are gone
    (deferred reads) the norm alone decides.
    """
    found = []
    for i, norm in enumerate(facts.norms()):
        if math.isfinite(norm):
            continue
        gradient = facts.event.gradients[i] if i < len(facts.event.gradients) else None
        if gradient is None:
            found.append((i, int(math.isnan(norm)), int(math.isinf(norm))))
            continue
        values = gradient.coalesce().values() if getattr(gradient, "is_sparse", False) else gradient
        nans, infs = _count_bad(values)
        if nans or infs:
            found.append((i, nans, infs))
    return found


def _count_bad(values: Any) -> tuple[int, int]:
    if hasattr(values, "isnan"):
        return int(values.isnan().sum()), int(values.isinf().sum())
    import numpy as np

    return int(np.isnan(values).sum()), int(np.isinf(values).sum())


def nonfinite_gradient(facts: Facts, bad: list[tuple[int, int, int]], action: Action) -> Finding:
    """``nan_grad`` or ``inf_grad``, naming the first layer of the model that is hit."""
    event = facts.event
    first, nans, infs = bad[0]
    last = event.names[bad[-1][0]]
    which = "NaN" if nans else "infinite"
    return Finding(
        kind="nan_grad" if nans else "inf_grad",
        severity=Severity.ERROR,
        step=event.step,
        subject=event.names[first],
        action=action,
        premise=f"the gradient of {event.names[first]!r} has {nans + infs} {which} entries; so have "
        f"{len(bad) - 1} of the other {len(event.names) - 1} parameters, the one nearest to the loss being {last!r}",
        implies="the update would make these weights and their optimizer state non-finite for good",
        expected_effect="weights and optimizer state stay as they were before this batch",
        confidence=1.0,
        evidence=_evidence(
            nan_entries=nans, inf_entries=infs, nonfinite_parameters=len(bad), last_nonfinite=last, loss=facts.loss,
            gradient_norm=facts.norms()[first],
        ),
    )  # fmt: skip


def nonfinite_loss(facts: Facts, action: Action) -> Finding:
    """``empty_batch``, ``nan_loss`` or ``inf_loss`` over finite gradients."""
    event, loss = facts.event, facts.loss
    assert loss is not None
    still = all(n == 0 for n in facts.norms())
    losses = [float(v) for v in event.losses]
    hit = [i for i, v in enumerate(losses) if not math.isfinite(v)]
    part = len(hit) < len(losses)  # gradients of the other micro-batches are real and finite
    empty = math.isnan(loss) and (still or part)
    micro = ", ".join(map(str, hit))
    what = f"the loss of micro-batch {micro} of {len(losses)} is {losses[hit[0]]}" if part else f"the loss is {loss}"
    premise = f"{what} and every gradient is exactly zero" if still else f"{what} while every gradient is finite"
    return Finding(
        kind="empty_batch" if empty else "nan_loss" if math.isnan(loss) else "inf_loss",
        severity=Severity.WARNING if empty else Severity.ERROR,
        step=event.step,
        action=Action.WARN if part and empty and not still else action,
        premise=premise,
        implies="no target of it counts, e.g. all labels are ignored: a mean over nothing"
        if empty
        else "the loss is not defined on this batch, and what its gradient means is not known",
        expected_effect="momentum and weight decay move nothing; running means of the loss stay finite"
        if empty
        else "no update is made from an undefined loss",
        confidence=1.0,
        evidence=_evidence(loss=loss, gradient_norm=float(event.global_norm), micro_batches=micro if part else None),
    )


def spikes(facts: Facts, action: Action) -> Iterator[Finding]:
    """``loss_spike`` and ``grad_spike``."""
    layers = facts.baseline.layers
    hits = [i for i, hit in enumerate(facts.spiking.tolist()) if hit]
    hit_layers = [i for i in hits if i < layers]
    rises = [float(r) for r in facts.score.rise.tolist()]
    overflowed = [i for i, n in enumerate(facts.norms()) if math.isinf(n)]
    if overflowed and not hit_layers:
        hit_layers = overflowed
    gradient_too = bool(hit_layers) or layers in hits
    grown = rises[layers] > math.log(3.0)
    if bool(facts.mild) and action is Action.SKIP:
        action = Action.WARN
    elif facts.same and action is Action.SKIP:
        action = Action.CLIP  # the next step would see the same data: only a shorter step leads out
    if hits or overflowed:
        # A step that is taken as it is belongs to what this run is like: the thresholds learn from it.
        facts.pending["taken"] = action in (Action.WARN, Action.PROCEED)
    gradient = _gradient_spike(facts, action, hit_layers, rises) if gradient_too else None
    if layers + 1 in hits:
        asked = gradient.action if gradient is not None else action
        yield _loss_spike(facts, asked if gradient_too or grown else Action.WARN, rises)
    if gradient is not None:
        yield gradient


def drifts(facts: Facts) -> Iterator[Finding]:
    """``grad_drift``: layers whose gradient grows steadily away from the others."""
    watched = facts.watched
    hits = [] if watched.drifting is None else [i for i, hit in enumerate(watched.drifting.tolist()) if hit]
    if not hits:
        return
    drift = watched.drift
    level = drift.fast.tolist()
    slow, evidence = drift.slow.tolist(), drift.evidence.tolist()
    for i in hits:
        yield Finding(
            kind="grad_drift",
            severity=Severity.WARNING,
            step=facts.event.step,
            subject=facts.event.names[i],
            action=Action.WARN,
            premise=f"the gradient norm of {facts.event.names[i]!r} has grown steadily to {_exp(level[i]):.4g}, "
            f"x{_exp(level[i] - slow[i]):.3g} over its slow average, and away from the other layers",
            implies="something in or before this layer grows: logits, a normalisation scale, an unbounded activation",
            expected_effect="",
            # Less the number of looks it is a supermartingale: it gets so high by then with at most this chance.
            confidence=max(0.0, 1.0 - drift.looks * drift.layers / evidence[i]),
            evidence=_evidence(
                gradient_norm=facts.norms()[i], level=_exp(level[i]), slow_level=_exp(slow[i]),
                evidence=evidence[i], bound=drift.bound,
            ),
        )  # fmt: skip
    drift.reset(watched.drifting)
    watched.drifting = None


def _loss_spike(facts: Facts, action: Action, rises: list[float]) -> Finding:
    layers = facts.baseline.layers
    z = float(facts.score.z.tolist()[layers + 1])
    p = facts.thresholds[2].p_value(z)
    return Finding(
        kind="loss_spike",
        severity=Severity.ERROR if action.intervenes else Severity.WARNING,
        step=facts.event.step,
        action=action,
        premise=f"the loss is {facts.loss:.4g}, {z:.3g} units above its usual range",
        implies="one batch is unlike the others (mis-scaled or mislabelled), or the weights have left the good region"
        if action.intervenes
        else _DYNAMICS
        if facts.same
        else "this batch is unlike the others, but its gradient is ordinary: it may be rare and legitimate data",
        expected_effect="the weights do not learn from this batch" if action.intervenes else "",
        confidence=None if p is None else 1 - p,
        evidence=_evidence(loss=facts.loss, score=z, threshold=_finite(facts.thresholds[2].value),
                           gradient_rise=_exp(rises[layers])),
    )  # fmt: skip


def _gradient_spike(facts: Facts, action: Action, hit_layers: list[int], rises: list[float]) -> Finding:
    event, layers = facts.event, facts.baseline.layers
    residuals = [float(r) for r in facts.score.residual.tolist()]
    among = hit_layers or range(layers)
    worst = max(among, key=lambda i: residuals[i])
    recurrent = [i for i, name in enumerate(event.names) if RECURRENT.search(name)]
    if recurrent and action is Action.SKIP:
        worst, action = max(set(recurrent) & set(among) or {worst}, key=lambda i: residuals[i]), Action.CLIP
    z = [float(v) for v in facts.score.z.tolist()]
    told = worst if hit_layers else layers  # whose score decided
    norms, level = facts.norms(), [float(v) for v in facts.baseline.level.tolist()]
    if math.isinf(norms[worst]) and worst < len(event.gradients) and event.gradients[worst] is not None:
        norms[worst] = float(
            event.gradients[worst].detach().double().norm()
        )  # float32 overflowed, the entries are finite
        rises[worst] = math.log(norms[worst]) - level[worst] if 0 < norms[worst] < math.inf else math.inf
    small = rises[told] < math.log(SMALL)
    if small and action is Action.SKIP:
        slight = rises[told] < math.log(SLIGHT) and len(hit_layers) * 2 < layers
        action = Action.WARN if slight else Action.CLIP
        facts.pending["taken"] = slight
    whole = not hit_layers or bool(facts.spiking.tolist()[layers]) or len(hit_layers) * 2 >= layers
    stream = 0 if hit_layers else 1
    p = facts.thresholds[stream].p_value(z[told])
    threshold = _finite(facts.thresholds[stream].value)
    record = None
    if told == layers and threshold is not None and z[told] <= threshold:
        threshold, record = None, _exp(float(facts.baseline.record.tolist()[layers]))
    rows = _rows(event, worst)
    where = f"in {len(hit_layers)} of {layers} layers, most in" if hit_layers else "in all layers together, most in"
    return Finding(
        kind="grad_spike",
        severity=Severity.ERROR if action.intervenes and not small else Severity.WARNING,
        step=event.step,
        subject=event.names[worst],
        rows=rows,
        action=action,
        premise=f"the gradient norm left its baseline {where} {event.names[worst]!r}: {norms[worst]:.4g}, usually "
        f"{_exp(level[worst]):.4g} (x{_exp(rises[worst]):.4g})",
        implies=_implication(action, bool(recurrent), facts.same),
        expected_effect=_EFFECTS.get(action, ""),
        confidence=None if p is None else 1 - p,
        evidence=_evidence(
            gradient_norm=norms[worst], baseline=_exp(level[worst]), ratio=_exp(rises[worst]), score=z[told],
            threshold=threshold, largest_ratio_before=record, layers_hit=len(hit_layers), loss=facts.loss,
            gradient_limit=None if whole else _limit(facts, worst, level),
            global_norm=float(event.global_norm), global_limit=_limit(facts, layers, level) if whole else None,
        ),
    )  # fmt: skip


_EFFECTS = {
    Action.CLIP: "the gradient is brought down to its usual size",
    Action.SKIP: "the weights do not take this step",
    Action.ROLLBACK: "the weights are those of the last verified snapshot",
}


_DYNAMICS = (
    "the data is that of the step before, so the step size is too large for the curvature here; a skip can't help"
)


def _implication(action: Action, recurrent: bool, same: bool) -> str:
    if same:
        return _DYNAMICS
    if action is Action.WARN:
        return "a batch unlike the others, perhaps rare and legitimate; the optimizer bounds what one step can do"
    if recurrent:
        return "the recurrent product over a long sequence explodes"
    return "one batch or a numerical accident outweighs many good steps"


def _limit(facts: Facts, channel: int, level: list[float]) -> float:
    """The upper end of a channel's usual range: what a clip brings it down to."""
    return _exp(level[channel] + max(float(facts.baseline.high.tolist()[channel]), 0.0))


def _rows(event: GradientEvent, layer: int) -> tuple[int, ...]:
    """Rows of an embedding table that carry the spike: those within a tenth of the largest row norm."""
    if layer not in event.tables or layer >= len(event.gradients) or event.gradients[layer] is None:
        return ()
    gradient = event.gradients[layer]
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        ids, values = gradient.indices()[0], gradient.values()
    else:
        ids, values = None, gradient
    sizes = values.abs().amax(dim=tuple(range(1, values.ndim))) if values.ndim > 1 else values.abs()
    hit = (sizes >= sizes.max() / 10).nonzero()[:ROWS_SHOWN, 0]
    return tuple((hit if ids is None else ids[hit]).tolist())


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
