"""``spike``: a gradient or loss that is non-finite, or leaves its calibrated baseline upwards."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field

from dynguard import Action, Section, Signal, Table, hookimpl, validated
from dynguard.arrays import local
from dynguard_plugins.stability.baseline import Baseline, Score, filled, namespace, score_from, score_state
from dynguard_plugins.stability.batches import SameBatch
from dynguard_plugins.stability.drift import Drift
from dynguard_plugins.stability.tail import Threshold
from dynguard_plugins.stability.telling import Facts, tell

if TYPE_CHECKING:
    from dynguard.actions import Intervention
    from dynguard.events import GradientEvent

log = logging.getLogger("dynguard")

STREAMS = ("layers", "global", "loss")
SHARES = 4  # of the budget of false alarms: one for each stream, one in reserve
LEAST_Z = 1.5  # a threshold is never inside the usual range
HEAVIEST = {"layers": 0.05, "global": 0.25, "loss": 0.25}  # tail index of each stream's scores at most
TOGETHER = 3.0  # a common rise by this much is the batch's doing, not one layer's
SAME = 1e-4  # log units within which a step is the one before
HIDDEN_RATIO = 20.0  # a layer this far above the others spikes even where a user's global clip keeps its norm down
MILD_RATIO = 50.0  # what a batch may do to all gradients and still be mild
WILD_RATIO = 1000.0  # what the same data may do once more and still be left to recover by itself
LEAST_SHARE = 1e-4  # of the usual global norm: a gradient below it is nobody's spike
GLOBAL_RATIO = 5.0  # a rise of all gradients together below this is nobody's spike
LOSS_RATIO = 5.0  # a loss below so many times its usual size is nobody's spike
LEAST_RATIO = 3.0  # a rise below this is nobody's spike, however unusual
YOUNG_RATIO = 6.0  # before the thresholds are fitted: this far above the level ...
YOUNG_RECORD = 3.0  # ... and this far above the largest rise so far
LOSS_WINDOW = 50.0
LR_WINDOW = 20.0


class Watched:
    """What is known about one source: baseline, thresholds, and the step that waits to be accepted."""

    def __init__(self, like: Any, layers: int, *, warmup: int, rate: float, calibrate: int) -> None:
        self.baseline = Baseline(like, layers, warmup)
        self.thresholds = tuple(
            Threshold(rate=rate, first=math.inf, least=LEAST_Z, calibrate=calibrate, heaviest=HEAVIEST[stream])
            for stream in STREAMS
        )
        self.drift = Drift(like, layers, 1.0 / rate)
        self.drifting: Any = None
        self.loss_scale: Any = None
        self.rejected: Any = None  # channels of the last step that fired
        self.row = like[0] * 0.0  # how many of the steps just before spiked
        self.rate_level: float | None = None
        self.pending: dict[str, Any] | None = None
        self.bounds: Any = None
        self.told = False
        self.batches = SameBatch()
        self.names: tuple[str, ...] = ()
        self.full_batch = False  # a step that was held back has come again to the digit: there is one batch only

    @property
    def fitted(self) -> bool:
        """Whether the thresholds come from this run."""
        return self.thresholds[0].fitted


class Spike:
    """Non-finite gradients and losses, and norms or losses that leave their calibrated baseline upwards.

    Every layer's log gradient norm is compared with its own level and spread and with what all layers have in common at
    the same step, the log global norm and the loss with theirs. Thresholds come from the run: peaks over threshold on
    the scores of accepted steps, so that clean steps alarm at the rate ``false_alarms``. Falling values never alarm;
    what is non-finite, fired or was rejected never enters a baseline.

    A spike of all layers together that is mild (below x50), stands alone and meets an optimizer that divides by a
    second moment is warned about and let through: such batches are often rare, legitimate data, which would never be
    learnt if they were skipped for ever, and the step that Adam makes of them is bounded. The second in a row, a larger
    one, or one that only some layers show, is acted upon (below x10 by a clip to the usual size; below x4, in a few
    layers, by a warning). All layers beyond x50 and three times what was ever accepted spike whatever the thresholds.

    Args:
        action: what to do about a finite spike. A network with recurrent weights is clipped rather than skipped when
            this is ``skip``: long sequences are not bad data (Pascanu et al. 2013, "On the difficulty of training
            recurrent neural networks").
        nan_action: what to do about a non-finite gradient or loss.
        false_alarms: expected share of clean steps that alarm, over all layers and streams together.
        calibrate: accepted steps before the thresholds are fitted; until then only what is far above everything seen
            alarms.
        ratio: alarm on a fixed ratio to the level instead of the calibrated thresholds.
        warmup: accepted steps before a channel can alarm at all.
    """

    @validated
    def __init__(
        self,
        *,
        action: Action = Action.SKIP,
        nan_action: Action = Action.SKIP,
        false_alarms: Annotated[float, Field(gt=0, lt=0.5)] = 1e-4,
        calibrate: Annotated[int, Field(ge=30)] = 100,
        ratio: Annotated[float, Field(gt=1)] | None = None,
        warmup: Annotated[int, Field(ge=1)] = 10,
    ) -> None:
        self.action, self.nan_action = action, nan_action
        self.false_alarms, self.calibrate, self.ratio, self.warmup = false_alarms, calibrate, ratio, warmup
        self._watched: dict[str, Watched] = {}
        self._saved: dict[str, Any] = {}

    @hookimpl
    def on_gradients(self, event: GradientEvent) -> Signal:
        """Score the step; the arrays stay where they are."""
        norms, total, loss = local(event.norms), local(event.global_norm), local(event.loss)
        with np.errstate(all="ignore"):
            watched = self._settled(event, norms, loss)
            watched.names = event.names
            same = watched.batches.see(event.batches) or watched.full_batch
            x, bad = self._channels(norms, total, loss, watched)
            score = watched.baseline.score(x)
            spiking = self._spiking(watched, event, score)
            good, mild, drop = score.good, False, bad
            if not isinstance(spiking, np.ndarray) or spiking.any():  # on the host one may ask
                spiking = spiking & _matters(x, watched.baseline)
                # A spike of all layers together may be rare, legitimate data: see Spike's docstring.
                mild = self._mild(event, watched, score, x, same)
                drop = bad | (spiking.any() & ~mild)
                good = good & ~spiking
                watched.rejected = x
            fired = bad | spiking.any()
            if watched.drifting is not None:
                fired = fired | watched.drifting.any()
            watched.row = (watched.row + 1.0) * spiking.any()
            layers = len(norms)
            streams = _join(score.z[:layers].max(), score.z[layers], score.z[layers + 1])
        pending = {"x": x, "score": score, "good": good, "streams": None, "loss": loss, "taken": True}
        watched.pending = pending
        facts = Facts(event, watched.baseline, score, x, spiking, watched.thresholds, mild, pending, watched, same)
        return Signal(
            streams,
            fired,
            lambda: tell(facts, self.action, self.nan_action),
            max(self.action, self.nan_action),
            drop=drop,
            learn=lambda values: pending.update(streams=values),
        )

    def _channels(self, norms: Any, total: Any, loss: Any, watched: Watched) -> tuple[Any, Any]:
        """(n + 2,) log norms, log global norm and scaled loss, and whether any of them is non-finite."""
        xp = namespace(norms)
        if xp is np:
            value = math.nan if loss is None else float(loss)
            x = np.empty(len(norms) + 2, norms.dtype)
            np.log(norms, out=x[:-2])
            x[-2] = np.log(total)
            x[-1] = 0.0 if watched.loss_scale is None else np.arcsinh(value / watched.loss_scale)
            bad: Any = not np.isfinite(total) or (loss is not None and not math.isfinite(value))
            return x, bad
        value = (
            norms.new_tensor(math.nan) if loss is None else xp.as_tensor(loss, dtype=norms.dtype, device=norms.device)
        )
        scaled = value * 0 if watched.loss_scale is None else xp.asinh(value / watched.loss_scale)
        x = xp.cat((norms.log(), total.log().reshape(1), scaled.reshape(1)))
        bad = ~xp.isfinite(total)
        return x, bad if loss is None else bad | ~xp.isfinite(value)

    def _settled(self, event: GradientEvent, norms: Any, loss: Any) -> Watched:
        """What is known, with the last step in it unless that was rejected."""
        watched = self._watched.get(event.source)
        size = len(norms)
        if watched is None:
            like = _channel_like(norms)
            watched = Watched(like, size, warmup=self.warmup, rate=self.false_alarms / SHARES, calibrate=self.calibrate)
            self._watched[event.source] = watched
            if event.source in self._saved:
                _load(watched, self._saved.pop(event.source), like)
        elif isinstance(watched.baseline.level, np.ndarray) != isinstance(norms, np.ndarray):
            _load(watched, _save(watched), _channel_like(norms))  # the model has moved to another device
            watched.bounds = None
        self._commit(event, watched)
        if watched.baseline.layers != size:
            watched.baseline = watched.baseline.grown(_channel_like(norms), size)
            watched.drift = Drift(watched.baseline.level, size, watched.drift.bound / max(watched.drift.layers, 1))
            watched.drifting = watched.bounds = watched.rejected = None
        return watched

    def _commit(self, event: GradientEvent, watched: Watched) -> None:
        pending, watched.pending, watched.drifting = watched.pending, None, None
        if pending is None or event.rejected is True:
            return
        good = pending["good"]
        if event.rejected is not False:  # decided on the device
            good = good & ~local(event.rejected)
        watched.baseline.accept(pending["x"], pending["score"], good)
        watched.drifting = watched.drift.add(pending["x"], pending["score"], watched.baseline)
        value = pending.get("loss")
        if value is not None:
            _track_loss(watched, value)
        streams = pending["streams"]
        if streams is None or not pending["taken"] or not watched.baseline.steps > self.warmup:
            return
        fits = [t.add(z) for t, z in zip(watched.thresholds, streams, strict=True) if z > -9.0 or not t.fitted]
        if any(fits):
            watched.bounds = None
            if not watched.told:
                watched.told = True
                log.info("spike: calibrated after %d steps: %s", watched.baseline.steps, self._chosen(watched))

    def _spiking(self, watched: Watched, event: GradientEvent, score: Score) -> Any:
        """(n,) bool: which channels are out of line upwards."""
        slack = _lr_slack(watched, event)
        base = watched.baseline
        known = base.count >= self.warmup
        if self.ratio is not None:
            return known & score.good & (score.rise > math.log(self.ratio) + slack)
        if not watched.fitted:
            far = math.log(YOUNG_RATIO) + slack
            over = score.rise > base.record + math.log(YOUNG_RECORD)
            return known & score.good & over & (score.rise > far) & (score.residual > far)
        if watched.bounds is None:
            least = [math.log(LEAST_RATIO), math.log(GLOBAL_RATIO), math.log(LOSS_RATIO)]
            watched.bounds = (
                _bounds(score.z, base.layers, [t.value for t in watched.thresholds]),
                _bounds(score.z, base.layers, least),
            )
        far = watched.bounds[1]
        high = (score.z > watched.bounds[0]) & (score.residual - slack > far)
        high[base.layers] |= base.record_rise(score, math.log(MILD_RATIO) + slack, math.log(YOUNG_RECORD) + slack)
        clipped = (score.common < -math.log(TOGETHER)) & (score.residual > math.log(HIDDEN_RATIO))
        return high & ((score.rise - slack > far) | clipped)

    def _mild(self, event: GradientEvent, watched: Watched, score: Score, x: Any, same: bool) -> Any:
        """0-d bool: a spike that is let through with a warning.

        Either the very step that was just held back, to the digit: then it is not the batch, and holding it back again
        would change nothing. Or it saw the data of the step before (``same``), and is not beyond all measure. Or all
        layers rise together, not by far, for the first time in a row, under an adaptive optimizer.
        """
        again = watched.row < -1.0
        if watched.rejected is not None:
            away = namespace(x).where(score.good, abs(x - watched.rejected), x * 0.0)
            again = (away.max() < SAME) & (watched.row > 0.0)
            if isinstance(x, np.ndarray) and again:
                watched.full_batch = True
        if same:
            rise = namespace(x).where(score.good, score.rise, x * 0.0)
            return again | (rise.max() < math.log(WILD_RATIO))
        if not event.adaptive:
            return again
        together = (score.common > math.log(TOGETHER)) & (score.common < math.log(MILD_RATIO))
        return again | (together & (watched.row == 0.0))

    @hookimpl
    def on_intervention(self, intervention: Intervention) -> None:
        """When a new regime is accepted, of all layers or of some that woke up, the present values become the level."""
        watched = self._watched.get(intervention.source)
        if watched is None or watched.pending is None:
            return
        if intervention.action is Action.PROCEED:
            watched.baseline.move_to(watched.pending["x"])
            watched.pending = None
        elif intervention.reason == "update_spike" and intervention.action.intervenes:
            # layers that woke up: their gradients are ordinary from here on
            woken = [i for i, name in enumerate(watched.names) if name in intervention.subjects]
            watched.baseline.move_to(watched.pending["x"], woken)

    def _chosen(self, watched: Watched) -> str:
        return ", ".join(f"{n} z > {t.value:.3g}" for n, t in zip(STREAMS, watched.thresholds, strict=True))

    @hookimpl
    def summarize(self) -> Section | None:
        """The thresholds that were learned."""
        rows = tuple(
            (source, name, round(threshold.value, 4), watched.baseline.steps)
            for source, watched in self._watched.items()
            if watched.fitted
            for name, threshold in zip(STREAMS, watched.thresholds, strict=True)
        )
        if not rows:
            return None
        return Section(
            title="Spike thresholds",
            text=f"Calibrated for {self.false_alarms:g} false alarms per clean step; z is in units of the distance "
            "between median and upper decile of the residuals.",
            tables=(Table(columns=("source", "stream", "threshold", "accepted steps"), rows=rows),),
        )

    def state_dict(self) -> dict[str, Any]:
        """Baselines, thresholds and the step that waits, of all sources: numbers and lists throughout."""
        return {**self._saved, **{source: _save(watched) for source, watched in self._watched.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up ``state_dict()``; each source's share is put on its device at its next step."""
        self._watched = {}
        self._saved = dict(state)


def _save(watched: Watched) -> dict[str, Any]:
    pending = watched.pending
    return {
        "baseline": watched.baseline.state_dict(),
        "thresholds": [t.state_dict() for t in watched.thresholds],
        "loss_scale": None if watched.loss_scale is None else float(watched.loss_scale),
        "rate_level": watched.rate_level,
        "told": watched.told,
        "full_batch": watched.full_batch,
        "row": float(watched.row),
        "drift": watched.drift.state_dict(),
        "pending": pending
        and {
            "x": pending["x"].tolist(),
            "score": score_state(pending["score"]),
            "good": pending["good"].tolist(),
            "streams": pending["streams"],
            "taken": pending["taken"],
            "loss": None if pending["loss"] is None else float(pending["loss"]),
        },
    }


def _load(watched: Watched, saved: Mapping[str, Any], like: Any) -> None:
    watched.baseline = Baseline.from_state(saved["baseline"], like, watched.baseline.warmup)
    for threshold, have in zip(watched.thresholds, saved["thresholds"], strict=True):
        threshold.load_state_dict(have)
    watched.loss_scale = None if saved["loss_scale"] is None else filled(like, [saved["loss_scale"]])[0]
    watched.rate_level, watched.told = saved["rate_level"], saved["told"]
    watched.full_batch = saved.get("full_batch", False)
    watched.row = filled(like, [saved["row"]])[0]
    if len(saved["drift"]["slow"]) == watched.drift.layers:
        watched.drift.load_state_dict(saved["drift"])
    pending = saved["pending"]
    watched.pending = pending and {
        "x": filled(like, pending["x"]),
        "score": score_from(pending["score"], like),
        "good": filled(like, pending["good"]) > 0,
        "streams": pending["streams"],
        "taken": pending["taken"],
        "loss": None if pending["loss"] is None else filled(like, [pending["loss"]])[0],
    }


def _join(*scalars: Any) -> Any:
    if isinstance(scalars[0], (np.generic, np.ndarray)):
        return np.array(scalars)
    import torch

    return torch.stack(scalars)


def _channel_like(norms: Any) -> Any:
    xp = namespace(norms)
    if xp is np:
        return np.zeros(len(norms) + 2, norms.dtype)
    return norms.new_zeros(len(norms) + 2)


def _bounds(like: Any, layers: int, values: list[float]) -> Any:
    """(n,) bounds: the layers' own, then that of the global norm and of the loss."""
    xp = namespace(like)
    bounds = xp.zeros_like(like)
    bounds[:layers] = values[0]
    bounds[layers] = values[1]
    bounds[layers + 1] = values[2]
    return bounds


def _matters(x: Any, baseline: Baseline) -> Any:
    """(n,) bool: not a layer whose gradient is rounding noise beside the others (a bias before BatchNorm)."""
    xp = namespace(x)
    floor = baseline.level[baseline.layers] + math.log(LEAST_SHARE)
    return (x > floor) | (baseline.is_layer == 0) | ~xp.isfinite(floor)


def _lr_slack(watched: Watched, event: GradientEvent) -> float:
    """Log units of rise to allow because the learning rate has just risen (restarts, warm-up)."""
    rate = event.learning_rates[0] if len(event.learning_rates) else None
    if not isinstance(rate, (int, float)) or rate <= 0:
        return 0.0
    level = watched.rate_level
    if level is None:
        watched.rate_level = rate
        return 0.0
    watched.rate_level = level + (rate - level) / LR_WINDOW
    return max(0.0, math.log(rate / level) - math.log(2.0)) if level > 0 else 0.0


def _track_loss(watched: Watched, loss: Any) -> None:
    """Running mean of |loss|: the unit in which the loss is judged."""
    size = abs(loss)
    if watched.loss_scale is None:
        watched.loss_scale = size
    else:
        weight = 1.0 / min(watched.baseline.steps, LOSS_WINDOW)
        watched.loss_scale = watched.loss_scale + weight * (size - watched.loss_scale)
