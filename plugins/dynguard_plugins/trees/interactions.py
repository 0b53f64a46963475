"""Which features act together: candidates from the trees' paths, tested against the target.

Candidates are pairs of a split and the split below it, weighted by the lower one's gain. Trees put features of purely
additive data on one path, too, so each candidate is tested on the data: an additive model in bins of each feature is
fitted (least squares, or logistic for a target of two values), and what it leaves is tabulated by cells of the pair, as
in FAST (Lou, Caruana, Gehrke & Hooker 2013, "Accurate intelligible models with pairwise interactions", section 3.1).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Whole = npt.NDArray[np.int64]
Pairs = dict[tuple[int, int], float]

CELLS = 3  # bins of each feature of a pair
BINS = 9  # bins of each feature of the additive model; cells are unions of them
ROWS = 10_000  # at most so many rows are looked at
CANDIDATES = 30
MOST_INFLATED = 10.0
NEWTON = 6


@dataclass(frozen=True, slots=True)
class Interaction:
    """Two features that act together.

    Attributes:
        features: their columns.
        names: their names.
        gain_share: of the gain of all parent-child pairs of different features.
        explained: share of what the additive model with all stronger pairs leaves that the pair's cells explain.
        inflation: variance inflation factor of their product beside all columns, or of one beside the other.
        p_value: of the F test, multiplied by the number of pairs tested.
    """

    features: tuple[int, int]
    names: tuple[str, str]
    gain_share: float
    explained: float
    inflation: float
    p_value: float


def pair_gains(trees: Mapping[str, Any]) -> Pairs:
    """Gain of splits by (feature of the split above, own feature), whichever is lower first; O(nodes)."""
    if "parent" not in trees or not len(trees["node"]):
        return {}
    place = np.arange(len(trees["node"]))
    root = np.maximum.accumulate(np.where(trees["node"] == 0, place, 0))
    below = ~trees["leaf"] & (trees["parent"] >= 0)
    own = trees["feature"][below]
    above = trees["feature"][root[below] + trees["parent"][below]]
    gain = np.nan_to_num(trees["gain"][below], posinf=0.0, neginf=0.0)
    found: Pairs = {}
    for a, b, value in zip(
        np.minimum(own, above).tolist(), np.maximum(own, above).tolist(), gain.tolist(), strict=True
    ):
        if a != b:
            found[a, b] = found.get((a, b), 0.0) + value
    return found


def suggest_interactions(
    table: Mapping[str, Any],
    X: Any,  # noqa: N803
    y: Any,
    names: Sequence[str] = (),
    *,
    alpha: float = 0.001,
    top: int = 10,
) -> list[Interaction]:
    """The pairs of features that act together, strongest first.

    Cost: O(nodes + top n (BINS d)^2) for n rows (at most 10,000) of d columns; six times that for two classes.

    Args:
        table: the trees, as a TreeEvent or ``flow.inspect`` gives them.
        X: (n, d) numbers; NaN is a bin of its own.
        y: (n,) the target; two values are taken for classes.
        names: of the columns.
        alpha: level of the F test, over all candidates.
        top: at most so many.

    Raises:
        ValueError: X and y do not go together.
    """
    return bear_out(pair_gains(table), X, y, names, alpha=alpha, top=top)


def bear_out(gains: Pairs, X: Any, y: Any, names: Sequence[str], *, alpha: float, top: int) -> list[Interaction]:  # noqa: N803
    """The same from the gains of pairs; names may be fewer than columns."""
    x, target = checked(X, y)
    usable = {pair: gain for pair, gain in gains.items() if gain > 0 and pair[1] < x.shape[1]}
    candidates = sorted(usable, key=lambda pair: (-usable[pair], pair))[:CANDIDATES]
    if not candidates:
        return []
    calm = {pair: factor for pair in candidates if (factor := _inflation(x, *pair)) < MOST_INFLATED}
    bins = np.column_stack([binned(column, BINS) for column in x.T])
    total = sum(usable.values())
    found = []
    for (a, b), explained, p in _forward(bins, target, list(calm), alpha / len(candidates), top):
        both = tuple(names[f] if f < len(names) else f"column {f}" for f in (a, b))
        p = min(1.0, p * len(candidates))
        found.append(Interaction((a, b), (both[0], both[1]), usable[a, b] / total, explained, calm[a, b], p))
    return found


def _forward(
    bins: Whole, target: Floats, pairs: list[tuple[int, int]], alpha: float, top: int
) -> Iterator[tuple[tuple[int, int], float, float]]:
    """(pair, share explained, p value): the strongest joins the model, then the rest are tested again.

    So a feature's near copy is not named for what the feature did.
    """
    design = _design(bins)
    while pairs and top > 0:
        left, weight = _left(design, target)
        scores = {
            p: _cells(bins[:, p[0]] // CELLS, bins[:, p[1]] // CELLS, left, weight, design.shape[1]) for p in pairs
        }
        best = max(pairs, key=lambda p: scores[p][0])
        if not scores[best][1] < alpha:
            return
        yield best, *scores[best]
        cell = (bins[:, best[0]] // CELLS) * CELLS + bins[:, best[1]] // CELLS
        design = np.column_stack([design, *((cell == kind).astype(np.float64) for kind in np.unique(cell)[1:])])
        pairs, top = [p for p in pairs if p != best], top - 1


def checked(X: Any, y: Any) -> tuple[Floats, Floats]:  # noqa: N803
    """X and y as numbers, at most 10,000 evenly spaced rows of them.

    Raises:
        ValueError: they do not go together.
    """
    x, target = np.asarray(X, dtype=np.float64), np.asarray(y, dtype=np.float64).reshape(-1)
    if x.ndim != 2 or len(x) != len(target):
        raise ValueError(f"X is to be (n, d) and y (n,); they are {x.shape} and {np.shape(y)}")
    keep = np.isfinite(target)
    x, target = x[keep], target[keep]
    step = max(1, -(-len(x) // ROWS))
    return x[::step], target[::step]


def binned(column: Floats, bins: int) -> Whole:
    """Bins of about equal counts, 0 to bins - 1; NaN goes to the lowest."""
    finite = column[~np.isnan(column)]
    if not len(finite):
        return np.zeros(len(column), dtype=np.int64)
    edges = np.unique(np.quantile(finite, np.linspace(0, 1, bins + 1)[1:-1]))
    found = np.searchsorted(edges, np.where(np.isnan(column), -np.inf, column), side="right")
    # few distinct values: spread the bins, so that unions of neighbours keep them apart
    scale = (bins - 1) / max(len(edges), 1)
    return np.rint(found * scale).astype(np.int64) if len(edges) < bins - 1 else found.astype(np.int64)


def _left(design: Floats, target: Floats) -> tuple[Floats, Floats]:
    """What a model leaves (working residuals), and their weights; logistic for a target of two values."""
    kinds = np.unique(target)
    if len(kinds) != 2:
        ones = np.ones(len(target))
        return target - _least_squares(design, target, ones), ones
    hit = (target == kinds[1]).astype(np.float64)
    margin = np.zeros(len(hit))
    for _ in range(NEWTON):  # iteratively reweighted least squares
        chance, weight = _logistic(margin)
        margin = _least_squares(design, margin + (hit - chance) / weight, weight)
    chance, weight = _logistic(margin)
    return (hit - chance) / weight, weight


def _logistic(margin: Floats) -> tuple[Floats, Floats]:
    chance = 1.0 / (1.0 + np.exp(-np.clip(margin, -6.0, 6.0)))
    return chance, chance * (1.0 - chance)


def _design(bins: Whole) -> Floats:
    """An intercept, and each bin but the lowest of each column."""
    columns = [np.ones(len(bins))]
    for column in bins.T:
        columns += [(column == kind).astype(np.float64) for kind in np.unique(column)[1:]]
    return np.column_stack(columns)


def _least_squares(design: Floats, target: Floats, weight: Floats) -> Floats:
    """Fitted values; a ridge of 1e-6 of the diagonal keeps collinear columns from doing harm."""
    weighted = design * weight[:, None]
    gram = weighted.T @ design
    gram[np.diag_indices_from(gram)] += 1e-6 * max(float(gram.diagonal().max()), 1e-300)
    fitted: Floats = design @ np.linalg.solve(gram, weighted.T @ target)
    return fitted


def _cells(a: Whole, b: Whole, left: Floats, weight: Floats, freedom: int) -> tuple[float, float]:
    """Share of the residuals' squares that the cells of two features explain, and the p value of its F test.

    The cells' own main effects lie in the additive model, so (CELLS - 1)^2 degrees of freedom are new.
    """
    from scipy.stats import f as f_law  # type: ignore[import-untyped]  # scipy ships no types

    cell = a * CELLS + b
    sums, weights = np.bincount(cell, weight * left), np.bincount(cell, weight)
    between = float((sums**2 / np.where(weights > 0, weights, 1.0)).sum())
    total = float((weight * left**2).sum())
    kinds = (len(np.unique(a)) - 1) * (len(np.unique(b)) - 1)
    rest = len(left) - freedom - kinds
    if total <= 0 or kinds < 1 or rest < 1 or between >= total:
        return 0.0, 1.0
    ratio = (between / kinds) / ((total - between) / rest)
    return between / total, float(f_law.sf(ratio, kinds, rest))


def _inflation(x: Floats, a: int, b: int) -> float:
    """1 / (1 - R^2): of the centred product beside all columns, or of one feature beside the other if that is more."""
    seen = np.maximum((~np.isnan(x)).sum(axis=0), 1)
    known = np.nan_to_num(x - np.nansum(x, axis=0) / seen)  # what is missing counts as the mean
    product = known[:, a] * known[:, b]
    return max(_vif(known, product), _vif(known[:, [a]], known[:, b]))


def _vif(columns: Floats, target: Floats) -> float:
    target = target - target.mean()
    total = float(target @ target)
    if total <= 0:
        return np.inf
    columns = columns - columns.mean(axis=0)
    fitted = columns @ np.linalg.lstsq(columns, target, rcond=None)[0]
    left = float(((target - fitted) ** 2).sum())
    return total / left if left > 0 else np.inf
