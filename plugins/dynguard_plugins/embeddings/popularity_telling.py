"""What is said of popularity: an inversion by biases, a lift by recommendations, and the report's tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dynguard import Action, Evidence, Finding, Severity, Table
from dynguard.findings import Figure
from dynguard_plugins.embeddings import measures
from dynguard_plugins.embeddings.rows_report import label
from dynguard_plugins.rounding import short

CLEAR = 0.3  # an inversion's interval must lie below minus this
SIGN_LEVEL = 1e-3
LIFT_LEVEL = 0.99
LEAST_LISTS = 30
FALLING = 0.75  # of the exposures of frequent rows, how many must be of rows that were pushed down


@dataclass(slots=True)
class Exposed:
    """The exposed rows of one table, on the host.

    Attributes:
        name, source, step: which table, and its newest step.
        counts: (N,) exposures of all rows.
        rows: (r,) the exposed rows that are compared, padding left out.
        values: (r,) movement since the start in a table of width 1, else the rows' norms.
        moved: whether ``values`` are movements.
    """

    name: str
    source: str
    step: int
    counts: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]
    moved: bool


def inversion(exposed: Exposed, limit: float, level: float, labels: Sequence[str] | None) -> Finding | None:
    """Rows seen often were pushed down *and* rows seen rarely up: the model has turned popularity round.

    That both must hold tells an inversion from a pull that all rows share (a rare target and no global bias), which
    moves the more a row the oftener it is seen.
    """
    if not exposed.moved:
        return None
    seen = exposed.counts[exposed.rows]
    r, low, high = measures.rank_correlation(exposed.values, seen, level)
    if not (r < -limit and high < -CLEAR):
        return None
    order = np.argsort(seen, kind="stable")
    rare = exposed.values[order[: len(order) // 3]]
    often = order[np.cumsum(seen[order]) > 0.5 * seen.sum()]  # the rows with the upper half of all exposures
    frequent = float(np.average(exposed.values[often], weights=seen[often]))
    falling = float(np.average(exposed.values[often] < 0, weights=seen[often]))
    if not (_mostly(rare > 0) and frequent < 0 and falling >= FALLING):
        return None
    down = exposed.rows[order[::-1][:3]]
    named = ", ".join(repr(label(int(i), labels)) for i in down)
    return Finding(
        kind="popularity_bias",
        severity=Severity.WARNING,
        step=exposed.step,
        subject=exposed.name,
        source=exposed.source,
        action=Action.WARN,
        premise=f"{exposed.name} falls with exposure (rank correlation {r:.2f}): rows seen most ({named}, ...) were "
        "pushed down and rows seen rarely were pushed up",
        implies="the model inverts the popularity of its data; unless frequent rows really have the lower targets, a "
        "sampling correction has the wrong sign: with negatives sampled by popularity q the logits are s - log q",
        expected_effect="with the right sign the score of a row rises with its popularity",
        confidence=1.0 - _p_value(r, len(seen)),
        evidence=(
            Evidence(name="what", value="inversion"),
            Evidence(name="rank_correlation", value=r),
            Evidence(name="lower", value=low),
            Evidence(name="upper", value=high),
            Evidence(name="level", value=level),
            Evidence(name="rows", value=len(seen)),
            Evidence(name="movement_of_rare", value=float(np.median(rare))),
            Evidence(name="movement_of_frequent", value=frequent),
            Evidence(name="gini", value=measures.gini(exposed.counts)),
        ),
    )


def _p_value(r: float, n: int) -> float:
    """One-sided, of a rank correlation that is not below ``-CLEAR``."""
    from scipy.stats import norm  # type: ignore[import-untyped]  # scipy ships no types

    error = np.sqrt((1 + r * r / 2) / (n - 3))
    return float(norm.cdf((np.arctanh(max(r, -1 + 1e-12)) + np.arctanh(CLEAR)) / error))


def _mostly(hits: npt.NDArray[np.bool_]) -> bool:
    """Whether more than a half are true, by a sign test."""
    from scipy.stats import binomtest

    return bool(binomtest(int(hits.sum()), len(hits), alternative="greater").pvalue < SIGN_LEVEL)


def lifted(exposed: Exposed, lists: Sequence[Sequence[int]], limit: float, head: float) -> Finding | None:
    """Recommendations far more popular, or far less, than what the data shows; the interval is over lists."""
    if len(lists) < LEAST_LISTS:
        return None
    lift = _lift(exposed, lists)
    if lift is None:
        return None
    means = measures.bootstrap_means(lift)
    low, high = np.quantile(means, [0.5 - LIFT_LEVEL / 2, 0.5 + LIFT_LEVEL / 2]).tolist()
    given = np.bincount(np.concatenate([np.asarray(i) for i in lists]), minlength=len(exposed.counts))
    of_lists, of_data = measures.gini(given), measures.gini(exposed.counts)
    amplifies = low > limit and of_lists > of_data
    if not amplifies and not high < -limit:
        return None
    what = "amplifies" if amplifies else "inverts"
    return Finding(
        kind="popularity_bias",
        severity=Severity.WARNING,
        step=exposed.step,
        subject=exposed.name,
        source=exposed.source,
        action=Action.WARN,
        premise=f"recommendations are {1 + lift.mean():.2f} times as popular as what the data shows, and their Gini "
        f"coefficient is {of_lists:.2f} where that of the exposures is {of_data:.2f}",
        implies=f"the model {what} the popularity in its data: "
        + ("the tail is hardly recommended" if amplifies else "what most users choose is hardly recommended"),
        expected_effect="a correction for popularity (log q, inverse propensity) brings recommendations nearer to data",
        # how often resampled lists lie beyond the limit, too
        confidence=float(np.mean(means > limit if amplifies else means < -limit)),
        evidence=(
            Evidence(name="what", value=what),
            Evidence(name="popularity_lift", value=float(lift.mean())),
            Evidence(name="lower", value=low),
            Evidence(name="upper", value=high),
            Evidence(name="level", value=LIFT_LEVEL),
            Evidence(name="average_recommendation_popularity", value=_arp(exposed, lists), unit="exposures"),
            Evidence(
                name="average_share_of_long_tail",
                value=measures.average_share_of_long_tail(lists, exposed.counts, head),
            ),
            Evidence(name="gini_of_recommendations", value=of_lists),
            Evidence(name="gini", value=of_data),
            Evidence(name="lists", value=len(lists)),
        ),
    )


def _arp(exposed: Exposed, lists: Sequence[Sequence[int]]) -> float:
    return measures.average_recommendation_popularity(lists, exposed.counts)


def _lift(exposed: Exposed, lists: Sequence[Sequence[int]]) -> Any:
    """(lists,) popularity lift of each (Abdollahpouri et al. 2020, "The connection between popularity bias ...")."""
    usual = measures.popularity_of_data(exposed.counts)
    return measures.per_list(lists, exposed.counts) / usual - 1.0 if usual > 0 else None


def overview(tables: Sequence[Exposed], head: float) -> Table:
    """One line a table."""
    rows = []
    for t in tables:
        r, low, high = measures.rank_correlation(t.values, t.counts[t.rows])
        rows.append((
            t.name, len(t.counts), int(t.counts.sum()), *(short(f(t.counts)) for f in (
                measures.gini, measures.entropy, measures.coverage)), short(measures.head_share(t.counts, head)),
            short(1.0 - measures.head_share(t.counts, head)), "movement" if t.moved else "norm",
            short(r), short(low), short(high),
        ))  # fmt: skip
    return Table(
        title="Exposure",
        columns=(
            "table", "rows", "look-ups", "Gini", "entropy (nats)", "coverage", "head share", "tail share", "of rows",
            "rank correlation", "lower", "upper",
        ),
        rows=tuple(rows),
    )  # fmt: skip


def recommendations(tables: Sequence[tuple[Exposed, Sequence[Sequence[int]]]], head: float) -> Table:
    """One line a table whose recommendations were given."""
    rows = []
    for t, lists in tables:
        lift = _lift(t, lists)
        given = np.bincount(np.concatenate([np.asarray(i) for i in lists]), minlength=len(t.counts))
        rows.append((
            t.name, len(lists), short(_arp(t, lists)),
            short(measures.average_share_of_long_tail(lists, t.counts, head)),
            short(None if lift is None else lift.mean()), short(measures.gini(given)),
            short(measures.gini(t.counts)), short(measures.coverage(given)),
        ))  # fmt: skip
    return Table(
        title="Recommendations",
        columns=(
            "table", "lists", "ARP", "APLT", "popularity lift", "Gini", "Gini of exposures", "coverage",
        ),
        rows=tuple(rows),
    )  # fmt: skip


def most_exposed(exposed: Exposed, labels: Sequence[str] | None, top: int) -> Table:
    """The rows that are seen most."""
    seen = exposed.counts[exposed.rows]
    order = np.argsort(-seen, kind="stable")[:top]
    total = max(int(exposed.counts.sum()), 1)
    what = "movement" if exposed.moved else "norm"
    return Table(
        title=f"Most exposed rows of {exposed.name}",
        columns=("row", "label", "exposures", "share", what),
        rows=tuple(
            (int(exposed.rows[i]), label(int(exposed.rows[i]), labels), int(seen[i]), short(seen[i] / total),
             short(exposed.values[i])) for i in order
        ),
    )  # fmt: skip


def lorenz(exposed: Exposed) -> Figure:
    """The Lorenz curve of exposures."""
    x, y = measures.lorenz(exposed.counts)
    return Figure(
        title=f"Lorenz curve of {exposed.name}", mark="line", x=tuple(x.tolist()),
        series={"exposures": tuple(y.tolist()), "equal": tuple(x.tolist())},
        x_label="share of rows, rarest first", y_label="share of exposures",
        alt=f"Gini coefficient {measures.gini(exposed.counts):.2f}",
    )  # fmt: skip
