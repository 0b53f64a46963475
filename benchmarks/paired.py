"""Runs kept in JSON-lines files, and paired comparisons of them over seeds: intervals, tests, effect sizes, Holm."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np

Run = TypeVar("Run")


@dataclass
class Comparison:
    """An arm beside another over the same seeds: means, 95 % intervals, p-values."""

    count: int
    base: float
    own: float
    difference: float
    half: float  # of the t interval
    dz: tuple[float, float, float]  # mean difference over its standard deviation, with interval
    p: float  # paired t, two-sided
    wilcoxon: float
    worse: float  # t, one-sided: that it is worse by 1 % or more
    corrected: float = math.nan  # p after Holm

    COLUMNS: ClassVar = ("n", "base", "arm", "difference", "%", "dz", "t p", "Wilcoxon p", "Holm p", "non-inf. p")

    def cells(self) -> list[str]:
        dz, low, high = self.dz
        return [
            str(self.count), f"{self.base:.4f}", f"{self.own:.4f}", f"{self.difference:+.5f} ± {self.half:.5f}",
            f"{100 * self.difference / self.base:+.2f}", f"{dz:+.2f} ({low:+.2f} .. {high:+.2f})", f"{self.p:.3g}",
            f"{self.wilcoxon:.3g}", "" if math.isnan(self.corrected) else f"{self.corrected:.3g}", f"{self.worse:.3g}",
        ]  # fmt: skip


def compare(own: Sequence[float], base: Sequence[float], better: int = 1) -> Comparison:
    """Of (n,) figures by seed; ``better`` is -1 where less is better."""
    from scipy import stats  # type: ignore[import-untyped] # scipy ships no types

    ways, center = np.subtract(own, base), float(np.mean(base))
    n, mean, spread = len(ways), float(ways.mean()), float(ways.std(ddof=1)) / math.sqrt(len(ways))
    limit = better * mean + 0.01 * abs(center)
    if spread == 0:
        p = 1.0 if mean == 0 else 0.0
        return Comparison(n, center, float(np.mean(own)), mean, 0.0, (0.0, 0.0, 0.0), p, p, float(limit <= 0))
    t = mean / spread
    low, high = [_noncentrality(t, n - 1, level) / math.sqrt(n) for level in (0.975, 0.025)]
    return Comparison(
        n, center, float(np.mean(own)), mean, float(stats.t.ppf(0.975, n - 1)) * spread, (t / math.sqrt(n), low, high),
        float(2 * stats.t.sf(abs(t), n - 1)), float(stats.wilcoxon(ways).pvalue),
        float(stats.t.sf(limit / spread, n - 1)),
    )  # fmt: skip


def _noncentrality(t: float, freedom: int, level: float) -> float:
    """Of the t distribution that has ``t`` as its quantile of ``level``."""
    from scipy import special

    # scipy has it for positive quantiles only, far out
    return float(special.nctdtrinc(freedom, level, t) if t >= 0 else -special.nctdtrinc(freedom, 1 - level, -t))


def holm(tried: Sequence[Comparison]) -> None:
    """Holm's correction of the t-tests, in place."""
    worst = 0.0
    for rank, one in enumerate(sorted(tried, key=lambda x: x.p)):
        worst = max(worst, min(1.0, one.p * (len(tried) - rank)))
        one.corrected = worst


def false_gains(ways: Sequence[float], size: int = 10, draws: int = 5000) -> float:
    """How often ``size`` of (n,) A/A differences, each either way round, seem a gain at p < .05, two-sided."""
    from scipy import stats

    rng = np.random.default_rng(0)
    drawn = np.stack([rng.permutation(ways)[:size] for _ in range(draws)]) * rng.choice([-1.0, 1.0], (draws, size))
    t = drawn.mean(1) / drawn.std(1, ddof=1) * math.sqrt(size)
    return float((t > stats.t.ppf(0.975, size - 1)).mean())


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a JSON-lines file; a line that was cut off is left out."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


def carry_out(path: Path, missing: Collection[Run], work: Callable[[Run], Mapping[str, Any] | None]) -> None:
    """Do what is missing in a JSON-lines file, one line each as it comes; what gives None is left out."""
    for number, run in enumerate(missing, 1):
        row = work(run)
        if row is not None:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{number}/{len(missing)}", json.dumps(row), flush=True)
