"""Columns that know the target by themselves, and row numbers among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dynguard_plugins.trees.interactions import Floats, binned, checked

KNOWS = 0.99  # R^2 out of sample of the target by one column
BINS = 64
LEAST_ROWS = 50
ORDERED = 0.99  # rank correlation with the row number


@dataclass(frozen=True, slots=True)
class Leak:
    """A column that predicts the target (nearly) by itself.

    Attributes:
        feature, name: which column.
        r2: out-of-sample R^2 of the target by the means in bins of the column.
        distinct: share of its values that are distinct.
        order: rank correlation of the column with the row number, absolute.
        identifier: distinct throughout and in the order of the rows, or nearly: a row number or a time stamp.
    """

    feature: int
    name: str
    r2: float
    distinct: float
    order: float
    identifier: bool


def leaks(X: Any, y: Any, names: Sequence[str] = ()) -> list[Leak]:  # noqa: N803
    """The columns that predict the target nearly by themselves, worst first.

    A real feature may decide the target; what is listed here is to be looked at. Cost: O(n log n) a column.

    Args:
        X: (n, d) numbers.
        y: (n,) the target, as numbers.
        names: of the columns.

    Raises:
        ValueError: X and y do not go together.
    """
    x, target = checked(X, y)
    if len(x) < LEAST_ROWS or target.std() == 0:
        return []
    found = []
    for feature, column in enumerate(x.T):
        r2 = held_out_r2(column, target)
        if r2 >= KNOWS:
            name = names[feature] if feature < len(names) else f"column {feature}"
            distinct = len(np.unique(column)) / len(column)
            order = _order(column)
            found.append(Leak(feature, name, r2, distinct, order, distinct > KNOWS and order > ORDERED))
    return sorted(found, key=lambda one: -one.r2)


def held_out_r2(column: Floats, target: Floats) -> float:
    """R^2 of each half of the rows, every other one, by the means in bins of the other half; the lesser of the two."""
    bins = binned(column, BINS)
    half = np.arange(len(target)) % 2
    return min(_r2(bins, target, half == side) for side in (0, 1))


def _r2(bins: Any, target: Floats, learn: Any) -> float:
    count = np.bincount(bins[learn], minlength=BINS)
    mean = target[learn].mean()
    means = np.where(count > 0, np.bincount(bins[learn], target[learn], BINS) / np.maximum(count, 1), mean)
    rest = ~learn
    total = float(((target[rest] - target[rest].mean()) ** 2).sum())
    left = float(((target[rest] - means[bins[rest]]) ** 2).sum())
    return 1.0 - left / total if total > 0 else 0.0


def _order(column: Floats) -> float:
    from scipy.stats import spearmanr  # type: ignore[import-untyped]  # scipy ships no types

    known = ~np.isnan(column)
    if known.sum() < LEAST_ROWS or np.ptp(column[known]) == 0:
        return 0.0
    return float(abs(spearmanr(column[known], np.flatnonzero(known)).statistic))
