"""False alarms of the ``trees`` plugin over healthy runs, and how near ``overfit_onset`` comes to the best round.

    python benchmarks/trees_healthy.py [--quick] [--seeds 0 1]

Healthy runs: data sets of scikit-learn (at most 2,000 rows) x three libraries x ordinary parameters, with and without a
validation set. Nothing above ``info`` should be said. A run that ends with validation no better than after its first
round is no healthy one: it is counted by itself, with what was said of it.

Onset: over the runs with a validation set, the round that ``overfit_onset`` names, when it was noticed, and what fixed
patience of 10 and 50 rounds names and when it stops. A hit lies within 10 % of the round of least validation loss, or
has a loss within 1 % of the least.
"""

from __future__ import annotations

import argparse
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dynguard import Finding, Severity, trees
from dynguard.events import TreeEvent
from dynguard_plugins.trees.watch import Trees

ROWS = 2000
LIBRARIES = ("xgboost", "lightgbm", "catboost")
# (name, learning rate, depth, rounds); None is the library's default
SETTINGS = (
    ("default", None, None, 100), ("0.1 x 3", 0.1, 3, 300), ("0.3 x 6", 0.3, 6, 150), ("0.1 x 8", 0.1, 8, 150),
)  # fmt: skip
LOSS = {
    "regression": ("reg:squarederror", "l2", "RMSE"),
    "binary": ("binary:logistic", "binary", "Logloss"),
    "classes": ("multi:softprob", "multiclass", "MultiClass"),
    "poisson": ("count:poisson", "poisson", "Poisson"),
    "absolute": ("reg:absoluteerror", "l1", "MAE"),
    "ranking": ("rank:ndcg", "lambdarank", "YetiRank"),
}
Data = tuple[str, Any, Any]


def data_sets(seed: int) -> Iterator[tuple[str, Data]]:
    """(name, (task, X, y))."""
    from sklearn import datasets as d  # type: ignore[import-untyped]  # ships no types

    rng = np.random.default_rng(seed)
    makers: list[tuple[str, str, Callable[[], Any]]] = [
        ("diabetes", "regression", lambda: d.load_diabetes(return_X_y=True)),
        ("breast cancer", "binary", lambda: d.load_breast_cancer(return_X_y=True)),
        ("wine", "classes", lambda: d.load_wine(return_X_y=True)),
        ("iris", "classes", lambda: d.load_iris(return_X_y=True)),
        ("digits", "classes", lambda: d.load_digits(return_X_y=True)),
        ("friedman1", "regression", lambda: d.make_friedman1(ROWS, noise=1.0, random_state=seed)),
        ("friedman2", "regression", lambda: d.make_friedman2(ROWS, noise=100.0, random_state=seed)),
        ("friedman3", "regression", lambda: d.make_friedman3(ROWS, noise=0.1, random_state=seed)),
        ("classification", "binary", lambda: d.make_classification(ROWS, flip_y=0.1, random_state=seed)),
        ("separated", "binary", lambda: d.make_classification(ROWS, class_sep=3, flip_y=0, random_state=seed)),
        ("hastie", "binary", lambda: d.make_hastie_10_2(ROWS, random_state=seed)),
        ("sparse", "regression", lambda: d.make_sparse_uncorrelated(ROWS, random_state=seed)),
        ("blobs", "classes", lambda: d.make_blobs(ROWS, centers=4, random_state=seed)),
    ]
    for name, task, make in makers:
        x, y = make()
        yield name, (task, x, np.where(y == -1, 0, y))
    x = rng.normal(size=(ROWS, 6))
    yield "counts", ("poisson", x, rng.poisson(np.exp(x[:, 0] + 0.5 * x[:, 1])))
    yield "rare counts", ("poisson", x, rng.poisson(np.exp(0.7 * x[:, 0] - 2)))
    yield "large counts", ("poisson", x, rng.poisson(np.exp(0.3 * x[:, 0] + 5)))
    yield "one feature", ("regression", x, 7 * np.sin(2 * x[:, 3]) + 0.3 * rng.normal(size=ROWS))
    yield "one of a thousand", ("regression", x, 1e5 + 1e3 * np.round(x[:, 1]))
    yield "deterministic", ("regression", x, 1e-2 * (x[:, 0] > 0) * np.abs(np.round(x[:, 2])))
    yield "one threshold", ("binary", x, (x[:, 2] > 0.1).astype(int))
    yield "rare", ("binary", x, (x[:, 0] + rng.normal(size=ROWS) > 3).astype(int))
    yield "noise", ("regression", x, rng.normal(size=ROWS))
    yield "heavy tail", ("absolute", x, x[:, 0] + rng.standard_t(2, size=ROWS))
    relevance = np.digitize(x[:, 0] + 0.5 * x[:, 1] + 0.5 * rng.normal(size=ROWS), [-1, 0, 1])
    yield "ranking", ("ranking", x, relevance)


