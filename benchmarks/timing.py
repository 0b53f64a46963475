"""Timing in turns: contenders alternate in one process, and only ratios within a round are compared."""

from __future__ import annotations

import contextlib
import gc
import io
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

Work = Callable[[], object]


@dataclass(frozen=True)
class Effort:
    """How much is measured: rounds, guard calls per round, seconds per block of steps, steps to warm up a guard."""

    rounds: int = 25
    calls: int = 20
    block: float = 0.1
    warm: int = 200  # detectors calibrate on the first 150 steps, and the bus times each of the first 64 calls
    peers: bool = True


QUICK = Effort(rounds=2, calls=2, block=0.0, warm=3)


@dataclass
class Figure:
    """One measured figure: a ratio or an amount with its quartiles over the rounds, and notes."""

    part: str
    model: str
    what: str
    unit: str
    median: float
    low: float
    high: float
    notes: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, part: str, model: str, what: str, unit: str, values: Sequence[float], **notes: float) -> Figure:
        low, median, high = (
            statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
        )
        return cls(part, model, what, unit, median, low, high, notes)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No garbage collection and no terminal: what a library prints goes where it costs next to nothing."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        gc.enable()
        gc.unfreeze()


def interleave(
    works: Mapping[str, Work], rounds: int, calls: int, prepare: Work = lambda: None
) -> dict[str, list[float]]:
    """Seconds per call of each work, by round; the order changes from round to round. ``prepare`` is not timed."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        gc.collect()  # quiet() has switched the automatic one off
        for name in random.sample(list(works), len(works)):
            work, spent = works[name], 0.0
            for _ in range(calls):
                prepare()
                start = time.perf_counter()
                work()
                spent += time.perf_counter() - start
            seconds[name].append(spent / calls)
    return seconds


def ratios(seconds: Mapping[str, list[float]], what: str, over: str) -> list[float]:
    return [a / b for a, b in zip(seconds[what], seconds[over], strict=True)]
