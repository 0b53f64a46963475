"""The tests on rows: which are never seen, which are pulled to and fro, which move without a gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from dynguard_plugins.embeddings.ledger import Columns, Ledger


Array = npt.NDArray[Any]
LEAST_VISITS = 20
LEAST_ROWS = 20  # so many rows make a yardstick
MATERIAL = 2.5  # times the energy of rows seen as often
FIT = 20_000
INDEPENDENT = 2.21  # resultant that 5 % of rows of independent directions exceed: chi-squared with 5 degrees, over 5
TAILS = 16  # degrees of freedom: scores of sound rows have tails a little heavier than normal ones


@dataclass(slots=True)
class Coverage:
    """How much of a table has been looked up, and what is still to be expected.

    Attributes:
        unseen: (u,) rows never looked up.
        lookups: in all.
        unseen_mass: Good and Turing's estimate of the chance that the next look-up is of an unseen row.
        coming: share of the unseen rows expected within as many look-ups again (Good and Toulmin, smoothed).
    """

    unseen: Array
    lookups: int
    unseen_mass: float
    coming: float


def coverage(exposures: Array, padding: int | None) -> Coverage:
    """Of (N,) exposures; the padding row counts as seen."""
    counted = exposures.copy()
    if padding is not None and 0 <= padding < len(counted):
        counted[padding] = -1
    unseen = np.flatnonzero(counted == 0)
    lookups = int(counted[counted > 0].sum())
    once, twice = int((counted == 1).sum()), int((counted == 2).sum())
    expected = max(once - twice / 2, 0.0)  # the series once - twice + ..., its last term halved against swings
    return Coverage(unseen, lookups, once / max(lookups, 1), min(expected / max(len(unseen), 1), 1.0))


@dataclass(slots=True)
class Verdict:
    """Rows that a test has picked, with the false discovery rate that they were picked at."""

    rows: Array
    rate: float
    strength: float = 0.0
    detail: float = 0.0


def oscillating(columns: Columns, skip: int | None, level: float) -> Verdict:
    """Rows that are pulled to and fro: strong gradients that do not add up.

    A row's energy and (negative) resultant, in logs, are each put in units of the spread of rows visited as often;
    their sum, standardised again, is tested one-sided (Student's t, 16 degrees of freedom, as scores of sound rows have
    heavier tails than normal) with the rates of Benjamini and Hochberg (1995) at ``level``.
    Rows have to stand out in energy, and their gradients must not add up to more than independent ones may.

    Args:
        columns: the ledger on the host.
        skip: the padding row.
        level: false discovery rate.
    """
    from scipy.special import stdtr  # type: ignore[import-untyped]  # scipy ships no types

    able = columns.visits >= LEAST_VISITS
    if skip is not None and 0 <= skip < len(able):
        able[skip] = False
    rows = np.flatnonzero(able & (columns.energy > 0))
    if len(rows) < LEAST_ROWS:
        return Verdict(rows[:0], 0.0)
    visits, resultant = columns.visits[rows], columns.resultant[rows]
    energy = np.log(columns.energy[rows])
    middle, _ = _usual(visits, energy)
    # Rows that have converged for good may lie orders below: they must not widen the yardstick for those above.
    soft = np.log(0.25 + np.exp(energy - middle))
    stands_out = (soft - np.log(1.25)) / _usual(visits, soft)[1]
    # A fifth of a rounding step under the log: a heading of exactly 0 is no more telling than a tiny one.
    gathers = np.log(resultant + 0.02)
    low, width = _usual(visits, gathers)
    cancels = (low - gathers) / width
    score = stands_out + cancels
    p = stdtr(TAILS, (np.median(score) - score) / _mad(score))
    p = np.where(
        (resultant < INDEPENDENT) & (energy - middle > np.log(MATERIAL)) & (stands_out > 1) & (cancels > 0), p, 1.0
    )
    picked, rate = discoveries(p, level)
    excess = float(np.exp(np.median((energy - middle)[picked]))) if len(picked) else 0.0
    return Verdict(rows[picked], rate, excess, float(np.median(resultant[picked])) if len(picked) else 0.0)


def discoveries(p: Array, level: float) -> tuple[Array, float]:
    """Indices of what Benjamini and Hochberg's procedure picks at ``level``, and the rate that its last one is at."""
    order = np.argsort(p, kind="stable")
    rates = p[order] * len(p) / np.arange(1, len(p) + 1)
    passed = np.flatnonzero(rates <= level)
    if not len(passed):
        return order[:0], 0.0
    last = int(passed[-1])
    return np.sort(order[: last + 1]), float(rates[last])


