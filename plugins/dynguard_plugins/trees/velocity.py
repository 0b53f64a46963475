"""Leaf velocity, feature split concentration, and what is told from how trees change: late trees, importances."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from dynguard import Action, Evidence, Finding, Severity
from dynguard_plugins.rounding import short
from dynguard_plugins.trees.dominance import hhi
from dynguard_plugins.trees.history import History, Round, joined

LEAST_ROUNDS = 50
NARROWER = 0.5  # share of the late trees' squared leaf values in narrow leaves, where early ones had little of it
UNSTABLE = 0.0  # rank correlation of the gains of two halves of the late rounds


def leaf_velocity(rounds: Sequence[Round]) -> float:
    """How fast leaf values change from round to round: log(rms_t / rms_{t-1}), rms weighted by cover.

    0 where leaves stay as large as they were, log(1 - eta) for squared error that is fitted in full, positive where
    leaves grow. It does not depend on the target's unit. 0 where a round has no leaf of value.
    """
    if len(rounds) < 2 or rounds[-1].rms <= 0 or rounds[-2].rms <= 0:
        return 0.0
    return math.log(rounds[-1].rms) - math.log(rounds[-2].rms)


def split_concentration(splits: dict[int, float]) -> float:
    """Feature split concentration: the HHI sum_f (n_f / n)^2 of the number of splits by feature."""
    return hhi(splits)


def overspecialised_trees(history: History) -> Finding | None:
    """Information: most of what the last quarter of trees says is said in leaves of less than 1 % of the weight.

    Only where the first quarter said less than half as much there, so that small data or deep trees are no news.
    Cost: O(rounds).
    """
    rounds = history.rounds
    if len(rounds) < LEAST_ROUNDS:
        return None
    quarter = len(rounds) // 4
    early = float(np.mean([round_.narrow for round_ in rounds[:quarter]]))
    late = float(np.mean([round_.narrow for round_ in rounds[-quarter:]]))
    if late < NARROWER or early > late / 2 or not history.first_time("overspecialised_trees"):
        return None
    return _information(
        history,
        "overspecialised_trees",
        f"{late:.0%} of the squared leaf values of the last {quarter} rounds lie in leaves of less than 1 % of the "
        f"weight; in the first {quarter} it was {early:.0%}",
        "late trees speak of few rows each",
        (Evidence(name="late", value=short(late)), Evidence(name="early", value=short(early))),
    )


def unstable_importance(history: History) -> Finding | None:
    """Information: the gains of the features in the two halves of the late rounds rank unlike each other.

    Spearman's correlation of the features' gains between the third and the last quarter, not above 0. Cost:
    O(features).
    """
    quarter = len(history.blocks) // 4
    if quarter < 1 or len(history.rounds) < LEAST_ROUNDS or len(history.sums.gain) < 5:
        return None
    third, last = history.blocks[-2 * quarter : -quarter], history.blocks[-quarter:]
    features = sorted(history.sums.gain)
    one, other = ([_sum(part).get(f, 0.0) for f in features] for part in (third, last))
    r = _spearman(one, other)
    if r is None or r > UNSTABLE or not history.first_time("unstable_importance"):
        return None
    return _information(
        history,
        "unstable_importance",
        f"the features' gains of the last rounds and of those before rank unlike each other (correlation {r:.2f})",
        "what late rounds split on is chance: importances from them mean little",
        (Evidence(name="rank_correlation", value=short(r)), Evidence(name="features", value=len(features))),
    )


def _sum(blocks: Sequence[dict[int, float]]) -> dict[int, float]:
    total: dict[int, float] = {}
    for block in blocks:
        total = joined(total, block)
    return total


def _spearman(one: Sequence[float], other: Sequence[float]) -> float | None:
    from scipy.stats import rankdata  # type: ignore[import-untyped]  # scipy ships no types

    a, b = rankdata(one), rankdata(other)
    if a.std() == 0 or b.std() == 0:
        return None
    return float(np.corrcoef(a, b)[0, 1])


def _information(history: History, kind: str, premise: str, implies: str, evidence: tuple[Evidence, ...]) -> Finding:
    return Finding(
        kind=kind, severity=Severity.INFO, step=history.rounds[-1].number, source=history.source, action=Action.WARN,
        premise=premise, implies=implies, expected_effect="fewer rounds, or larger leaves, give much the same model",
        evidence=evidence,
    )  # fmt: skip
