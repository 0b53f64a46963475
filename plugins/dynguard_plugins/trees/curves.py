"""Metrics over the rounds: one curve for training and one for validation; each round costs the same."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dynguard_plugins.trees import names

Metrics = Mapping[str, Mapping[str, float]]


@dataclass(slots=True)
class Curve:
    """One metric of one data set over the rounds, turned so that less is better.

    Attributes:
        data, metric: which one.
        sign: 1, or -1 where the values are the metric's negative.
        rounds, values: of the rounds at which it was finite.
        best, best_round: the least value and the round that had it.
        lost: number of rounds at which it was not finite.
    """

    data: str
    metric: str
    sign: int = 1
    rounds: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    best: float = math.inf
    best_round: int = -1
    lost: int = 0

    def add(self, round_: int, value: float) -> None:
        """Take note of one round's value."""
        if not math.isfinite(value):
            self.lost += 1
            return
        self.rounds.append(round_)
        self.values.append(self.sign * value)
        if self.values[-1] < self.best:
            self.best, self.best_round = self.values[-1], round_

    @property
    def first(self) -> float:
        """The value of the first round."""
        return self.values[0]

    @property
    def last(self) -> float:
        """The newest value."""
        return self.values[-1]

    @property
    def gained(self) -> float:
        """What the best round is better than the first."""
        return self.first - self.best

    @property
    def excess(self) -> float:
        """What the last round is worse than the best."""
        return self.last - self.best

    def rises(self, most: int = 12) -> int:
        """How many rounds in a row, up to now, each made it worse."""
        count = 0
        tail = self.values[-most - 1 :]
        while count + 1 < len(tail) and tail[-1 - count] > tail[-2 - count]:
            count += 1
        return count


@dataclass(slots=True)
class Curves:
    """The curve that training is judged by, and that of validation; None while there is none."""

    train: Curve | None = None
    validation: Curve | None = None

    def add(self, round_: int, metrics: Metrics) -> None:
        """Take note of one round's metrics; which ones are followed is settled at the first round that has them."""
        if self.train is None:
            self.train = _chosen(metrics, True, None)
        if self.validation is None:
            self.validation = _chosen(metrics, False, self.train)
        for curve in (self.train, self.validation):
            value = None if curve is None else metrics.get(curve.data, {}).get(curve.metric)
            if curve is not None and value is not None:
                curve.add(round_, float(value))


def _chosen(metrics: Metrics, training: bool, like: Curve | None) -> Curve | None:
    """The smooth loss among the metrics, the same for validation as for training; the last validation set counts."""
    found = [
        (data, name) for data, by_name in metrics.items() if names.is_training(data) == training
        for name in by_name if names.direction(name)
    ]  # fmt: skip
    if not found:
        return None
    last = found[-1][0]
    data, name = min((pair for pair in found if pair[0] == last), key=lambda pair: _rank(pair[1], like))
    return Curve(data, name, -names.direction(name))


def _rank(name: str, like: Curve | None) -> tuple[Any, ...]:
    return (like is None or like.metric != name, names.direction(name) > 0, name.lower() in names.COARSE)