@dataclass
class Run:
    """One training run under watch.

    Attributes:
        key: library, data set, setting, seed and whether it had a validation set.
        curve: validation loss by round, less is better.
        onset: (round named, round noticed), or None.
    """

    key: tuple[Any, ...]
    plugin: Trees = field(default_factory=Trees)
    findings: list[Finding] = field(default_factory=list)

    def emit(self, event: TreeEvent) -> bool:
        """Watches, and never stops."""
        signal = self.plugin.on_trees(event)
        self.findings += signal.explain() if signal.fired else ()
        return False

    def finish(self) -> Run:
        """Asks for what only many rounds show, and for the report."""
        self.findings += self.plugin.diagnose()
        assert self.plugin.summarize() is not None
        return self

    @property
    def curve(self) -> list[float]:
        validation = self.plugin._histories[""].curves.validation
        return validation.values if validation is not None else []

    @property
    def onset(self) -> tuple[int, int] | None:
        return next(((f.step, int(str(f.value("noticed")))) for f in self.findings if f.kind == "overfit_onset"), None)

    @property
    def spoilt(self) -> bool:
        """Whether validation is no better at the end than after the first round."""
        c = self.curve
        return bool(c) and c[-1] >= c[0]


def fit(library: str, task: str, parts: list[Any], setting: tuple[Any, ...], seed: int, run: Run) -> None:
    """Train with the native interface; parts are X, y and, with a validation set, its X and y."""
    _, rate, depth, rounds = setting
    loss = LOSS[task][LIBRARIES.index(library)]
    classes = int(parts[1].max()) + 1 if task == "classes" else 0
    {"xgboost": _xgboost, "lightgbm": _lightgbm, "catboost": _catboost}[library](
        loss, classes, parts, rate, depth, rounds, seed, run, task == "ranking"
    )


