"""The drift channel of ``spike``: a layer whose gradient grows slowly but steadily, away from the others.

A Shiryaev-Roberts e-detector (Shin, Ramdas and Rinaldo 2024, "E-detectors: a nonparametric framework for sequential
change detection", sections 3 and 5) bets on how often a layer's distance from its slow level, less what the layers have
in common, passes its own upper decile: on a settled layer one time in ten, on one that grows far more often. If the
exceedances of a settled layer come with probability at most 0.1 whatever came before, the statistic less the number of
looks is a supermartingale, so its average run length to a false alarm is at least the bound. That is an idealisation
(the decile is tracked, training is not stationary), so an alarm also takes an effect: the layer must have risen by
EFFECT over its slow level beyond what the other layers did. It only warns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dynguard_plugins.stability.baseline import Baseline, Score, filled, kth, namespace

EVERY = 4  # steps between two looks
NULL, BET = 0.1, 0.3  # probability of an exceedance on a settled layer, and the one that is bet on
SETTLED = 100  # accepted steps before the first bet
SLOW_WINDOW, FAST_WINDOW = 400.0, 20.0  # steps
EFFECT = 3.5  # least growth over the slow level, beyond the others: the most of 27 healthy runs was 2.9
LEAST_SPREAD = 0.02
MOST = 1e30


class Drift:
    """Evidence of drift by layer; all arrays are (layers,).

    Args:
        like: (n,) channels of the baseline, for dtype and device.
        layers: how many of them are layers.
        run_length: average number of looks to a false alarm, over all layers together.
    """

    FIELDS = ("evidence", "slow", "fast", "high", "spread")

    def __init__(self, like: Any, layers: int, run_length: float) -> None:
        self.layers = layers
        self.bound = run_length * max(layers, 1)
        for name in self.FIELDS:
            setattr(self, name, like[:layers] * 0.0)
        self.looks = 0
        self.tick = 0

    evidence: Any
    slow: Any
    fast: Any
    high: Any
    spread: Any

    def add(self, x: Any, score: Score, baseline: Baseline) -> Any:
        """Take in an accepted step; (layers,) bool: which layers drift, or None where this step was not looked at."""
        self.tick += 1
        if self.tick % EVERY or baseline.layers != self.layers or self.layers < 3:
            return None
        xp = namespace(x)
        n = self.layers
        now = xp.where(score.good[:n], x[:n], baseline.level[:n])
        self.looks += 1
        gain = 1.0 / min(self.looks, SLOW_WINDOW / EVERY)
        away = now - self.slow
        away = away - kth(away, n // 2)
        exceeds = away > self.high
        hits = None
        if baseline.steps >= SETTLED:
            factor = xp.where(exceeds, now * 0.0 + BET / NULL, now * 0.0 + (1 - BET) / (1 - NULL))
            self.evidence = xp.clip((self.evidence + 1.0) * factor, None, MOST)
            grown = self.fast - self.slow
            hits = (self.evidence >= self.bound) & (grown - kth(grown, n // 2) > math.log(EFFECT))
        self.slow = self.slow + (now - self.slow) * gain
        self.fast = self.fast + (now - self.fast) / min(self.looks, FAST_WINDOW / EVERY)
        self.spread = self.spread + (abs(away) - self.spread) * gain
        up = xp.where(exceeds, now * 0.0 + 1.0, now * 0.0)
        self.high = self.high + gain**0.5 * xp.clip(self.spread, LEAST_SPREAD, None) * (up - NULL)
        return hits

    def reset(self, hits: Any) -> None:
        """Start afresh at the present level for the layers that have been told."""
        xp = namespace(self.evidence)
        self.evidence = xp.where(hits, self.evidence * 0.0, self.evidence)
        self.slow = xp.where(hits, self.fast, self.slow)

    def state_dict(self) -> dict[str, Any]:
        """All numbers, as lists."""
        return {**{name: getattr(self, name).tolist() for name in self.FIELDS}, "looks": self.looks, "tick": self.tick}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up ``state_dict()``."""
        for name in self.FIELDS:
            setattr(self, name, filled(self.evidence, state[name]))
        self.looks, self.tick = state["looks"], state["tick"]
