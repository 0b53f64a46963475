"""Poison-proof baselines of many channels at once, on numpy arrays or on device tensors alike.

A channel is a log gradient norm (one per layer), the log global norm or the loss. Each has a running level, and what is
left after it (and after what the layers have in common) has running quantiles. Nothing here reads the device.

Why quantiles and not a standard deviation: a log-norm's lower tail can be long (a scalar bias whose gradient passes
zero) while its upper tail is short; only the upper side says how unusual a rise is. They are tracked by stochastic
approximation (Robbins and Monro 1951; Tierney 1983, "A space-efficient recursive procedure for estimating a quantile"),
whose step does not depend on how far out a value lies, so a spike that slips in moves them no more than any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

LEVEL_WINDOW = 20.0  # steps over which the level follows
SPREAD_WINDOW = 400.0  # steps over which spread, loadings and quantiles follow
GAIN = 1.5  # of the quantile tracker, in units of the mean absolute residual
PAD = 0.15  # log units added to every scale: variations of a few per cent never matter
COMMON = 0.25  # the common factor is this quantile over layers: a fault in most of them leaves it alone
SPREADING = 0.25  # how much the scale grows with the size of the common rise
LEAST_SPREAD = 0.02


def namespace(array: Any) -> ModuleType:
    """numpy for arrays, torch for tensors: the few functions used here have the same names in both."""
    if isinstance(array, np.ndarray):
        return np
    import torch

    return torch


def kth(array: Any, position: int) -> Any:
    """The value at ``position`` of the sorted 1-d ``array``, 0-d, without sorting on the host."""
    if isinstance(array, np.ndarray):
        return np.partition(array, position)[position]
    return array.kthvalue(position + 1).values


def filled(like: Any, values: Sequence[Any]) -> Any:
    """``values`` as an array of the kind, device and dtype of ``like``."""
    if isinstance(like, np.ndarray):
        return np.array(values, like.dtype)
    return like.new_tensor(values)


@dataclass(slots=True)
class Score:
    """What a step looks like against the baseline; all (n,) but ``common``.

    Attributes:
        rise: log units above the channel's level.
        residual: what is left of the rise after the part that all layers share.
        z: residual above the upper quantile in units of the distance between the quantiles; -9 where not known yet.
        good: whether the value is finite.
        common: the layers' common rise, 0-d.
    """

    rise: Any
    residual: Any
    z: Any
    good: Any
    common: Any


def score_state(score: Score) -> dict[str, Any]:
    """A score as lists, for checkpoints."""
    return {name: getattr(score, name).tolist() for name in ("rise", "residual", "z", "good", "common")}


def score_from(state: Mapping[str, Any], like: Any) -> Score:
    """The score that ``score_state()`` described."""
    rise, residual, z = (filled(like, state[name]) for name in ("rise", "residual", "z"))
    return Score(rise, residual, z, filled(like, state["good"]) > 0, filled(like, [state["common"]])[0])


class Baseline:
    """Level and spread of n channels, of which the first ``layers`` share a common factor.

    Args:
        like: (n,) array or tensor of the first step, for dtype and device.
        layers: how many of the channels are layers.
        warmup: accepted steps after which a channel is known.
    """

    FIELDS = ("count", "level", "spread", "loading", "low", "high", "record")

    def __init__(self, like: Any, layers: int, warmup: int) -> None:
        xp = namespace(like)
        self.layers = layers
        self.warmup = warmup
        for name in self.FIELDS:
            setattr(self, name, xp.zeros_like(like))
        self.spread += 0.3
        self.record -= 0.0
        self.common_power = like[:1] * 0.0
        self.common_power[:] = 0.0  # also where the first value was not finite
        self.is_layer = xp.zeros_like(like)
        self.is_layer[:layers] = 1.0
        self.steps = 0
        self._ripened = False

    count: Any
    level: Any
    spread: Any
    loading: Any
    low: Any
    high: Any
    record: Any

    def score(self, x: Any) -> Score:
        """Compare the channels' values ``x``, (n,), with their baselines."""
        xp = namespace(x)
        good = xp.isfinite(x)
        sure = xp is np and self._ripe and bool(good.all())
        rise = x - self.level if sure else xp.where(good & (self.count > 0), x - self.level, self.spread * 0.0)
        layers = self.layers
        if layers > 2:
            common = kth(rise[:layers], int(COMMON * (layers - 1) + 0.5))
            share = xp.clip(self.loading / (self.common_power + 1e-9), 0.0, 2.0)
            residual = rise - share * common
        else:
            common = rise[0] * 0.0
            residual = rise
        # Layers agree less on a batch that is far from the usual: the scale grows with the common rise.
        z = (residual - self.high) / (abs(self.high - self.low) + PAD + self.is_layer * (SPREADING * abs(common)))
        if not sure:
            z = xp.where(good & (self.count >= self.warmup), z, z * 0.0 - 9.0)
        return Score(rise, residual, z, good, common)

    def accept(self, x: Any, score: Score, good: Any) -> None:
        """Let a step into the baseline, where ``good`` (n,) bool says so."""
        if isinstance(x, np.ndarray) and self._ripe and good.all():
            self._accept_all(score)
            return
        xp = namespace(x)
        self.steps += 1
        ok = xp.where(good, self.is_layer * 0.0 + 1.0, self.is_layer * 0.0)
        self.count = self.count + ok
        inverse = ok / xp.clip(self.count, 1.0, None)
        fast = xp.clip(inverse, 1.0 / LEVEL_WINDOW, None) * ok
        slow = xp.clip(inverse, 1.0 / SPREAD_WINDOW, None) * ok
        fresh = good & (self.count == 1.0)
        value = xp.where(good, x, self.level)
        rise = xp.where(good, score.rise, self.level * 0.0)
        residual = xp.where(good, score.residual, self.level * 0.0)
        self.level = xp.where(fresh, value, self.level + fast * rise)
        self.spread = self.spread + slow * (abs(residual) - self.spread)
        pull = GAIN * (slow**0.5) * xp.clip(self.spread, LEAST_SPREAD, None) * ok
        self.low = self.low + pull * (xp.where(residual > self.low, ok, ok * 0.0) - 0.5)
        self.high = self.high + pull * (xp.where(residual > self.high, ok, ok * 0.0) - 0.1)
        self.record = xp.where(good & (rise > self.record), rise, self.record)
        if self.steps > 3 and self.layers > 2:
            weight = 1.0 / min(self.steps, SPREAD_WINDOW)
            self.common_power = self.common_power + weight * (score.common * score.common - self.common_power)
            self.loading = self.loading + slow * self.is_layer * (rise * score.common - self.loading)

    def _accept_all(self, score: Score) -> None:
        """accept() where every channel is good and old enough for constant weights, in place."""
        self.steps += 1
        rise, residual = score.rise, score.residual
        self.level += rise * (1.0 / LEVEL_WINDOW)
        self.spread += (abs(residual) - self.spread) * (1.0 / SPREAD_WINDOW)
        pull = np.maximum(self.spread, LEAST_SPREAD) * (GAIN * SPREAD_WINDOW**-0.5)
        self.low += pull * ((residual > self.low) - 0.5)
        self.high += pull * ((residual > self.high) - 0.1)
        np.maximum(self.record, rise, out=self.record)
        if self.layers > 2:
            self.common_power += (score.common * score.common - self.common_power) * (1.0 / SPREAD_WINDOW)
            gain = self.is_layer * (1.0 / SPREAD_WINDOW)
            self.loading += gain * (rise * score.common - self.loading)

    def record_rise(self, score: Score, least: float, above: float) -> Any:
        """0-d bool: whether the global norm's rise is beyond ``least`` and by ``above`` beyond all that was accepted.

        For where bad batches that were accepted have made the tail of the scores so heavy that a threshold fitted to
        it tells nothing. All in log units.
        """
        whole = self.layers
        rise = score.rise[whole]
        return score.good[whole] & (rise > least) & (rise > self.record[whole] + above)

    @property
    def _ripe(self) -> bool:
        """Whether every channel has been accepted often enough for constant weights; numpy only."""
        if not self._ripened and self.steps >= SPREAD_WINDOW:
            self._ripened = bool(self.count.min() >= SPREAD_WINDOW)
        return self._ripened

    def grown(self, like: Any, layers: int) -> Baseline:
        """The same with room for layers that joined: they follow the known layers and start unknown."""
        fresh = Baseline(like, layers, self.warmup)
        for name in self.FIELDS:
            into, have = getattr(fresh, name), getattr(self, name)
            into[: self.layers] = have[: self.layers]
            into[layers:] = have[self.layers :]
        fresh.common_power, fresh.steps = self.common_power, self.steps
        fresh.count[layers] = 0.0  # the global norm has other members now: its level starts afresh
        fresh.count[layers + 1 :] = self.count[self.layers + 1 :]
        return fresh

    def move_to(self, x: Any, channels: Sequence[int] | None = None) -> None:
        """Take the present values ``x`` (of these channels only) as the new level: the regime has changed."""
        xp = namespace(x)
        moved = xp.isfinite(x)
        if channels is not None:
            chosen = xp.zeros_like(moved)
            chosen[list(channels)] = True
            moved = moved & chosen
        self.level = xp.where(moved, x, self.level)

    def state_dict(self) -> dict[str, Any]:
        """All numbers, as lists."""
        return {
            **{name: getattr(self, name).tolist() for name in (*self.FIELDS, "common_power")},
            "layers": self.layers,
            "steps": self.steps,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], like: Any, warmup: int) -> Baseline:
        """The baseline that ``state_dict()`` described, on the device and in the dtype of ``like``."""
        made = cls(filled(like, [0.0] * len(state["level"])), state["layers"], warmup)
        for name in (*cls.FIELDS, "common_power"):
            setattr(made, name, filled(like, state[name]))
        made.steps = state["steps"]
        return made
