"""Thresholds with a stated false-alarm rate: peaks over threshold with a generalised Pareto tail."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

CENSORED = 0.98
PEAKS = 0.1  # share of the values that are peaks
SHAPE_LIMITS = (-0.2, 0.05)  # of the tail index: a short history can't show more, and log-norms are no heavier
KEEP = 1000


def pareto_quantile(values: npt.NDArray[Any], rate: float, heaviest: float = SHAPE_LIMITS[1]) -> float:
    """The level that a value passes with probability ``rate``, from (m,) values, m >= 20.

    Peaks over the upper decile, generalised Pareto by probability-weighted moments (Hosking and Wallis 1987,
    "Parameter and quantile estimation for the generalized Pareto distribution", section 4), shape limited. Pickands
    (1975) is why the tail has that form.
    """
    ordered = np.sort(values)
    count = len(ordered)
    peaks = max(int(count * PEAKS), 15)
    base = ordered[-peaks - 1]
    over = ordered[-peaks:] - base
    mean = float(over.mean())
    if mean <= 0:
        return float(base)
    rank = np.arange(1, peaks + 1)
    moment = float((over * (peaks - rank) / (peaks - 1)).sum() / peaks)
    shape = 2.0 - mean / (mean - 2.0 * moment) if mean > 2.0 * moment else heaviest
    shape = min(max(shape, SHAPE_LIMITS[0]), heaviest)
    scale = mean * (1.0 - shape)
    ratio = rate * count / peaks
    if abs(shape) < 1e-4:
        return float(base - scale * np.log(ratio))
    return float(base + scale / shape * (ratio**-shape - 1.0))


def censored_quantile(values: npt.NDArray[Any], rate: float) -> float:
    """The same level by an exponential tail that is fitted between the upper decile and the 98th percentile.

    What lies further out is counted but not measured (Epstein and Sobel 1953: total time on test over failures), so up
    to 2% of faults that nobody noticed don't raise it.
    """
    ordered = np.sort(values)
    count = len(ordered)
    base, end = ordered[int(count * (1 - PEAKS)) - 1], ordered[int(count * CENSORED)]
    over = np.minimum(ordered[ordered > base], end) - base
    measured = int((ordered[ordered > base] <= end).sum())
    if not measured:
        return float(base)
    return float(base + over.sum() / measured * np.log(len(over) / (count * rate)))


class Threshold:
    """A threshold on a stream of scores, fitted to the accepted ones of the last 1,000 steps.

    Args:
        rate: probability that a clean score passes it.
        first: the threshold until ``calibrate`` scores are in.
        least: it never falls below this.
        calibrate: how many scores the first fit takes.
        heaviest: upper limit of the tail index: a loss has a heavier tail than a log-norm.
    """

    def __init__(
        self, *, rate: float, first: float, least: float, calibrate: int, heaviest: float = SHAPE_LIMITS[1]
    ) -> None:
        self.heaviest = heaviest
        self.rate, self.least, self.calibrate = rate, least, max(calibrate, 30)
        self.value = first
        self.fitted = False
        self._scores: deque[float] = deque(maxlen=KEEP)
        self._since = 0

    def add(self, score: float) -> bool:
        """Take in an accepted score; True when that led to a fit."""
        self._scores.append(score)
        self._since += 1
        due = self._since >= (20 if len(self._scores) < KEEP else 50)
        if len(self._scores) < self.calibrate or not (due or not self.fitted):
            return False
        self._since = 0
        self.value = max(self.least, self._quantile(np.array(self._scores), self.rate))
        self.fitted = True
        return True

    def p_value(self, score: float) -> float | None:
        """Share of clean scores expected at or above ``score``, beyond the data by the tail; None before a fit."""
        if not self.fitted:
            return None
        values = np.array(self._scores)
        above = float((values >= score).mean())
        if above > 0:
            return above
        low, high = 1.0 / len(values), 1e-12
        for _ in range(60):  # the quantile falls with the rate: bisect in log rate
            middle = (low * high) ** 0.5
            low, high = (middle, high) if self._quantile(values, middle) < score else (low, middle)
        return low

    def _quantile(self, values: npt.NDArray[Any], rate: float) -> float:
        """For a light tail the smaller of both estimates: the second is not moved by faults that nobody noticed.

        Where heavy tails are allowed (the whole batch's doing), rare large values are the data's own and count in full.
        """
        fitted = pareto_quantile(values, rate, self.heaviest)
        return min(fitted, censored_quantile(values, rate)) if self.heaviest <= SHAPE_LIMITS[1] else fitted

    def state_dict(self) -> dict[str, Any]:
        """Scores and fit."""
        return {"value": self.value, "fitted": self.fitted, "since": self._since, "scores": list(self._scores)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up ``state_dict()``."""
        self.value, self.fitted, self._since = state["value"], state["fitted"], state["since"]
        self._scores = deque(_numbers(state["scores"]), maxlen=KEEP)


def _numbers(values: Sequence[Any]) -> list[float]:
    return [float(v) for v in values]