def _usual(by: Array, values: Array) -> tuple[Array, Array]:
    """(n,) median and robust spread of ``values`` among rows of about the same ``by``: windows of a twentieth."""
    some = np.arange(len(by))
    if len(by) > FIT:
        some = np.random.default_rng(0).choice(len(by), FIT, replace=False)
    some = some[np.argsort(by[some], kind="stable")]
    n = len(some)
    half = max(50, n // 40)
    centers = np.arange(0, n, max(half // 4, 1))
    windows = [values[some[max(c - half, 0) : c + half]] for c in centers]
    medians = np.array([np.median(w) for w in windows])
    spreads = np.array([_mad(w) for w in windows])
    at = np.log(by[some[centers]].astype(float)) + np.arange(len(centers)) * 1e-9
    where = np.log(by.astype(float))
    return np.interp(where, at, medians), np.interp(where, at, spreads)


def _mad(values: Array) -> float:
    """Robust standard deviation, not below a twentieth."""
    return max(1.4826 * float(np.median(np.abs(values - np.median(values)))), 0.05)


@dataclass(slots=True)
class Moved:
    """What rows that are followed did while nothing looked them up; (f,) each.

    Attributes:
        rows: their numbers.
        visits: steps in which they were looked up with a gradient.
        absent: steps since their last look-up; since the first step of all for rows never seen.
        way: length of the way since then.
        total: length of the way since the start.
        size: norm of the row before that way.
        shrunk: share of its norm that the row has lost in that way.
        straight: cosine of the way to the direction of the origin: 1 is decay and nothing else.
        decays: whether the table's optimizer decays weights, as far as known.
    """

    rows: Array
    visits: Array
    absent: Array
    way: Array
    total: Array
    size: Array
    shrunk: Array
    straight: Array
    decays: bool


def moved(ledger: Ledger, columns: Columns, weight: Any, decays: bool = True) -> Moved:
    """Look at the rows that are followed as they are now."""
    followed = ledger.followed
    rows = followed.rows.cpu().numpy()
    now = weight.detach()[:: followed.spacing][: len(rows)].double().cpu().numpy()
    start, last = (t.double().cpu().numpy() for t in (followed.start, followed.last[:-1]))
    seen = followed.seen[:-1].cpu().numpy()
    end = ledger.first_step + ledger.steps - 1
    absent = np.where(seen < 0, ledger.steps, end - seen)
    way = now - last
    way[absent == 0] = 0.0  # its own update, not seen yet
    length, size = np.linalg.norm(way, axis=1), np.linalg.norm(last, axis=1)
    with np.errstate(all="ignore"):
        straight = np.nan_to_num(-(way * last).sum(axis=1) / (length * size))
        shrunk = np.nan_to_num(1 - np.linalg.norm(now, axis=1) / size)
    total = np.linalg.norm(now - start, axis=1)
    return Moved(rows, columns.visits[rows], absent, length, total, size, shrunk, straight, decays and now.shape[1] > 1)


def zombies(moves: Moved, steps: int, skip: int | None, level: float) -> Verdict:
    """Rows whose look-ups have stopped and that have moved since by more than half of their way.

    That look-ups have stopped is tested: k visits spread evenly over T steps all fall into the first T - a with
    probability (1 - a / T)^k; corrected over rows after Benjamini and Hochberg.
    """
    with np.errstate(all="ignore"):
        p = np.power(np.clip(1 - moves.absent / max(steps, 1), 0, 1), np.maximum(moves.visits, 1))
    typical = float(np.median(moves.size)) if len(moves.size) else 0.0
    far = (moves.way > 0.5 * moves.total) & (moves.way > 1e-3 * typical)
    far &= ~_decay(moves)
    able = far & (moves.visits >= 2) & (moves.rows != (-1 if skip is None else skip))
    picked, rate = discoveries(np.where(able, p, 1.0), level)
    share = float(np.median((moves.way / np.maximum(moves.total, 1e-30))[picked])) if len(picked) else 0.0
    return Verdict(moves.rows[picked], rate, share, float(np.median(moves.absent[picked])) if len(picked) else 0.0)


def decaying(moves: Moved, skip: int | None) -> Verdict:
    """Rows that have lost at least a hundredth of their norm, straight towards 0, while nothing looked them up."""
    hit = _decay(moves) & (moves.shrunk > 0.01) & (moves.rows != (-1 if skip is None else skip))
    lost = float(np.median(moves.shrunk[hit])) if hit.any() else 0.0
    return Verdict(moves.rows[hit], 0.0, lost)


def _decay(moves: Moved) -> Array:
    return np.asarray(moves.decays & (moves.straight > 0.999) & (moves.absent >= LEAST_VISITS))
