"""The drift channel of ``spike``: a layer whose gradient grows slowly but steadily, away from the others.

A Shiryaev-Roberts e-detector (Shin, Ramdas and Rinaldo 2024, "E-detectors: a nonparametric framework for sequential
change detection", sections 3 and 5) bets on how often a layer's residual passes its own upper decile: on a settled
layer one time in ten, on one that grows far more often. If the exceedances of a settled layer come with probability at
most 0.1 whatever came before, the statistic less the number of looks is a supermartingale, so its average run length to
a false alarm is at least the bound. That is an idealisation (the decile is tracked, and training is not stationary), so
an alarm also takes an effect: the layer's level must have risen threefold over its slow level beyond what the other
layers did. It only warns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dynguard_plugins.stability.baseline import Baseline, Score, filled, kth, namespace

EVERY = 2  # steps between two looks
NULL, BET = 0.1, 0.3  # probability of an exceedance on a settled layer, and the one that is bet on
SETTLED = 100  # accepted steps before the first bet
SLOW_WINDOW = 400.0
EFFECT = 3.0  # least growth of the level over the slow level
MOST = 1e30


class Drift:
    """Evidence of drift by layer.

    Args:
        like: (n,) channels of the baseline, for dtype and device.
        layers: how many of them are layers.
        run_length: average number of looks to a false alarm, over all layers together.
    """

    def __init__(self, like: Any, layers: int, run_length: float) -> None:
        self.layers = layers
        self.bound = run_length * max(layers, 1)
        self.evidence = like[:layers] * 0.0
        self.slow = like[:layers] * 0.0
        self.looks = 0
        self.tick = 0

    def add(self, x: Any, score: Score, baseline: Baseline) -> Any:
        """Take in an accepted step; (layers,) bool: which layers drift, or None where this step was not looked at."""
        self.tick += 1
        if self.tick % EVERY or baseline.layers != self.layers:
            return None
        xp = namespace(x)
        n = self.layers
        now = xp.where(score.good[:n], x[:n], baseline.level[:n])
        self.looks += 1
        self.slow = self.slow + (now - self.slow) * (1.0 / min(self.looks, SLOW_WINDOW / EVERY))
        if baseline.steps < SETTLED or n < 3:
            return None
        exceeds = score.good[:n] & (score.residual[:n] > baseline.high[:n])
        factor = xp.where(exceeds, now * 0.0 + BET / NULL, now * 0.0 + (1 - BET) / (1 - NULL))
        self.evidence = xp.clip((self.evidence + 1.0) * factor, None, MOST)
        grown = baseline.level[:n] - self.slow
        return (self.evidence >= self.bound) & (grown - kth(grown, n // 2) > math.log(EFFECT))

    def reset(self, hits: Any, baseline: Baseline) -> None:
        """Start afresh at the present level for the layers that have been told."""
        xp = namespace(self.evidence)
        self.evidence = xp.where(hits, self.evidence * 0.0, self.evidence)
        self.slow = xp.where(hits, baseline.level[: self.layers], self.slow)

    def state_dict(self) -> dict[str, Any]:
        """All numbers, as lists."""
        return {
            "evidence": self.evidence.tolist(), "slow": self.slow.tolist(), "looks": self.looks, "tick": self.tick,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up ``state_dict()``."""
        self.evidence, self.slow = (filled(self.evidence, state[name]) for name in ("evidence", "slow"))
        self.looks, self.tick = state["looks"], state["tick"]
