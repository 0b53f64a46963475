"""The section of the ``trees`` plugin: one line a booster and a feature, and figures over the rounds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dynguard import Table
from dynguard.findings import Figure
from dynguard_plugins.rounding import short
from dynguard_plugins.trees.dominance import hhi
from dynguard_plugins.trees.history import QUANTILES, History
from dynguard_plugins.trees.velocity import split_concentration

POINTS = 200  # at most so many rounds in a figure


def overview(histories: Sequence[History]) -> Table:
    """One line a booster."""
    rows = []
    for h in histories:
        validation = h.curves.validation
        rows.append((
            h.source, h.library, h.newest + 1, sum(r.trees for r in h.rounds), sum(r.splits for r in h.rounds),
            sum(r.root_only for r in h.rounds), short(max((r.largest for r in h.rounds), default=None)),
            short(hhi(h.sums.gain)), short(split_concentration(h.sums.splits)),
            validation.best_round if validation is not None and validation.values else None,
        ))  # fmt: skip
    return Table(
        title="Boosters",
        columns=(
            "source", "library", "rounds", "trees", "splits", "rounds without split", "largest leaf", "HHI of gain",
            "feature split concentration", "best validation round",
        ),
        rows=tuple(rows),
    )  # fmt: skip


def importances(history: History, top: int) -> Table:
    """The features that gained most, by three views."""
    sums = history.sums
    views = (sums.gain, sums.splits, sums.cover)
    totals = [max(sum(column.values()), 1e-300) for column in views]
    order = sorted(sums.gain, key=lambda f: -sums.gain[f])[:top]
    return Table(
        title="Features by gain" + (f" of {history.source}" if history.source else ""),
        columns=("feature", "gain share", "split share", "cover share"),
        rows=tuple(
            (history.name(f), *(short(c[f] / t) for c, t in zip(views, totals, strict=True)))
            for f in order
        ),
    )  # fmt: skip


def figures(history: History, top: int) -> list[Figure]:
    """Leaf values, gain by feature and the two curves, over the rounds; those for which there is anything to show."""
    found = [leaf_values(history), gains(history, top), curves(history)]
    return [figure for figure in found if figure is not None]


def leaf_values(history: History) -> Figure | None:
    """Quantiles of the leaf values over the rounds."""
    rounds = [r for r in history.rounds if r.quantiles]
    if not rounds:
        return None
    rounds = [rounds[i] for i in _thinned(len(rounds))]
    return Figure(
        title="Leaf values over rounds" + _of(history),
        x=tuple(r.number for r in rounds),
        series={f"{q:.0%}": tuple(short(r.quantiles[i]) for r in rounds) for i, q in enumerate(QUANTILES)},
        x_label="round", y_label="leaf value",
        alt=f"from {rounds[0].quantiles[0]:.3g} to {rounds[0].quantiles[-1]:.3g} in the first round, from "
        f"{rounds[-1].quantiles[0]:.3g} to {rounds[-1].quantiles[-1]:.3g} in the last",
    )  # fmt: skip


def gains(history: History, top: int) -> Figure | None:
    """Share of the gain by feature over blocks of rounds."""
    gain = history.sums.gain
    if not gain or not history.rounds:
        return None
    leaders = sorted(gain, key=lambda f: -gain[f])[:top]
    start = history.rounds[0].number
    totals = [sum(block.values()) or 1.0 for block in history.blocks]
    return Figure(
        title="Gain by feature over rounds" + _of(history),
        mark="heatmap",
        x=tuple(start + i * history.block for i in range(len(history.blocks))),
        series={
            f"{history.name(f)}": tuple(short(b.get(f, 0.0) / t) for b, t in zip(history.blocks, totals, strict=True))
            for f in leaders
        },
        x_label="round", y_label="share of the gain",
        alt=f"{history.name(leaders[0])} gains most, {gain[leaders[0]] / (sum(gain.values()) or 1.0):.0%} of all",
    )  # fmt: skip


def curves(history: History) -> Figure | None:
    """Training and validation over the rounds; the round of least validation loss is marked."""
    both = [c for c in (history.curves.train, history.curves.validation) if c is not None and c.values]
    if not both:
        return None
    at = sorted({both[-1].rounds[i] for i in _thinned(len(both[-1].rounds))} | {c.best_round for c in both[1:]})
    series = {}
    for curve in both:
        known = dict(zip(curve.rounds, curve.values, strict=True))
        series[f"{curve.data} {curve.metric}"] = tuple(curve.sign * known[r] if r in known else None for r in at)
    told = "overfit_onset" in history.told
    validation = history.curves.validation
    first, last = (both[0].sign * value for value in (both[0].first, both[0].last))
    alt = f"{both[0].metric} on {both[0].data} from {first:.4g} to {last:.4g}"
    if validation is not None and validation.values:
        best, mark = validation.best_round, "onset" if told else "best"
        level = validation.sign * validation.best
        series[f"{mark}: round {best}"] = tuple(level if r == best else None for r in at)
        alt += f"; {validation.data} is best at round {best}" + (", where overfitting sets in" if told else "")
    return Figure(title="Training and validation" + _of(history), x=tuple(at), series=series, x_label="round", alt=alt)


def _of(history: History) -> str:
    return f" of {history.source}" if history.source else ""


def _thinned(count: int) -> list[int]:
    return sorted({int(i) for i in np.linspace(0, count - 1, min(count, POINTS))})
