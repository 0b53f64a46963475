"""What the auto-fix of embedding rows rests on: posteriors and shrinkage factors, on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dynguard_plugins.embeddings import rows_tests
from dynguard_plugins.embeddings.ledger import PROJECTIONS, Columns

Array = npt.NDArray[Any]
NEIGHBOURS = 200  # sound rows seen about as often that make a row's yardstick
BANDS = 4  # of false discovery rate, each a quarter of the one above
SMALLEST = 0.02  # of a resultant: a fifth of a rounding step, so that a log of it is no more telling than of a tiny one
FEWEST = 20  # losses that make a trend
CHANCE = 0.4159  # of a resultant above 1 for independent directions: P(chi-squared with 5 degrees > 5)


@dataclass(slots=True)
class Shares:
    """Rows to be held back: (k,) each, by row number.

    Attributes:
        rows: their numbers, ascending.
        factors: by which their updates are to be multiplied, in [floor, 1].
        posterior: that the row oscillates.
    """

    rows: Array
    factors: Array
    posterior: Array


NONE = Shares(np.zeros(0, dtype=np.int64), np.zeros(0), np.zeros(0))


def improving(losses: Array) -> float | None:
    """Posterior P(slope < 0) of a straight line through (n,) losses in order, or None for fewer than 20 finite ones.

    Under a flat prior on line and log-variance the slope is Student-t with n - 2 degrees of freedom around that of
    least squares (Gelman et al. 2013, "Bayesian Data Analysis", section 14.2). The losses' noise is taken as
    independent.
    """
    from scipy.special import stdtr  # type: ignore[import-untyped]  # scipy ships no types
    from scipy.stats import linregress  # type: ignore[import-untyped]  # scipy ships no types

    at = np.flatnonzero(np.isfinite(losses))
    if len(at) < FEWEST:
        return None
    values = losses[at].astype(np.float64)
    if np.ptp(values) == 0:
        return 0.5
    line = linregress(at, values)
    if line.stderr == 0:
        return float(line.slope < 0)
    return float(stdtr(len(at) - 2, -line.slope / line.stderr))


def adding_up(columns: Columns) -> float | None:
    """Posterior that the gradients of more rows add up than of rows with independent directions, or None without rows.

    For k of n rows above a resultant of 1 and a flat prior on the share, it is Beta(k + 1, n - k + 1) beyond 0.416.
    """
    from scipy.special import betaincc

    able = (columns.visits >= rows_tests.LEAST_VISITS) & (columns.energy > 0)
    n = int(able.sum())
    if n < rows_tests.LEAST_ROWS:
        return None
    k = int((columns.resultant[able] > 1).sum())
    return float(betaincc(k + 1, n - k + 1, CHANCE))


def picked(columns: Columns, skip: int | None, level: float) -> tuple[Array, Array]:
    """(k,) rows that the oscillation test picks at ``level``, ascending, and (k,) posteriors that each oscillates.

    The posterior is 1 - the local false discovery rate (Efron et al. 2001), as a histogram: of the rows that are picked
    at one level but not at a quarter of it, that share is false by which the expected number of false ones grows from
    there. It never rises from a stricter band to a laxer one.
    """
    verdicts = [rows_tests.oscillating(columns, skip, level / 4**band) for band in range(BANDS)]
    rows, posterior = verdicts[0].rows, np.zeros(len(verdicts[0].rows))
    count, false, local = 0, 0.0, 0.0
    for verdict in reversed(verdicts):
        more = len(verdict.rows) - count
        if more <= 0:
            continue
        local = float(np.clip((len(verdict.rows) * verdict.rate - false) / more, local, 1.0))
        new = np.isin(rows, verdict.rows) & (posterior == 0)
        posterior[new] = 1 - local
        count, false = len(verdict.rows), len(verdict.rows) * verdict.rate
    return rows, posterior


def shares(columns: Columns, skip: int | None, *, level: float, floor: float, most: int) -> Shares:
    """By how much each oscillating row is to be held back.

    A row's resultant R estimates (signal + noise) / noise of the sum of its gradient directions, so that its
    signal-to-noise ratio is R - 1, and SNR / (1 + SNR) = max(0, 1 - 1 / R): the factor of James and Stein (1961).
    It is divided by that of sound rows seen as often, so that a typical row keeps all of its update; where theirs is 0
    too there is no yardstick and nothing is changed. The factor is 1 - P(oscillates) (1 - what comes out).

    Args:
        columns: the ledger on the host.
        skip: the padding row.
        level: false discovery rate of the test.
        floor: least ratio.
        most: how many rows at most, those with the smallest factors.
    """
    rows, posterior = picked(columns, skip, level)
    usual = _usual(columns, rows)
    told = _gain(usual) > 0
    rows, posterior, usual = rows[told], posterior[told], usual[told]
    ratio = np.clip(_gain(shrunk(columns.resultant[rows])) / _gain(usual), floor, 1.0)
    factors = 1 - posterior * (1 - ratio)
    keep = np.sort(np.argsort(factors, kind="stable")[:most])
    return Shares(rows[keep], factors[keep], posterior[keep])


def shrunk(resultant: Array) -> Array:
    """(k,) resultants of oscillating rows, each drawn towards what is common to them.

    An observed resultant is the true one times chi-squared / 5 with 5 degrees of freedom (five projections), and the
    true ones are taken as scaled inverse chi-squared; moments of logs give the prior and the posterior mean (Smyth
    2004, "Linear models and empirical Bayes methods", section 6.2). The prior is that of the rows picked: sound rows
    differ so little for how often they are seen that one drawn from both kinds would undo the repair.
    """
    from scipy.special import digamma, polygamma

    if len(resultant) < 2:
        return resultant
    half = PROJECTIONS / 2

    logs = np.log(resultant + SMALLEST) - digamma(half) + np.log(half)
    excess = float(np.var(logs, ddof=1) - polygamma(1, half))
    if excess <= 0:  # no more spread than five projections make: they are all alike
        return np.full(len(logs), np.exp(np.mean(logs)))
    degrees = 2 * _inverse_trigamma(excess)
    prior = np.exp(np.mean(logs) + digamma(degrees / 2) - np.log(degrees / 2))
    return np.asarray((degrees * prior + PROJECTIONS * resultant) / (degrees + PROJECTIONS))


def _inverse_trigamma(y: float) -> float:
    from scipy.optimize import brentq  # type: ignore[import-untyped]  # scipy ships no types
    from scipy.special import polygamma

    return float(np.exp(brentq(lambda log: float(polygamma(1, np.exp(log))) - y, -12.0, 12.0)))


def _gain(resultant: Array) -> Array:
    return np.asarray(np.maximum(0.0, 1 - 1 / np.maximum(resultant, 1e-9)))


def _usual(columns: Columns, rows: Array) -> Array:
    """(k,) median resultant of the 200 sound rows whose visits are nearest to those of each row."""
    sound = (columns.visits >= rows_tests.LEAST_VISITS) & (columns.energy > 0)
    sound[rows] = False
    others = np.flatnonzero(sound)
    if not len(others):
        return np.zeros(len(rows))
    others = others[np.argsort(columns.visits[others], kind="stable")]
    size = min(NEIGHBOURS, len(others))
    ends = [np.searchsorted(columns.visits[others], columns.visits[rows], side) for side in ("left", "right")]
    at = (ends[0] + ends[1]) // 2  # the middle of those seen just as often
    first = np.clip(at - size // 2, 0, len(others) - size)
    return np.asarray(np.median(columns.resultant[others][first[:, None] + np.arange(size)], axis=1))
