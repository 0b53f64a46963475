"""Callbacks of the tree libraries and the replay of fitted models: each round once, as the library trained it."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynguard import trees
from dynguard.errors import MissingExtraError
from dynguard.events import TreeEvent
from dynguard.trees import cat, lgb, xgb
from dynguard.trees.inspect import replay
from dynguard.trees.reporter import BATCH, SINGLY, due
from dynguard.trees.table import TreeTable, UnreadableError, concat, margins

xgboost = pytest.importorskip("xgboost")
lightgbm = pytest.importorskip("lightgbm")
catboost = pytest.importorskip("catboost")
sklearn = pytest.importorskip("sklearn")

from sklearn.calibration import CalibratedClassifierCV  # noqa: E402 - after the check that it is there
from sklearn.compose import ColumnTransformer, TransformedTargetRegressor  # noqa: E402
from sklearn.ensemble import VotingRegressor  # noqa: E402
from sklearn.linear_model import LinearRegression  # noqa: E402
from sklearn.model_selection import GridSearchCV  # noqa: E402
from sklearn.pipeline import Pipeline  # noqa: E402
from sklearn.preprocessing import StandardScaler  # noqa: E402

rng = np.random.default_rng(0)
X = rng.normal(size=(400, 4))
Y = X[:, 0] + X[:, 1] ** 2 + 0.1 * rng.normal(size=400)
LABEL = (Y > 1).astype(int)
CLASSES = np.clip(np.floor(Y), 0, 2).astype(int)
XGB = {"nthread": 1, "max_depth": 3}
LGB = {"num_threads": 1, "verbosity": -1, "num_leaves": 7}
CAT = {"thread_count": 1, "allow_writing_files": False, "logging_level": "Silent", "depth": 3, "iterations": 8}


class Kept(list[TreeEvent]):
    """Keeps the events; asks to stop from a round on."""

    def __init__(self, stop: int | None = None) -> None:
        super().__init__()
        self.stop = stop

    def __call__(self, event: TreeEvent) -> bool:
        self.append(event)
        return self.stop is not None and event.round >= self.stop

    @property
    def rounds(self) -> list[int]:
        return [event.round for event in self]

    def table(self) -> TreeTable:
        return concat([_table(event) for event in self])


def _table(event: TreeEvent) -> TreeTable:
    assert isinstance(event.trees, TreeTable)
    return event.trees


def _same(a: TreeTable, b: TreeTable) -> None:
    for name in a:
        assert np.array_equal(a[name], b[name], equal_nan=True), name


def _train_xgboost(emit: Any, rounds: int = 6, **rest: Any) -> Any:
    data, valid = xgboost.DMatrix(X[:300], Y[:300]), xgboost.DMatrix(X[300:], Y[300:])
    options = {"evals": [(data, "train"), (valid, "valid")], "verbose_eval": False, **rest}
    return xgboost.train(XGB, data, rounds, callbacks=[trees.xgboost(emit)], **options)


def _train_lightgbm(emit: Any, rounds: int = 6, more: Any = (), parameters: Any = (), **rest: Any) -> Any:
    data = lightgbm.Dataset(X[:300], Y[:300])
    valid = lightgbm.Dataset(X[300:], Y[300:], reference=data)
    options = {"valid_sets": [data, valid], "valid_names": ["train", "valid"], **rest}
    callbacks = [*more, emit if hasattr(emit, "finish") else trees.lightgbm(emit)]
    return lightgbm.train({**LGB, **dict(parameters)}, data, rounds, callbacks=callbacks, **options)


# -- every round once


@pytest.mark.parametrize("rounds", [1, 6, SINGLY + 2 * BATCH + 2])
def test_xgboost_rounds_make_the_model(rounds: int) -> None:
    kept, log = Kept(), {}  # type: ignore[var-annotated]  # filled by xgboost
    booster = _train_xgboost(kept, rounds, evals_result=log)
    assert kept.rounds == list(range(rounds))
    _same(kept.table(), xgb.read(booster))
    assert [e.metrics["valid"]["rmse"] for e in kept] == pytest.approx(log["valid"]["rmse"])
    assert kept[0].feature_names == ("f0", "f1", "f2", "f3")
    assert kept[0].parameters["max_depth"] == 3
    assert kept[0].parameters["objective"] == "reg:squarederror"


@pytest.mark.parametrize("rounds", [1, 6, SINGLY + 2 * BATCH + 2])
def test_lightgbm_rounds_make_the_model(rounds: int) -> None:
    kept, log = Kept(), {}  # type: ignore[var-annotated]  # filled by lightgbm
    booster = _train_lightgbm(kept, rounds, more=[lightgbm.record_evaluation(log)])
    assert kept.rounds == list(range(rounds))
    _same(kept.table(), lgb.read(booster))
    assert [e.metrics["valid"]["l2"] for e in kept] == pytest.approx(log["valid"]["l2"])
    assert kept[0].feature_names == tuple(booster.feature_name())
    assert (kept[0].parameters["num_leaves"], kept[0].parameters["min_data_in_leaf"]) == (7, 20)


def test_catboost_metrics_while_fitting_and_trees_after() -> None:
    kept = Kept()
    model = catboost.CatBoostRegressor(**CAT)
    with trees.catboost(model, kept) as callback:
        model.fit(X[:300], Y[:300], eval_set=(X[300:], Y[300:]), callbacks=[callback], use_best_model=False)
        during = len(kept)
    assert kept.rounds == [*range(8), *range(8)]
    assert during == 8
    assert all(_table(event).nodes == 0 for event in kept[:8])
    losses = [event.metrics["validation"]["RMSE"] for event in kept[:8]]
    assert losses == pytest.approx(model.evals_result_["validation"]["RMSE"])
    _same(kept.table(), cat.read(model)[0])
    assert kept[8].feature_names == ("0", "1", "2", "3")
    assert kept[8].parameters["depth"] == 3


def test_rounds_are_read_at_once_where_a_metric_is_not_finite() -> None:
    assert due(SINGLY, {})
    assert not due(SINGLY + 1, {"train": {"rmse": 1.0}})
    assert due(SINGLY + 1, {"train": {"rmse": float("inf")}})
    assert [count for count in range(SINGLY + 1, SINGLY + 2 * BATCH + 1) if due(count, {})] == [56, 64]


def test_margins_of_the_rounds_are_those_of_the_model() -> None:
    kept = Kept()
    booster = _train_lightgbm(kept)
    for number in range(1, 7):
        expected = booster.predict(X, raw_score=True, num_iteration=number)
        assert margins(concat([_table(e) for e in kept[:number]]), X)[:, 0] == pytest.approx(expected, abs=1e-9)


# -- continued training, early stopping, cross-validation


def test_continued_training_counts_on() -> None:
    first = _train_xgboost(Kept())
    kept = Kept()
    booster = _train_xgboost(kept, 3, xgb_model=first)
    assert kept.rounds == [6, 7, 8]
    _same(kept.table(), xgb.read(booster, 6))
    gbm = _train_lightgbm(Kept())
    more = Kept()
    gbm = _train_lightgbm(more, 3, init_model=gbm)
    assert more.rounds == [6, 7, 8]
    _same(more.table(), lgb.read(gbm, 6))


def test_catboost_continued_training_reads_new_trees_only() -> None:
    first = catboost.CatBoostRegressor(**CAT).fit(X, Y)
    kept, model = Kept(), catboost.CatBoostRegressor(**{**CAT, "iterations": 300, "learning_rate": 0.9, "depth": 6})
    with trees.catboost(model, kept) as callback:
        model.fit(X[:200], Y[:200], eval_set=(X[200:], Y[200:]), init_model=first, callbacks=[callback])
    fitted = [event for event in kept if _table(event).nodes]
    assert model.tree_count_ < 308  # cut back to the best round
    assert [event.round for event in fitted] == list(range(model.tree_count_ - 8))
    assert fitted[0].trees["tree"][0] == 8


def test_early_stopping_loses_no_round() -> None:
    noisy = Y[300:] + 3 * np.random.default_rng(1).normal(size=100)
    data = xgboost.DMatrix(X[:300], Y[:300])
    kept, log = Kept(), {}  # type: ignore[var-annotated]  # filled by xgboost
    xgboost.train({**XGB, "eta": 0.05}, data, 500, evals=[(xgboost.DMatrix(X[300:], noisy), "v")], verbose_eval=False,
                  early_stopping_rounds=4, evals_result=log, callbacks=[trees.xgboost(kept)])  # fmt: skip
    assert kept.rounds == list(range(len(log["v"]["rmse"])))
    assert len(kept) < 500


def test_lightgbm_early_stopping_loses_no_round() -> None:
    kept, log = Kept(), {}  # type: ignore[var-annotated]  # filled by lightgbm
    callback = trees.lightgbm(kept)

    def end(env: Any) -> None:
        if env.iteration == SINGLY + 1:
            raise lightgbm.callback.EarlyStopException(env.iteration, env.evaluation_result_list)

    end.order = 40  # type: ignore[attr-defined]  # how LightGBM orders callbacks: as late as its early stopping
    _train_lightgbm(callback, 500, more=[lightgbm.record_evaluation(log), end])
    assert len(log["valid"]["l2"]) == SINGLY + 2
    assert len(kept) == SINGLY
    callback.finish()
    assert kept.rounds == list(range(SINGLY + 2))
    assert all(_table(event).nodes > 1 for event in kept)
    callback.finish()
    assert len(kept) == SINGLY + 2


def test_cross_validation_joins_the_folds() -> None:
    kept = Kept()
    frame = xgboost.cv(XGB, xgboost.DMatrix(X, Y), 4, nfold=3, callbacks=[trees.xgboost(kept)], as_pandas=False)
    assert kept.rounds == [0, 1, 2, 3]
    assert [event.metrics["test"]["rmse"] for event in kept] == pytest.approx(frame["test-rmse-mean"])
    assert set(kept[2].trees["tree"]) == {0, 1, 2}
    more = Kept()
    found = lightgbm.cv(LGB, lightgbm.Dataset(X, Y), 4, nfold=3, stratified=False, callbacks=[trees.lightgbm(more)])
    assert more.rounds == [0, 1, 2, 3]
    assert [event.metrics["valid"]["l2"] for event in more] == pytest.approx(found["valid l2-mean"])
    assert len(set(more[2].trees["tree"])) == 3


def test_xgboost_update_of_a_model() -> None:
    first = _train_xgboost(Kept(), 4)
    kept, data = Kept(), xgboost.DMatrix(X, Y)
    given = {"verbosity": 0, "process_type": "update", "updater": "refresh", "refresh_leaf": True, **XGB}
    booster = xgboost.train(given, data, 4, xgb_model=first, callbacks=[trees.xgboost(kept)])
    seen = [event for event in kept if _table(event).nodes]
    assert sorted(event.round for event in seen) == [0, 1, 2, 3]
    _same(concat([_table(event) for event in seen]), xgb.read(booster))


def test_lightgbm_rounds_without_a_split() -> None:
    kept = Kept()
    booster = _train_lightgbm(kept, 5, parameters={"min_data_in_leaf": 1000})
    assert booster.num_trees() == 1  # LightGBM keeps none of the others
    assert kept.rounds == [0, 1, 2, 3, 4]
    for event in kept:
        assert event.trees["leaf"].tolist() == [True]
        assert event.trees["value"].tolist() == [0.0]
        assert event.trees["round"].tolist() == [event.round]
    assert _table(kept[0]).base[0] == pytest.approx(Y[:300].mean())


# -- stopping by the library's own path


@pytest.mark.parametrize(("at", "left"), [(0, 1), (3, 3), (SINGLY + 1, SINGLY + 1)])
def test_stop_keeps_the_rounds_before(at: int, left: int) -> None:
    plain = _train_xgboost(Kept(), 100)
    kept = Kept(at)
    booster = _train_xgboost(kept, 100)
    assert kept.rounds[-1] == at
    assert booster.num_boosted_rounds() == left
    _same(xgb.read(booster), xgb.read(plain, 0, left))
    gbm = _train_lightgbm(Kept(at), 100)
    assert gbm.best_iteration == left
    whole = _train_lightgbm(Kept(), 100)
    assert gbm.predict(X) == pytest.approx(whole.predict(X, num_iteration=left))


def test_catboost_stop_keeps_the_rounds_before() -> None:
    kept, model = Kept(3), catboost.CatBoostRegressor(**CAT)
    with trees.catboost(model, kept) as callback:
        model.fit(X, Y, callbacks=[callback])
    assert kept.rounds == [0, 1, 2, 3, 0, 1, 2]
    assert model.tree_count_ == 3
    assert np.isfinite(model.predict(X)).all()


def test_stop_of_cross_validation() -> None:
    data = xgboost.DMatrix(X, Y)
    assert len(xgboost.cv(XGB, data, 9, callbacks=[trees.xgboost(Kept(3))], as_pandas=False)["test-rmse-mean"]) == 3
    found = lightgbm.cv(LGB, lightgbm.Dataset(X, Y), 9, stratified=False, callbacks=[trees.lightgbm(Kept(3))])
    assert len(found["valid l2-mean"]) == 3


def test_a_dying_catboost_fit_has_spoken() -> None:
    counts = np.random.default_rng(0).poisson(np.exp(2 * X[:, 0] - 3)).astype(float)
    counts[:3] = 2000
    options = {"loss_function": "Poisson", "learning_rate": 1.0, "l2_leaf_reg": 1e-6, "depth": 6}
    kept, model = Kept(), catboost.CatBoostRegressor(**{**CAT, **options})
    with pytest.raises(catboost.CatBoostError, match="inf"), trees.catboost(model, kept) as callback:
        model.fit(X, counts, callbacks=[callback])
    assert not np.isfinite([event.metrics["learn"]["Poisson"] for event in kept]).all()


# -- scikit-learn, and failures


def test_sklearn_estimators() -> None:
    kept = Kept()
    model = xgboost.XGBClassifier(n_jobs=1, n_estimators=4, callbacks=[trees.xgboost(kept)])
    model.fit(X, LABEL, eval_set=[(X, LABEL)], verbose=0)
    assert [event.metrics["validation_0"]["logloss"] for event in kept] == pytest.approx(
        model.evals_result()["validation_0"]["logloss"]
    )
    more = Kept()
    lightgbm.LGBMRanker(n_jobs=1, n_estimators=4, verbosity=-1).fit(
        X, CLASSES, group=[20] * 20, callbacks=[trees.lightgbm(more)]
    )
    assert more.rounds == [0, 1, 2, 3]


def test_a_search_reports_every_fit() -> None:
    kept = Kept()
    callback = trees.xgboost(kept)
    assert copy.deepcopy(callback) is callback
    search = GridSearchCV(
        xgboost.XGBRegressor(n_jobs=1, n_estimators=3, callbacks=[callback]), {"max_depth": [1, 2]}, cv=2
    )
    search.fit(X, Y)
    assert kept.rounds == [0, 1, 2] * 5
    assert len(list(replay(search))) == 3


def test_an_estimator_with_the_callback_can_be_saved() -> None:
    kept = Kept()

    def emit(event: TreeEvent) -> bool:  # as a manager's: it can't be pickled itself
        return kept(event)

    model = xgboost.XGBRegressor(n_jobs=1, n_estimators=3, callbacks=[trees.xgboost(emit)]).fit(X, Y)
    loaded = pickle.loads(pickle.dumps(model))
    assert (loaded.predict(X) == model.predict(X)).all()
    loaded.fit(X, Y)
    assert kept.rounds == [0, 1, 2]


def _raise(*_: Any, **__: Any) -> Any:
    raise RuntimeError("broken reader")


def test_a_failing_reader_ends_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (xgb, lgb, cat):
        monkeypatch.setattr(module, "read", _raise)
    told: list[str] = []

    def failed(doing: str, error: Exception) -> None:
        told.append(f"{doing}: {error}")

    data = xgboost.DMatrix(X, Y)
    assert xgboost.train(XGB, data, 2, callbacks=[trees.xgboost(Kept(), failed)]).num_boosted_rounds() == 2
    gbm = lightgbm.train(LGB, lightgbm.Dataset(X, Y), 2, callbacks=[trees.lightgbm(Kept(), failed)])
    assert gbm.num_trees() == 2
    model = catboost.CatBoostRegressor(**CAT)
    with trees.catboost(model, Kept(), failed) as callback:
        model.fit(X, Y, callbacks=[callback])
    assert model.tree_count_ == 8
    assert set(told) == {"reading the trees of a round: broken reader"}
    assert len(told) == 5
    with pytest.raises(RuntimeError, match="broken reader"):
        xgboost.train(XGB, data, 2, callbacks=[trees.xgboost(Kept())])


def test_unsupported_trees_are_said_at_the_first_round_and_training_goes_on() -> None:
    told: list[Any] = []
    callback = trees.lightgbm(Kept(), lambda doing, error: told.append(error))

    def data() -> lightgbm.Dataset:
        return lightgbm.Dataset(X, Y, params={"linear_tree": True, "verbosity": -1})

    model = lightgbm.train({**LGB, "linear_tree": True}, data(), 3, callbacks=[callback])
    assert model.num_trees() == 3
    assert isinstance(told[0], UnreadableError)
    assert "linear trees" in str(told[0])
    with pytest.raises(UnreadableError, match="linear trees"):
        lightgbm.train({**LGB, "linear_tree": True}, data(), 3, callbacks=[trees.lightgbm(Kept())])


def test_a_missing_library_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    makers: dict[str, Callable[[], Any]] = {
        "xgboost": lambda: trees.xgboost(Kept()),
        "lightgbm": lambda: trees.lightgbm(Kept()),
        "catboost": lambda: trees.catboost(None, Kept()),
    }
    for library, make in makers.items():
        monkeypatch.setitem(sys.modules, library, None)
        with pytest.raises(MissingExtraError, match=rf"pip install 'dynguard\[{library}\]'"):
            make()


def test_import_needs_no_tree_library() -> None:
    code = "import sys, dynguard.trees.inspect, dynguard.trees.xgb, dynguard.trees.lgb, dynguard.trees.cat\n"
    code += "assert not {'xgboost', 'lightgbm', 'catboost', 'torch', 'sklearn'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# -- fitted models

NAMES = ["a b", "[x]", "größe", "<k>"]


def _fitted() -> dict[str, Any]:
    import pandas as pd

    frame = pd.DataFrame(X, columns=["a b", "c", "größe", "k"])
    group = {"group": [20] * 20}
    small = {"n_estimators": 3, "n_jobs": 1}
    quiet = {**small, "verbosity": -1}
    return {
        "XGBRegressor": xgboost.XGBRegressor(**small).fit(frame, Y),
        "XGBClassifier": xgboost.XGBClassifier(**small).fit(frame, CLASSES),
        "XGBRanker": xgboost.XGBRanker(**small).fit(frame, CLASSES, **group),
        "XGBRFRegressor": xgboost.XGBRFRegressor(**small).fit(frame, Y),
        "LGBMRegressor": lightgbm.LGBMRegressor(**quiet).fit(frame, Y),
        "LGBMClassifier": lightgbm.LGBMClassifier(**quiet).fit(frame, CLASSES),
        "LGBMRanker": lightgbm.LGBMRanker(**quiet).fit(frame, CLASSES, **group),
        "CatBoost": catboost.CatBoost(CAT).fit(frame, Y),
        "CatBoostRegressor": catboost.CatBoostRegressor(**CAT).fit(frame, Y),
        "CatBoostClassifier": catboost.CatBoostClassifier(**CAT).fit(frame, CLASSES),
        "CatBoostRanker": catboost.CatBoostRanker(**CAT).fit(frame, CLASSES, group_id=np.repeat(np.arange(20), 20)),
    }


def _margin(model: Any) -> Any:
    if hasattr(model, "get_booster"):
        return model.predict(X, output_margin=True)
    if hasattr(model, "booster_"):
        return model.predict(X, raw_score=True)
    return catboost.CatBoost.predict(model, X, prediction_type="RawFormulaVal")


@pytest.mark.filterwarnings("ignore:X does not have valid feature names")
def test_every_estimator_is_replayed() -> None:
    for name, model in _fitted().items():
        events = list(replay(model))
        assert [event.round for event in events] == list(range(len(events))), name
        # LightGBM itself writes a space as an underscore.
        assert events[0].feature_names[2:] == ("größe", "k"), name
        assert events[0].feature_names[0].replace("_", " ") == "a b", name
        table = concat([_table(event) for event in events])
        expected = np.asarray(_margin(model)).reshape(len(X), -1)
        assert np.abs(margins(table, X) - expected).max() < 1e-5, name


def test_curves_of_a_fitted_model() -> None:
    model = xgboost.XGBRegressor(n_estimators=4, n_jobs=1).fit(X, Y, eval_set=[(X, Y)], verbose=0)
    found = [event.metrics["validation_0"]["rmse"] for event in replay(model)]
    assert found == pytest.approx(model.evals_result()["validation_0"]["rmse"])
    best = catboost.CatBoostRegressor(**{**CAT, "iterations": 200, "learning_rate": 0.9, "depth": 6})
    best.fit(X[:200], Y[:200], eval_set=(X[200:], Y[200:]))
    events = list(replay(best))
    assert best.tree_count_ < len(events) == 200
    assert [_table(event).nodes > 0 for event in events] == [i < best.tree_count_ for i in range(200)]
    assert events[199].metrics["validation"]["RMSE"] == best.evals_result_["validation"]["RMSE"][199]


def test_saved_models(tmp_path: Path) -> None:
    booster = _train_xgboost(Kept())
    gbm = _train_lightgbm(Kept())
    model = catboost.CatBoostRegressor(**CAT).fit(X, Y)
    saved: dict[str, Any] = {}
    for name in ("m.json", "m.ubj"):
        booster.save_model(tmp_path / name)
        saved[name] = xgb.read(booster)
    gbm.save_model(tmp_path / "m.txt")
    saved["m.txt"] = lgb.read(gbm)
    model.save_model(str(tmp_path / "m.cbm"))
    model.save_model(str(tmp_path / "cat.json"), format="json")
    saved["m.cbm"] = saved["cat.json"] = cat.read(model)[0]
    for name, table in saved.items():
        events = list(replay(tmp_path / name))
        _same(concat([_table(event) for event in events]), table)
        assert len(events[0].feature_names) == 4
        assert next(replay(str(tmp_path / name))).library == table.library


def test_pipelines_name_the_columns() -> None:
    import pandas as pd

    frame = pd.DataFrame(X, columns=["a b", "c", "größe", "k"])
    chosen = ColumnTransformer([("scaled", StandardScaler(), ["c", "größe"])])
    pipeline = Pipeline([("columns", chosen), ("model", xgboost.XGBRegressor(n_estimators=2, n_jobs=1))]).fit(frame, Y)
    assert next(replay(pipeline)).feature_names == ("scaled__c", "scaled__größe")
    target = TransformedTargetRegressor(
        xgboost.XGBRegressor(n_estimators=2, n_jobs=1), func=np.arcsinh, inverse_func=np.sinh
    )
    assert len(list(replay(target.fit(X, Y)))) == 2


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    classifier = xgboost.XGBClassifier(n_estimators=2, n_jobs=1)
    (tmp_path / "text.txt").write_text("hello")
    (tmp_path / "half.json").write_text('{"learner": ')
    (tmp_path / "other.json").write_text('{"a": 1}')
    (tmp_path / "empty.cbm").write_bytes(b"")
    (tmp_path / "no.ubj").write_bytes(b"{L\x00\x00 nothing")
    folds = lightgbm.cv(LGB, lightgbm.Dataset(X, Y), 2, stratified=False, return_cvbooster=True)["cvbooster"]
    voting = VotingRegressor([("a", LinearRegression())]).fit(X, Y)
    refused: list[tuple[Any, str]] = [
        (CalibratedClassifierCV(classifier, cv=2).fit(X, LABEL), "holds several models.*calibrated_classifiers_"),
        (voting, "holds several models"),
        (folds, "holds several models.*boosters"),
        (LinearRegression().fit(X, Y), "can't inspect LinearRegression: give a fitted model"),
        (3, "can't inspect int"),
        (None, "can't inspect NoneType"),
        (xgboost.DMatrix(X), "can't inspect DMatrix"),
        (lightgbm.Dataset(X), "can't inspect Dataset"),
        (catboost.Pool(X), "can't inspect Pool"),
        (xgboost.XGBRegressor, "can't inspect"),
        (classifier, "XGBClassifier is not fitted"),
        (lightgbm.LGBMRegressor(), "LGBMRegressor is not fitted"),
        (catboost.CatBoostRegressor(), "CatBoostRegressor is not fitted"),
        (GridSearchCV(classifier, {}), "fit it first"),
        (Pipeline([("a", StandardScaler()), ("b", "passthrough")]), "last step"),
        (tmp_path / "text.txt", "no saved model"),
        (tmp_path / "empty.cbm", "no saved model"),
        (tmp_path / "half.json", "no complete JSON"),
        (tmp_path / "other.json", "no saved model"),
        (tmp_path / "no.ubj", "no model that XGBoost reads"),
    ]
    for model, says in refused:
        with pytest.raises(UnreadableError, match=says):
            replay(model)
    with pytest.raises(FileNotFoundError):
        replay(tmp_path / "none.json")


def test_a_model_of_no_rounds_has_no_events() -> None:
    assert list(replay(xgboost.train(XGB, xgboost.DMatrix(X, Y), 0))) == []