def _groups(count: int) -> np.ndarray[Any, Any]:
    return np.full(count // 20, 20)


def _xgboost(
    loss: str, classes: int, parts: Any, rate: Any, depth: Any, rounds: int, seed: int, run: Run, ranks: bool
) -> None:
    import xgboost as xgb

    params: dict[str, Any] = {"objective": loss, "seed": seed, "nthread": 1}
    params |= {"eta": rate, "max_depth": depth} if rate else {}
    params |= {"num_class": classes} if classes else {}
    sets = [xgb.DMatrix(parts[i], parts[i + 1]) for i in range(0, len(parts), 2)]
    for data in sets if ranks else ():
        data.set_group(_groups(data.num_row()))
    evals = list(zip(sets, ("train", "valid"), strict=False))
    xgb.train(params, sets[0], rounds, evals=evals, verbose_eval=False, callbacks=[trees.xgboost(run.emit)])


def _lightgbm(
    loss: str, classes: int, parts: Any, rate: Any, depth: Any, rounds: int, seed: int, run: Run, ranks: bool
) -> None:
    import lightgbm as lgb

    params: dict[str, Any] = {"objective": loss, "seed": seed, "num_threads": 1, "verbosity": -1}
    params |= {"learning_rate": rate, "max_depth": depth, "num_leaves": min(2**depth, 63)} if rate else {}
    params |= {"num_class": classes} if classes else {}
    sets = [
        lgb.Dataset(parts[i], parts[i + 1], group=_groups(len(parts[i])) if ranks else None)
        for i in range(0, len(parts), 2)
    ]
    lgb.train(params, sets[0], rounds, valid_sets=sets, callbacks=[trees.lightgbm(run.emit)])


def _catboost(
    loss: str, classes: int, parts: Any, rate: Any, depth: Any, rounds: int, seed: int, run: Run, ranks: bool
) -> None:
    import catboost as cb  # type: ignore[import-untyped]  # ships no types

    params: dict[str, Any] = {"loss_function": loss, "random_seed": seed, "thread_count": 1, "iterations": rounds}
    params |= {"learning_rate": rate, "depth": depth} if rate else {}
    params |= {"use_best_model": False} if len(parts) > 2 else {}
    pools = [
        cb.Pool(parts[i], parts[i + 1], group_id=np.arange(len(parts[i])) // 20 if ranks else None)
        for i in range(0, len(parts), 2)
    ]
    model = cb.CatBoost({**params, "logging_level": "Silent", "allow_writing_files": False})
    with trees.catboost(model, run.emit) as callback:
        model.fit(pools[0], eval_set=pools[1] if len(pools) > 1 else None, callbacks=[callback])


def parts_of(data: Data, seed: int, validation: bool) -> list[Any]:
    """X and y, or those of a training and a validation part."""
    _, x, y = data
    order = np.random.default_rng(seed).permutation(len(x))
    x, y = x[order], y[order]
    if not validation:
        return [x[: len(x) // 20 * 20], y[: len(x) // 20 * 20]]
    cut = int(0.7 * len(x)) // 20 * 20
    end = len(x) // 20 * 20
    return [x[:cut], y[:cut], x[cut:end], y[cut:end]]


def runs(seeds: list[int], quick: bool) -> Iterator[Run]:
    """All of them, one after another."""
    for seed in seeds:
        for name, data in data_sets(seed):
            for library in LIBRARIES:
                for setting in SETTINGS[:1] if quick else SETTINGS:
                    if name == "digits" and (library == "catboost" or setting[0] != "default"):
                        continue  # ten trees a round: too slow for what it adds
                    for validation in (False, True):
                        run = Run((library, name, setting[0], seed, "validated" if validation else "alone"))
                        fit(library, data[0], parts_of(data, seed, validation), setting, seed, run)
                        yield run.finish()


def patience(curve: list[float], rounds: int) -> tuple[int, int]:
    """(round named, round of the stop) by fixed patience."""
    best = 0
    for i, value in enumerate(curve):
        if value < curve[best]:
            best = i
        if i - best >= rounds:
            return best, i
    return best, len(curve) - 1


def hit(round_: int, curve: list[float]) -> bool:
    """Whether a round is near the best one, or as good."""
    best = int(np.argmin(curve))
    near = abs(round_ - best) <= 0.1 * (best + 1)
    return near or curve[round_] - curve[best] <= 0.01 * abs(curve[best])


def onset_table(all_runs: list[Run]) -> None:
    """Hits by the round that is named and by the round at which it was known, and rounds spent."""
    judged = [r for r in all_runs if len(r.curve) > 20]
    rows: dict[str, list[tuple[int, int]]] = {
        "overfit_onset, or the end": [r.onset or (int(np.argmin(r.curve)), len(r.curve) - 1) for r in judged],
        "patience 10": [patience(r.curve, 10) for r in judged],
        "patience 50": [patience(r.curve, 50) for r in judged],
    }
    print(f"\nonset over {len(judged)} runs of {len({r.key[1] for r in judged})} data sets")
    print(f"{'':28s}{'named round hits':>18s}{'noticed in time':>17s}{'rounds trained':>16s}{'excess loss':>13s}")
    for name, pairs in rows.items():
        named = np.mean([hit(n, r.curve) for (n, _), r in zip(pairs, judged, strict=True)])
        noticed = np.mean([hit(at, r.curve) for (_, at), r in zip(pairs, judged, strict=True)])
        trained = np.mean([(at + 1) / len(r.curve) for (_, at), r in zip(pairs, judged, strict=True)])
        worse = np.mean([
            (r.curve[n] - min(r.curve)) / max(abs(min(r.curve)), 1e-12) for (n, _), r in zip(pairs, judged, strict=True)
        ])  # fmt: skip
        print(f"{name:28s}{named:18.1%}{noticed:17.1%}{trained:16.1%}{worse:13.2%}")
    alarmed = [r for r in judged if r.onset is not None]
    ok = [hit(o[0], r.curve) for r in alarmed if (o := r.onset)]
    print(f"alarms: {len(alarmed)}; named round a hit in {np.mean(ok) if ok else 1:.1%} of them")


def main() -> None:
    """Print what was said."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--quick", action="store_true", help="the libraries' default parameters only")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    all_runs: list[Run] = []
    said: Counter[str] = Counter()
    loud: list[tuple[tuple[Any, ...], Finding]] = []
    spoilt: list[tuple[tuple[Any, ...], Finding]] = []
    for run in runs(options.seeds, options.quick):
        all_runs.append(run)
        for finding in run.findings:
            said[f"{finding.kind} ({finding.severity})"] += 1
            if finding.severity > Severity.INFO:
                (spoilt if run.spoilt else loud).append((run.key, finding))
    worse = sum(r.spoilt for r in all_runs)
    print(f"{len(all_runs)} runs, of which {worse} ended no better on validation than after their first round")
    for text, count in sorted(said.items()):
        print(f"  {text}: {count}")
    print(f"{len(loud)} findings above info in healthy runs")
    for key, finding in loud:
        print("  ", *key, "|", finding.kind, finding.subject, finding.step, "|", finding.premise)
    print(f"{len(spoilt)} in runs that ended no better on validation than after their first round")
    for text, count in Counter(f"{finding.kind}" for _, finding in spoilt).items():
        print(f"  {text}: {count}")
    onset_table(all_runs)


if __name__ == "__main__":
    main()
