"""Planted interactions: what ``suggest_interactions`` recovers, and what it names beside them.

    python benchmarks/trees_features.py [--seeds 10] [--rows 2000]

Ten standard normal columns in random order; the target is a sum of four main effects (linear, sine, square) with two
interactions, a product and a disagreement of signs, or without any. Models of all three libraries, 100 rounds of depth
4. In "near copy" one column is a feature of the product once more with noise of a tenth: either may then be named.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np

from dynguard.trees.inspect import replay
from dynguard.trees.table import concat
from dynguard_plugins.trees.interactions import suggest_interactions

KINDS = ("numbers", "classes", "near copy", "numbers, none", "classes, none")
COLUMNS = 10
Truth = set[tuple[int, int]]


def planted(kind: str, seed: int, rows: int) -> tuple[Any, Any, Truth]:
    """X, y and the pairs that act together."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, COLUMNS))
    a, b, c, e, f, g = (int(i) for i in rng.permutation(COLUMNS)[:6])
    if kind == "near copy":
        x[:, f] = x[:, a] + 0.1 * rng.normal(size=rows)
    signal = x[:, a] + np.sin(2 * x[:, e]) + 0.5 * x[:, g] ** 2 + 0.8 * x[:, f]
    truth: Truth = set()
    if "none" not in kind:
        signal = signal + x[:, a] * x[:, b] + 2.0 * ((x[:, c] > 0) != (x[:, e] > 0))
        truth = {(min(a, b), max(a, b)), (min(c, e), max(c, e))}
    if "classes" in kind:
        return x, (rng.random(rows) < 1 / (1 + np.exp(-2 * (signal - signal.mean())))).astype(int), truth
    return x, signal + rng.normal(size=rows), truth


def models(x: Any, y: Any, kind: str) -> Iterator[tuple[str, Any]]:
    """(library, fitted model)."""
    import catboost as cb  # type: ignore[import-untyped]  # ships no types
    import lightgbm as lgb
    import xgboost as xgb

    classes = "classes" in kind
    common: dict[str, Any] = {"learning_rate": 0.1, "max_depth": 4, "n_estimators": 100}
    kinds: tuple[tuple[str, tuple[Any, Any], dict[str, Any]], ...] = (
        ("xgboost", (xgb.XGBRegressor, xgb.XGBClassifier), {"n_jobs": 1}),
        ("lightgbm", (lgb.LGBMRegressor, lgb.LGBMClassifier), {"n_jobs": 1, "verbosity": -1}),
        ("catboost", (cb.CatBoostRegressor, cb.CatBoostClassifier),
         {"thread_count": 1, "silent": True, "allow_writing_files": False}),
    )  # fmt: skip
    for library, family, rest in kinds:
        yield library, family[classes](**common, **rest).fit(x, y)


def main() -> None:
    """Print precision and recall."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--rows", type=int, default=2000)
    options = parser.parse_args()
    counts: dict[tuple[str, str], list[int]] = {}
    for kind in KINDS:
        for seed in range(options.seeds):
            x, y, truth = planted(kind, seed, options.rows)
            for library, model in models(x, y, kind):
                table = concat([event.trees for event in replay(model)])  # type: ignore[misc]  # a replay's are tables
                found = {one.features for one in suggest_interactions(table, x, y)}
                row = counts.setdefault((kind, library), [0, 0, 0])
                for i, part in enumerate((found & truth, found - truth, truth - found)):
                    row[i] += len(part)
    print(f"{'':16s}{'':12s}{'right':>7s}{'wrong':>7s}{'missed':>8s}{'precision':>11s}{'recall':>8s}")
    for (kind, library), (right, wrong, missed) in counts.items():
        precision = f"{right / (right + wrong):.2f}" if right + wrong else "-"
        recall = f"{right / (right + missed):.2f}" if right + missed else "-"
        print(f"{kind:16s}{library:12s}{right:7d}{wrong:7d}{missed:8d}{precision:>11s}{recall:>8s}")


if __name__ == "__main__":
    main()
