"""Measures of exposure, recommendation lists, spread and rank, as pure functions of numpy arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def _counts(counts: npt.ArrayLike) -> Array:
    found = np.asarray(counts, dtype=np.float64).reshape(-1)
    if found.size and not found.min() >= 0:
        raise ValueError("counts must be numbers >= 0")
    return found


def gini(counts: npt.ArrayLike) -> float:
    """Gini coefficient of (n,) counts: 0 where all are equal, (n - 1) / n where one has everything; NaN of nothing."""
    x = np.sort(_counts(counts))
    n, total = x.size, x.sum()
    if not n or not total:
        return float("nan")
    return float(np.dot(2 * np.arange(1, n + 1) - n - 1, x) / (n * total))


def entropy(counts: npt.ArrayLike) -> float:
    """Shannon entropy in nats of (n,) counts as a distribution; NaN of nothing."""
    x = _counts(counts)
    total = x.sum()
    if not total:
        return float("nan")
    p = x[x > 0] / total
    return float(-np.dot(p, np.log(p)))


def perplexity(counts: npt.ArrayLike) -> float:
    """exp(entropy): how many entries are in use, as if all of these were used equally (van den Oord et al. 2017)."""
    return float(np.exp(entropy(counts)))


def coverage(counts: npt.ArrayLike) -> float:
    """Share of the (n,) entries that have any count; NaN of nothing."""
    x = _counts(counts)
    return float(np.count_nonzero(x) / x.size) if x.size else float("nan")


def lorenz(counts: npt.ArrayLike, points: int = 101) -> tuple[Array, Array]:
    """The Lorenz curve, interpolated linearly.

    Args:
        counts: (n,) counts.
        points: how many points of the curve, evenly spaced in [0, 1].

    Returns:
        (points,) share of the entries from the rarest on, and (points,) share of all counts that they have.
    """
    x = np.sort(_counts(counts))
    at = np.linspace(0.0, 1.0, points)
    if not x.sum():
        return at, np.full(points, np.nan)
    have = np.concatenate([[0.0], np.cumsum(x) / x.sum()])
    return at, np.interp(at, np.linspace(0.0, 1.0, have.size), have)


def head_share(counts: npt.ArrayLike, head: float = 0.2) -> float:
    """Which share of all counts the most frequent ``head`` of the entries have (at least one entry); NaN of nothing."""
    x = np.sort(_counts(counts))[::-1]
    total = x.sum()
    return float(x[: _head_size(x.size, head)].sum() / total) if total else float("nan")


def head_entries(counts: npt.ArrayLike, head: float = 0.2) -> npt.NDArray[np.bool_]:
    """(n,) which entries are the most frequent ``head`` of them; ties go to the lower index."""
    x = _counts(counts)
    found = np.zeros(x.size, dtype=np.bool_)
    found[np.argsort(-x, kind="stable")[: _head_size(x.size, head)]] = True
    return found


def _head_size(n: int, head: float) -> int:
    return min(n, max(1, round(head * n)))


def per_list(lists: Sequence[npt.ArrayLike], values: npt.ArrayLike) -> Array:
    """(lists,) mean of ``values``, shape (n,), over the items of each list; empty lists are left out."""
    x = np.asarray(values, dtype=np.float64)
    return np.array([x[np.asarray(items, dtype=np.int64)].mean() for items in lists if np.size(items)])


def average_recommendation_popularity(lists: Sequence[npt.ArrayLike], popularity: npt.ArrayLike) -> float:
    """ARP (Yin et al. 2012, "Challenging the long tail recommendation"): mean over lists of their mean popularity."""
    found = per_list(lists, popularity)
    return float(found.mean()) if found.size else float("nan")


def average_share_of_long_tail(lists: Sequence[npt.ArrayLike], popularity: npt.ArrayLike, head: float = 0.2) -> float:
    """APLT (Abdollahpouri et al. 2017, "Controlling popularity bias"): mean over lists of their share of tail items."""
    found = per_list(lists, ~head_entries(popularity, head))
    return float(found.mean()) if found.size else float("nan")


def popularity_of_data(popularity: npt.ArrayLike) -> float:
    """Mean popularity of what the data itself shows: sum of squares over sum of (n,) counts."""
    x = _counts(popularity)
    total = x.sum()
    return float(np.dot(x, x) / total) if total else float("nan")


def singular_values(matrix: npt.ArrayLike) -> Array:
    """Singular values of a (rows, d) matrix, descending."""
    return np.linalg.svd(np.asarray(matrix, dtype=np.float64), compute_uv=False)


def effective_rank(values: npt.ArrayLike, eps: float = 1e-7) -> float:
    """RankMe (Garrido et al. 2023, "RankMe", equation 1): exp(entropy of the singular values over their sum + eps).

    Args:
        values: singular values; those of a matrix are had from :func:`singular_values`.
        eps: is added to each share.
    """
    s = np.asarray(values, dtype=np.float64)
    total = s.sum()
    if not total > 0:
        return float("nan")
    p = s / total + eps
    return float(np.exp(-np.dot(p, np.log(p))))


def information_abundance(values: npt.ArrayLike) -> float:
    """Sum of the singular values over the largest (Guo et al. 2024, "On the embedding collapse", definition 1)."""
    s = np.asarray(values, dtype=np.float64)
    return float(s.sum() / s.max()) if s.size and s.max() > 0 else float("nan")


def _unit(x: npt.ArrayLike) -> Array:
    found = np.asarray(x, dtype=np.float64)
    return np.asarray(found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12))


def alignment(x: npt.ArrayLike, y: npt.ArrayLike, alpha: float = 2.0) -> float:
    """Mean distance**alpha of (n, d) normalised positive pairs (Wang & Isola 2020, equation 5): 0 is best."""
    return float((np.linalg.norm(_unit(x) - _unit(y), axis=1) ** alpha).mean())


def uniformity(x: npt.ArrayLike, t: float = 2.0) -> float:
    """log mean exp(-t distance**2) over pairs of (n, d) normalised rows (Wang & Isola 2020, equation 6): 0 is worst."""
    unit = _unit(x)
    if len(unit) < 2:
        return float("nan")
    upper = np.triu_indices(len(unit), 1)
    squares = np.maximum(2.0 - 2.0 * (unit @ unit.T)[upper], 0.0)
    return float(np.log(np.exp(-t * squares).mean()))


def rank_correlation(x: npt.ArrayLike, y: npt.ArrayLike, level: float = 0.95) -> tuple[float, float, float]:
    """Spearman's rank correlation with its interval.

    The interval is Fisher's z with the standard error of Bonett & Wright 2000 ("Sample size requirements for estimating
    Pearson, Kendall and Spearman correlations"), sqrt((1 + r^2 / 2) / (n - 3)).

    Returns:
        correlation, lower and upper bound; all NaN for fewer than 5 pairs or where one side is constant.
    """
    from scipy.stats import norm, rankdata  # type: ignore[import-untyped]  # scipy ships no types

    a, b = rankdata(np.asarray(x)), rankdata(np.asarray(y))
    if a.size < 5 or not np.ptp(a) or not np.ptp(b):
        return (float("nan"),) * 3
    r = float(np.clip(np.corrcoef(a, b)[0, 1], -1.0, 1.0))
    middle = np.arctanh(np.clip(r, -1 + 1e-12, 1 - 1e-12))
    half = norm.ppf(0.5 + level / 2) * np.sqrt((1 + r * r / 2) / (a.size - 3))
    return r, float(np.tanh(middle - half)), float(np.tanh(middle + half))


def bootstrap_means(values: npt.ArrayLike, draws: int = 2000) -> Array:
    """(draws,) means of (n,) values resampled with replacement; always the same draws."""
    x = np.asarray(values, dtype=np.float64)
    random = np.random.default_rng(0)
    return np.array([x[random.integers(0, x.size, x.size)].mean() for _ in range(draws)])
