"""What watching boosted trees costs, beside releases of gradtracer.

    python benchmarks/trees.py share [--rounds 1000] [--rows 50000]     # callback's share of the training time
    python benchmarks/trees.py inspect [--trees 1000]                   # reading a fitted model

- ``share``: seconds spent in the callback (all detectors of ``trees`` included) over those of the whole ``train`` call,
  and of rounds 900 to 1,000 over rounds 50 to 150; 50 features, 63 leaves, one thread.
- ``inspect``: seconds of ``flow.inspect`` on a fitted model, and of gradtracer's ``TreeTracker(model).analyze()``.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers import gradtracer
from benchmarks.timing import quiet
from dynguard import FlowManager

PEERS = ("0.6.0", "0.9.0")
LIBRARIES = ("xgboost", "lightgbm", "catboost")
EARLY, LATE = slice(50, 150), slice(-100, None)


def data(rows: int, seed: int = 0) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """(rows, 50) features and a target of which four features explain most."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 50))
    return x, x[:, 0] + np.sin(3 * x[:, 1]) + x[:, 2] * x[:, 3] + rng.normal(size=rows)


def train(library: str, rounds: int, rows: int, callback: Any) -> Any:
    """The fitted model; ``callback`` is one of that library's, or None."""
    x, y = data(rows)
    if library == "xgboost":
        import xgboost as xgb

        parameters = {"max_leaves": 63, "max_depth": 0, "grow_policy": "lossguide", "eta": 0.05, "nthread": 1}
        matrix = xgb.DMatrix(x, y)
        return xgb.train(
            parameters, matrix, rounds, evals=[(matrix, "train")], verbose_eval=False,
            callbacks=[callback] if callback else None,
        )  # fmt: skip
    if library == "lightgbm":
        import lightgbm as lgb

        parameters = {"num_leaves": 63, "learning_rate": 0.05, "num_threads": 1, "verbosity": -1}
        whole = lgb.Dataset(x, y)
        return lgb.train(parameters, whole, rounds, valid_sets=[whole], callbacks=[callback] if callback else None)
    import catboost as cb  # type: ignore[import-untyped]  # catboost ships no types

    model = cb.CatBoostRegressor(
        iterations=rounds, depth=6, learning_rate=0.05, thread_count=1, verbose=0, allow_writing_files=False
    )
    if callback is None:
        return model.fit(x, y)
    with callback(model) as inner:
        return model.fit(x, y, callbacks=[inner])


class Timed:
    """A callback whose calls are timed; what it does is the wrapped one's."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.seconds = inner, list[float]()

    def timed(self, work: Callable[..., Any], *arguments: Any) -> Any:
        start = time.perf_counter()
        try:
            return work(*arguments)
        finally:
            self.seconds.append(time.perf_counter() - start)


def timed(library: str, inner: Any) -> tuple[Any, Timed]:
    """``inner`` as the library takes it, and its times."""
    clock = Timed(inner)
    if library == "xgboost":
        import xgboost as xgb

        class Wrapped(xgb.callback.TrainingCallback):
            def before_training(self, model: Any) -> Any:
                return inner.before_training(model)

            def after_iteration(self, model: Any, epoch: int, log: Any) -> bool:
                return bool(clock.timed(inner.after_iteration, model, epoch, log))

            def after_training(self, model: Any) -> Any:
                return clock.timed(inner.after_training, model)

        return Wrapped(), clock
    wrapped = lambda env: clock.timed(inner, env)  # noqa: E731 - it gets an attribute
    wrapped.order = getattr(inner, "order", 0)  # type: ignore[attr-defined]  # as LightGBM wants it
    return wrapped, clock


def share(library: str, rounds: int, rows: int, make: Callable[[FlowManager], Any] | None) -> str:
    """One line of the table: of dynguard, or of a peer's callback."""
    with tempfile.TemporaryDirectory() as folder:
        flow = FlowManager(plugins=["trees", "history"], run_dir=Path(folder) / "run")
        start = time.perf_counter()
        if library == "catboost":
            train(library, rounds, rows, flow.catboost)
            whole = time.perf_counter() - start
            spent = flow.overhead()["dynguard"].seconds
            clock = None
        else:
            callback, clock = timed(library, make(flow) if make else getattr(flow, library)())
            train(library, rounds, rows, callback)
            whole = time.perf_counter() - start
            spent = sum(clock.seconds)
        flow.close()
    growth = ""
    if clock is not None and rounds >= 300:
        growth = f"{statistics.fmean(clock.seconds[:-1][LATE]) / statistics.fmean(clock.seconds[EARLY]):.2f}"
    return f"{spent / whole:.1%} | {1000 * spent / rounds:.2f} | {growth}"


def peer_callback(version: str, library: str) -> Callable[[FlowManager], Any]:
    """A tracker's callback of one release of gradtracer."""
    tracker = gradtracer(version, "analyzers.boosting").BoostingTracker()
    name = {"xgboost": "as_xgb_callback", "lightgbm": "as_lgb_callback"}[library]
    return lambda flow: getattr(tracker, name)()


def inspected(library: str, model: Any, versions: list[str]) -> str:
    seconds = []
    for version in (None, *versions):
        times = []
        for _ in range(3):
            start = time.perf_counter()
            if version is None:
                with tempfile.TemporaryDirectory() as folder:
                    flow = FlowManager(plugins=["trees"], run_dir=Path(folder) / "run")
                    flow.inspect(model)
                    flow.close()
            else:
                try:
                    tracker = gradtracer(version, "analyzers.trees").TreeTracker(model)
                except ModuleNotFoundError:
                    times.append(float("nan"))  # this release has none
                    break
                tracker.analyze()
            times.append(time.perf_counter() - start)
        seconds.append(f"{statistics.median(times):.2f}")
    return " | ".join(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["share", "inspect"])
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=LIBRARIES)
    parser.add_argument("--peers", nargs="*", default=list(PEERS))
    options = parser.parse_args()
    if options.part == "share":
        print(
            "| library | tool | share of training | ms a round | rounds 900-1,000 over 50-150 |\n|---|---|---|---|---|"
        )
        for library in options.libraries:
            with quiet():
                line = share(library, options.rounds, options.rows, None)
            print(f"| {library} | dynguard | {line} |", flush=True)
            for version in options.peers if library != "catboost" else ():
                with quiet():
                    line = share(library, options.rounds, options.rows, peer_callback(version, library))
                print(f"| {library} | gradtracer {version} | {line} |", flush=True)
        return
    print(f"| library | dynguard, s | {' | '.join(f'gradtracer {v}, s' for v in options.peers)} |")
    print("|---|---|" + "---|" * len(options.peers))
    for library in options.libraries:
        with quiet():
            model = train(library, options.rounds, min(options.rows, 10_000), None)
            line = inspected(library, model, options.peers)
        print(f"| {library} | {line} |", flush=True)


if __name__ == "__main__":
    main()
