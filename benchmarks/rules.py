"""Published spike rules as functions of a step's numbers, to be measured on the same runs as dynguard.

Each is written from its description; ``score`` is the statistic that is compared with the rule's threshold, so that its
whole trade-off can be drawn. A rule keeps its own state by its own lights, spikes included where it does so.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np


@dataclass
class Seen:
    """One step: norms by layer, the global norm, the loss."""

    norms: dict[str, float]
    total: float
    loss: float


@dataclass
class Said:
    """A rule's answer: its statistic, whether it alarms at its published threshold, and the layer it names."""

    score: float
    alarm: bool
    layer: str | None = None


class Rule(Protocol):
    """A rule is fed every step in order."""

    def step(self, seen: Seen) -> Said:
        """Judge one step."""


class ZClip:
    """z of the global norm against an exponential mean and variance (Kumar et al. 2025, arXiv 2504.02507)."""

    def __init__(self, alpha: float = 0.97, z: float = 2.5, warmup: int = 25) -> None:
        self.alpha, self.z, self.warmup = alpha, z, warmup
        self.first: list[float] = []
        self.mean = self.var = 0.0

    def step(self, seen: Seen) -> Said:
        norm = seen.total
        if len(self.first) < self.warmup:
            if math.isfinite(norm):
                self.first.append(norm)
                self.mean, self.var = float(np.mean(self.first)), float(np.var(self.first))
            return Said(math.nan if math.isfinite(norm) else math.inf, not math.isfinite(norm))
        if not math.isfinite(norm):
            return Said(math.inf, True)
        z = (norm - self.mean) / (math.sqrt(self.var) + 1e-6)
        # The clipped value enters the statistics: mean + z_threshold^2 / z * std.
        value = self.mean + self.z**2 / z * math.sqrt(self.var) if z > self.z else norm
        self.mean = self.alpha * self.mean + (1 - self.alpha) * value
        self.var = self.alpha * self.var + (1 - self.alpha) * (value - self.mean) ** 2
        return Said(z, z > self.z)


class SixSigma:
    """Loss or global norm above mean + 6 standard deviations of the last 128 (the rule of several LLM trainers)."""

    def __init__(self, window: int = 128, sigmas: float = 6.0, least: int = 20) -> None:
        self.sigmas, self.least = sigmas, least
        self.past: dict[str, deque[float]] = {"norm": deque(maxlen=window), "loss": deque(maxlen=window)}

    def step(self, seen: Seen) -> Said:
        scores = [self._one("norm", seen.total), self._one("loss", seen.loss)]
        known = [s for s in scores if not math.isnan(s)]
        score = max(known, default=math.nan)
        return Said(score, score > self.sigmas)

    def _one(self, key: str, value: float) -> float:
        past = self.past[key]
        score = math.nan
        if not math.isfinite(value):
            score = math.inf
        elif len(past) >= self.least:
            score = (value - float(np.mean(past))) / (float(np.std(past)) + 1e-12)
        past.append(value)
        return score


class Ratio:
    """Any layer's norm above ten times its exponential mean of the steps before."""

    def __init__(self, ratio: float = 10.0, alpha: float = 0.1, warmup: int = 10) -> None:
        self.ratio, self.alpha, self.warmup = ratio, alpha, warmup
        self.means: dict[str, float] = {}
        self.count = 0

    def step(self, seen: Seen) -> Said:
        self.count += 1
        worst, where = -math.inf, None
        for name, norm in seen.norms.items():
            if not math.isfinite(norm):
                worst, where = math.inf, name
                continue
            mean = self.means.get(name, norm)
            if self.count > self.warmup and mean > 0 and norm / mean > worst:
                worst, where = norm / mean, name
            self.means[name] = (1 - self.alpha) * mean + self.alpha * norm
        return Said(worst, worst > self.ratio, where)


@dataclass
class Peer:
    """The detector of a published release, fed as its optimizer wrapper feeds it."""

    module: Any
    threshold: float = 10.0
    detector: Any = field(init=False)

    def __post_init__(self) -> None:
        self.detector = self.module.core.spike_detector.SpikeDetector(threshold=self.threshold)

    def step(self, seen: Seen) -> Said:
        bad = {name for name, norm in seen.norms.items() if not math.isfinite(norm)}
        alarm, spike, baselines = self.detector.check(seen.norms, bad)
        ratios = [n / baselines[k] for k, n in seen.norms.items() if k in baselines and baselines[k] > 0 and n > 0.01]
        score = math.inf if bad else max((r for r in ratios if math.isfinite(r)), default=-math.inf)
        return Said(score, bool(alarm), None if spike is None else str(spike.layer))
