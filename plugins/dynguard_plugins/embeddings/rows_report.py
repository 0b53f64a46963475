"""What is said of rows: exposure figures, and tables of the rows that move most."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dynguard import Table
from dynguard.findings import Figure, Scalar
from dynguard_plugins.embeddings import measures
from dynguard_plugins.rounding import short

if TYPE_CHECKING:
    from dynguard_plugins.embeddings.ledger import Columns

Array = npt.NDArray[Any]
POINTS = 100


def overview(table: str, columns: Columns, steps: int, oscillating: int) -> tuple[Any, ...]:
    """One row of the table of tables."""
    exposures = columns.exposures
    numbers = (short(measure(exposures)) for measure in (measures.coverage, measures.gini, measures.entropy))
    return (table, len(exposures), steps, int(exposures.sum()), *numbers, oscillating)


OVERVIEW = ("table", "rows", "steps", "look-ups", "coverage", "Gini", "entropy (nats)", "oscillating")


def lorenz(table: str, exposures: Array) -> Figure:
    """Share of look-ups that the least exposed rows have, against their share of the table."""
    shares, cumulated = measures.lorenz(exposures)
    return Figure(
        title=f"Exposure of {table}", mark="line", x=tuple(shares.tolist()),
        series={"look-ups": tuple(cumulated.tolist()), "if all were equal": tuple(shares.tolist())},
        x_label="share of rows, least exposed first", y_label="share of look-ups",
        alt=f"Lorenz curve of the exposure of {table}: Gini {measures.gini(exposures):.3f}.",
    )  # fmt: skip


def speeds(table: str, columns: Columns) -> Figure | None:
    """Mean way per visit against exposure: medians over rows of like exposure."""
    rows = np.flatnonzero((columns.visits > 0) & (columns.velocity > 0))
    if len(rows) < 2:
        return None
    rows = rows[np.argsort(columns.exposures[rows], kind="stable")]
    groups = np.array_split(rows, min(POINTS, len(rows)))
    x = tuple(float(np.median(columns.exposures[g])) for g in groups)
    y = tuple(float(np.median(columns.velocity[g])) for g in groups)
    return Figure(
        title=f"Velocity of {table} against exposure", mark="scatter", x=x, series={"velocity": y},
        x_label="look-ups", y_label="mean way in the step of a visit",
        alt=f"Median velocity of rows of {table} from {y[0]:.3g} (least exposed) to {y[-1]:.3g} (most exposed).",
    )  # fmt: skip


def saliency(columns: Columns, top: int) -> list[tuple[int, float, float, float]]:
    """The rows that move most a visit for how often they are seen: (row, ratio, low, high), largest lower bound first.

    The ratio is to the median of rows of like exposure. Its 95 % interval takes the spread of log-velocities that
    rows of one visit have as that of a single visit, so rarely seen rows have wide ones and do not crowd the top.
    """
    rows = np.flatnonzero((columns.visits > 0) & (columns.velocity > 0))
    if len(rows) < 2:
        return []
    rows = rows[np.argsort(columns.exposures[rows], kind="stable")]
    logs, visits = np.log(columns.velocity[rows]), columns.visits[rows]
    ratio = np.concatenate([g - np.median(g) for g in np.array_split(logs, max(len(rows) // 50, 1))])
    # Spread of one visit: pooled over rows, each row's deviation blown up by what averaging has taken away.
    single = float(np.sqrt(np.median(np.square(ratio) * np.minimum(visits, 256)) / 0.4549))
    margin = 1.96 * single / np.sqrt(np.minimum(visits, 256))
    best = np.argsort(-(ratio - margin), kind="stable")[:top]
    middle, low, high = (np.exp(ratio + sign * margin)[best].tolist() for sign in (0, -1, 1))
    return list(zip(rows[best].tolist(), middle, low, high, strict=True))


def fastest(table: str, columns: Columns, names: Sequence[str] | None, top: int) -> Table | None:
    """The rows that move most for how often they are seen, by label."""
    found = saliency(columns, top)
    if not found:
        return None
    rows: tuple[tuple[Scalar, ...], ...] = tuple(
        (label(row, names), int(columns.exposures[row]), int(columns.visits[row]), *(round(v, 4) for v in values))
        for row, *values in found
    )
    title = f"Rows of {table} that move most for how often they are seen"
    return Table(title=title, columns=("row", "look-ups", "visits", "velocity / usual", "low", "high"), rows=rows)


def label(row: int, names: Sequence[str] | None) -> str:
    """What the user calls a row, or its number."""
    return str(names[row]) if names is not None and row < len(names) else str(row)
