"""The columnar tree table: predicted from it alone, a margin is the library's own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dynguard.trees import cat, lgb, xgb
from dynguard.trees.table import COLUMNS, Missing, Rule, TreeTable, UnreadableError, concat, margins

xgboost = pytest.importorskip("xgboost")
lightgbm = pytest.importorskip("lightgbm")
catboost = pytest.importorskip("catboost")
pd = pytest.importorskip("pandas")

ROWS = 800
CLOSE = 1e-5


def _data() -> tuple[Any, dict[str, Any]]:
    """Four numbers (one half zeros), one column of 12 categories; a tenth is missing."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(ROWS, 5)).astype(np.float32)
    X[:, 3] *= rng.random(ROWS) < 0.5
    X[:, 4] = rng.integers(0, 12, ROWS)
    signal = X[:, 0] + 2.0 * (X[:, 4] % 3 == 1) + X[:, 3] + (X[:, 1] > 0) * X[:, 2]
    X[rng.random(X.shape) < 0.1] = np.nan
    targets = {
        "number": signal,
        "binary": (signal > 1).astype(float),
        "classes": np.clip(np.floor(signal), 0, 2),
        "counts": np.floor(np.exp(np.clip(signal, -2, 3) / 2)),
        "positive": np.exp(np.clip(signal, -2, 3) / 2),
        "two": np.c_[signal, 3 - signal * X[:, 2].clip(-1, 1)],
        "constant": np.full(ROWS, 7.25),
    }
    targets["two"] = np.nan_to_num(targets["two"])
    return X, targets


X, TARGETS = _data()
GROUPS = [20] * (ROWS // 20)


def _equal(found: Any, expected: Any) -> None:
    expected = np.asarray(expected, dtype=np.float64).reshape(len(found), -1)
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= CLOSE * max(1.0, np.abs(expected).max())


def _sound(table: TreeTable) -> None:
    """What every table keeps, whatever the library."""
    assert set(table) == set(COLUMNS)
    assert {len(table[name]) for name in table} == {table.nodes}
    roots = np.flatnonzero(table["node"] == 0)
    first = np.repeat(roots, np.diff([*roots, table.nodes]))
    leaf = table["leaf"]
    assert (table["parent"][roots] == -1).all()
    assert (leaf == (table["left"] == -1)).all()
    assert (leaf == (table["feature"] == -1)).all()
    inner = np.flatnonzero(~leaf)
    for side in ("left", "right"):
        child = first[inner] + table[side][inner]
        assert (table["parent"][child] == table["node"][inner]).all()
        assert (table["depth"][child] == table["depth"][inner] + 1).all()
    assert table.nodes == len(roots) + 2 * len(inner)
    assert (table["value"][~leaf] == 0).all()
    assert (np.diff(table["round"]) >= 0).all()


# -- XGBoost

XGBOOST: dict[str, tuple[dict[str, Any], str]] = {
    "regression": ({}, "number"),
    "binary": ({"objective": "binary:logistic"}, "binary"),
    "logitraw": ({"objective": "binary:logitraw"}, "binary"),
    "hinge": ({"objective": "binary:hinge"}, "binary"),
    "multi-class": ({"objective": "multi:softprob", "num_class": 3}, "classes"),
    "forest": ({"objective": "multi:softmax", "num_class": 3, "num_parallel_tree": 2, "subsample": 0.5}, "classes"),
    "ranking": ({"objective": "rank:ndcg"}, "classes"),
    "poisson": ({"objective": "count:poisson"}, "counts"),
    "gamma": ({"objective": "reg:gamma"}, "positive"),
    "tweedie": ({"objective": "reg:tweedie"}, "counts"),
    "cox": ({"objective": "survival:cox"}, "positive"),
    "quantiles": ({"objective": "reg:quantileerror", "quantile_alpha": [0.1, 0.9]}, "number"),
    "median": ({"objective": "reg:absoluteerror"}, "number"),
    "dart": ({"booster": "dart", "rate_drop": 0.5}, "number"),
    "dart classes": ({"booster": "dart", "rate_drop": 0.5, "objective": "multi:softprob", "num_class": 3}, "classes"),
    "two outputs": ({}, "two"),
    "vector leaves": ({"multi_strategy": "multi_output_tree"}, "two"),
    "vector classes": (
        {"multi_strategy": "multi_output_tree", "objective": "multi:softprob", "num_class": 3}, "classes",
    ),
    "lossguide": ({"grow_policy": "lossguide", "max_leaves": 7}, "number"),
    "pruned": ({"tree_method": "exact", "gamma": 3.0}, "number"),
    "approx": ({"tree_method": "approx"}, "number"),
    "monotone": ({"monotone_constraints": "(1,0,0,0,0)"}, "number"),
    "root only": ({"gamma": 1e9}, "number"),
    "constant": ({}, "constant"),
}  # fmt: skip


def _xgboost(parameters: dict[str, Any], target: str, rounds: int = 5, *, categorical: bool = False) -> tuple[Any, Any]:
    kinds = ["q", "q", "q", "q", "c"] if categorical else None
    data = xgboost.DMatrix(X, TARGETS[target], feature_types=kinds, enable_categorical=categorical)
    if "rank" in parameters.get("objective", ""):
        data.set_group(GROUPS)
    given_ = {"nthread": 1, "max_depth": 4, "eta": 0.4, **parameters}
    return xgboost.train(given_, data, rounds), data


def _xgboost_equal(booster: Any, data: Any) -> TreeTable:
    table = xgb.read(booster)
    _sound(table)
    _equal(margins(table, X), booster.predict(data, output_margin=True))
    return table


@pytest.mark.parametrize("case", XGBOOST)
def test_xgboost_margins(case: str) -> None:
    _xgboost_equal(*_xgboost(*XGBOOST[case]))


@pytest.mark.parametrize("one_hot", [1, 100])
def test_xgboost_categories(one_hot: int) -> None:
    table = _xgboost_equal(*_xgboost({"max_cat_to_onehot": one_hot}, "number", categorical=True))
    by_set = table["rule"] == Rule.NOT_IN_SET
    assert by_set.any()
    assert (table["feature"][by_set] == 4).all()
    assert (table["set_length"][by_set] == 1).all() == (one_hot == 100)


def test_xgboost_round_by_round_is_the_whole() -> None:
    for parameters, target in (XGBOOST["forest"], XGBOOST["vector leaves"], XGBOOST["dart"]):
        booster, _ = _xgboost(parameters, target)
        _same(xgb.read(booster), [xgb.read(booster, i, i + 1) for i in range(5)])
    booster, _ = _xgboost({}, "number", categorical=True)
    _same(xgb.read(booster), [xgb.read(booster, 0, 2), xgb.read(booster, 2)])
    assert xgb.read(booster, 5).nodes == 0


def test_xgboost_cover_gain_and_split_are_its_own() -> None:
    booster, _ = _xgboost({}, "number")
    table, frame = xgb.read(booster), booster.trees_to_dataframe().sort_values(["Tree", "Node"])
    leaf = table["leaf"]
    assert table["cover"] == pytest.approx(frame["Cover"].to_numpy(), rel=1e-5)
    assert table["gain"][~leaf] == pytest.approx(frame["Gain"].to_numpy()[~leaf], rel=1e-5)
    assert table["value"][leaf] == pytest.approx(frame["Gain"].to_numpy()[leaf], rel=1e-5)
    assert [f"f{i}" for i in table["feature"][~leaf]] == frame["Feature"][~leaf].tolist()


def test_xgboost_linear_booster_is_refused() -> None:
    data = xgboost.DMatrix(np.nan_to_num(X), TARGETS["number"])
    booster = xgboost.train({"booster": "gblinear", "updater": "shotgun", "nthread": 1}, data, 1)
    with pytest.raises(UnreadableError, match="gblinear has no trees"):
        xgb.read(booster)


def test_xgboost_without_rounds() -> None:
    booster, data = _xgboost({"base_score": 0.75}, "number", rounds=0)
    table = xgb.read(booster)
    assert table.nodes == 0
    _equal(margins(table, X), booster.predict(data, output_margin=True))


# -- LightGBM

LIGHTGBM: dict[str, tuple[dict[str, Any], str]] = {
    "regression": ({}, "number"),
    "zero is missing": ({"zero_as_missing": True}, "number"),
    "nothing is missing": ({"use_missing": False}, "number"),
    "full step": ({"learning_rate": 1.0}, "number"),
    "binary": ({"objective": "binary"}, "binary"),
    "multi-class": ({"objective": "multiclass", "num_class": 3}, "classes"),
    "one against all": ({"objective": "multiclassova", "num_class": 3}, "classes"),
    "ranking": ({"objective": "lambdarank"}, "classes"),
    "poisson": ({"objective": "poisson"}, "counts"),
    "gamma": ({"objective": "gamma"}, "positive"),
    "quantile": ({"objective": "quantile", "alpha": 0.9}, "number"),
    "median": ({"objective": "l1"}, "number"),
    "dart": ({"boosting": "dart", "drop_rate": 0.5}, "number"),
    "goss": ({"data_sample_strategy": "goss"}, "number"),
    "monotone": ({"monotone_constraints": [1, 0, 0, 0, 0]}, "number"),
    "root only": ({"min_gain_to_split": 1e9}, "number"),
    "root only classes": ({"min_gain_to_split": 1e9, "objective": "multiclass", "num_class": 3}, "classes"),
    "constant": ({}, "constant"),
}
QUIET = {"num_threads": 1, "verbosity": -1}


def _lightgbm(parameters: dict[str, Any], target: Any, rounds: int = 5, *, categorical: bool = False) -> Any:
    label = TARGETS[target] if isinstance(target, str) else target
    group = GROUPS if parameters.get("objective") == "lambdarank" else None
    data = lightgbm.Dataset(X, label, categorical_feature=[4] if categorical else [], group=group)
    return lightgbm.train({**QUIET, "num_leaves": 9, "learning_rate": 0.3, **parameters}, data, rounds)


def _lightgbm_equal(booster: Any) -> TreeTable:
    table = lgb.read(booster)
    _sound(table)
    _equal(margins(table, X), booster.predict(X, raw_score=not table.average))
    return table


@pytest.mark.parametrize("case", LIGHTGBM)
def test_lightgbm_margins(case: str) -> None:
    _lightgbm_equal(_lightgbm(*LIGHTGBM[case]))


@pytest.mark.parametrize("one_hot", [1, 100])
def test_lightgbm_categories(one_hot: int) -> None:
    parameters = {"max_cat_to_onehot": one_hot, "min_data_per_group": 1, "cat_smooth": 1}
    table = _lightgbm_equal(_lightgbm(parameters, "number", categorical=True))
    by_set = table["rule"] == Rule.IN_SET
    assert by_set.any()
    assert (table["feature"][by_set] == 4).all()
    assert (table["set_length"][by_set] == 1).all() == (one_hot == 100)


def test_lightgbm_forest_is_a_mean() -> None:
    # LightGBM's raw score of a random forest is the sum; what it predicts, and the table, is the mean.
    parameters = {"boosting": "rf", "bagging_freq": 1, "bagging_fraction": 0.5}
    table = _lightgbm_equal(_lightgbm(parameters, "number"))
    assert table.average
    assert table.base[0] == pytest.approx(TARGETS["number"].mean(), abs=0.2)


def test_lightgbm_missing_types() -> None:
    kinds = {"zero is missing": Missing.ZERO, "nothing is missing": Missing.NOTHING, "regression": Missing.NAN}
    for case, kind in kinds.items():
        table = lgb.read(_lightgbm(*LIGHTGBM[case]))
        assert set(table["missing"][~table["leaf"]]) == {kind}


def test_lightgbm_start_is_taken_out_of_the_first_leaves() -> None:
    for shift in (0.0, 1e4, -1e7):
        table = lgb.read(_lightgbm({}, TARGETS["number"] + shift))
        first = table["leaf"] & (table["round"] == 0)
        assert table.base[0] == pytest.approx(TARGETS["number"].mean() + shift, abs=0.01 + abs(shift) * 1e-7)
        assert table["value"][first].min() < -0.1
        assert table["value"][first].max() > 0.1
    share = TARGETS["binary"].mean()
    binary = lgb.read(_lightgbm({"objective": "binary"}, "binary"))
    assert binary.base[0] == pytest.approx(np.log(share / (1 - share)), abs=1e-4)


def test_lightgbm_own_objective_starts_at_zero() -> None:
    # No start is written into the leaves: all of them chase the mean, and the table must show it.
    for rate in (0.3, 1.0):
        objective = {"objective": lambda p, d: (p - d.get_label(), np.ones(len(p))), "learning_rate": rate}
        booster = _lightgbm(objective, TARGETS["number"] + 1e4)
        table = _lightgbm_equal(booster)
        assert table.base.tolist() == [0.0]
        first = table["leaf"] & (table["round"] == 0)
        assert (table["value"][first] > 0.9 * rate * 1e4).all()


def test_lightgbm_round_by_round_is_the_whole() -> None:
    for case in ("regression", "multi-class"):
        booster = _lightgbm(*LIGHTGBM[case])
        _same(lgb.read(booster), [lgb.read(booster, i, i + 1) for i in range(5)])
    booster = _lightgbm({"min_data_per_group": 1, "cat_smooth": 1}, "number", categorical=True)
    _same(lgb.read(booster), [lgb.read(booster, 0, 2), lgb.read(booster, 2)])
    assert lgb.read(booster, 5).nodes == 0


def test_lightgbm_gain_cover_and_count_are_its_own() -> None:
    booster = _lightgbm({"objective": "binary"}, "binary")
    table, frame = lgb.read(booster), booster.trees_to_dataframe()
    splits = frame[frame["split_feature"].notna()]
    assert sorted(table["gain"][~table["leaf"]]) == pytest.approx(sorted(splits["split_gain"]), rel=1e-4)
    assert sorted(table["count"]) == sorted(frame["count"])
    assert sorted(table["cover"]) == pytest.approx(sorted(frame["weight"]), rel=1e-4)


def test_lightgbm_linear_trees_are_refused() -> None:
    booster = _lightgbm({"linear_tree": True}, "number", rounds=2)
    with pytest.raises(UnreadableError, match="linear trees"):
        lgb.read(booster)
    with pytest.raises(UnreadableError, match="no LightGBM model"):
        lgb.parse("something else")


# -- CatBoost

CATBOOST: dict[str, tuple[dict[str, Any], str]] = {
    "regression": ({}, "number"),
    "missing is most": ({"nan_mode": "Max"}, "number"),
    "binary": ({"loss_function": "Logloss"}, "binary"),
    "multi-class": ({"loss_function": "MultiClass"}, "classes"),
    "one against all": ({"loss_function": "MultiClassOneVsAll"}, "classes"),
    "ranking": ({"loss_function": "YetiRank"}, "classes"),
    "poisson": ({"loss_function": "Poisson"}, "counts"),
    "two outputs": ({"loss_function": "MultiRMSE"}, "two"),
    "uncertainty": ({"loss_function": "RMSEWithUncertainty"}, "number"),
    "depthwise": ({"grow_policy": "Depthwise"}, "number"),
    "lossguide": ({"grow_policy": "Lossguide", "max_leaves": 6}, "number"),
    "depthwise classes": ({"grow_policy": "Depthwise", "loss_function": "MultiClass"}, "classes"),
    "root only": ({"grow_policy": "Depthwise", "min_data_in_leaf": 10_000}, "number"),
}
SILENT = {"allow_writing_files": False, "logging_level": "Silent", "thread_count": 1, "iterations": 5, "depth": 3}


def _catboost(parameters: dict[str, Any], rows: Any, target: str, categories: list[str] | None = None) -> Any:
    group = np.repeat(np.arange(len(GROUPS)), 20) if parameters.get("loss_function") == "YetiRank" else None
    pool = catboost.Pool(rows, TARGETS[target], cat_features=categories, group_id=group)
    model = catboost.CatBoost({**SILENT, "learning_rate": 0.3, **parameters})
    model.fit(pool)
    return model


@pytest.mark.parametrize("case", CATBOOST)
def test_catboost_margins(case: str) -> None:
    parameters, target = CATBOOST[case]
    model = _catboost(parameters, X, target)
    table, names = cat.read(model)
    _sound(table)
    assert names == ("0", "1", "2", "3", "4")
    _equal(margins(table, X), model.predict(X, prediction_type="RawFormulaVal"))


def _frame() -> Any:
    """Categories lead, and stand between the numbers: columns must not shift."""
    words = np.array(list("abcdefghijkl"))[np.nan_to_num(X[:, 4]).astype(int)]
    columns = {"kind [a]": words, "x": X[:, 0], "größe": np.where(X[:, 1] > 0, "p", "q"), "y z": X[:, 3], "w": X[:, 2]}
    return pd.DataFrame(columns)


@pytest.mark.parametrize("policy", ["SymmetricTree", "Depthwise", "Lossguide"])
def test_catboost_leading_categories(policy: str, tmp_path: Path) -> None:
    frame = _frame()
    categories = ["kind [a]", "größe"]
    one_hot = {"one_hot_max_size": 30, "grow_policy": policy}
    model = _catboost(one_hot, frame, "number", categories)
    table, names = cat.read(model)
    assert names == tuple(frame.columns)
    by_set = table["rule"] == Rule.NOT_IN_SET
    assert set(table["feature"][by_set]) <= {0, 2}
    assert by_set.any()
    codes = frame.copy()
    hashes = _hashes(frame, categories, tmp_path)
    for column in categories:
        codes[column] = [hashes[value] for value in codes[column]]
    _equal(margins(table, codes.to_numpy(dtype=float)), model.predict(frame, prediction_type="RawFormulaVal"))
    used = {names[f] for f in table["feature"] if f >= 0}
    assert used == {n for n, v in zip(names, model.get_feature_importance(), strict=True) if v > 0}


def _hashes(frame: Any, categories: list[str], folder: Path) -> dict[str, int]:
    """CatBoost's own hash of every category, as its export to Python lists them."""
    pool = catboost.Pool(frame, TARGETS["number"], cat_features=categories)
    model = catboost.CatBoost({**SILENT, "one_hot_max_size": 30})
    model.fit(pool)
    model.save_model(str(folder / "model.py"), format="python", pool=pool)
    listed = re.search(r"cat_features_hashes = \{(.*?)\}", (folder / "model.py").read_text(), re.DOTALL)
    assert listed is not None
    return {word: int(number) for word, number in re.findall(r'"(\w+)": (-?\d+)', listed[1])}


def test_catboost_target_statistics_are_named() -> None:
    frame = _frame()
    model = _catboost({"one_hot_max_size": 1, "iterations": 40, "depth": 4}, frame, "number", ["kind [a]", "größe"])
    table, names = cat.read(model)
    opaque = table["rule"] == Rule.OPAQUE
    assert opaque.any()
    assert names[:5] == tuple(frame.columns)
    bases = {part for f in table["feature"][opaque] for part in names[f].split(" + ")}
    assert "kind [a]" in bases
    assert bases <= set(frame.columns)
    with pytest.raises(UnreadableError, match="target statistics"):
        margins(table, np.zeros((1, 5)))


def test_catboost_gain_is_its_importance() -> None:
    # Of trees of one split, PredictionValuesChange takes exactly this term over the two leaves.
    model = _catboost({"depth": 1, "iterations": 30}, X, "number")
    table, _ = cat.read(model)
    inner = ~table["leaf"]
    gain = np.bincount(table["feature"][inner], table["gain"][inner], 5)
    assert 100 * gain / gain.sum() == pytest.approx(model.get_feature_importance(), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("policy", ["SymmetricTree", "Depthwise"])
def test_catboost_infinite_leaves_are_read(policy: str) -> None:
    model = _catboost({"grow_policy": policy}, X, "number")
    sane, _ = cat.read(model)
    broken = np.array(model.get_leaf_values())
    which = int(np.flatnonzero(broken == sane["value"][sane["leaf"]][5])[0])
    broken[which] = np.inf
    model.set_leaf_values(broken)
    table, _ = cat.read(model)
    assert table["value"][table["leaf"]][5] == np.inf
    others = np.isfinite(table["value"])
    assert (~others).sum() == 1
    assert (table["value"][others] == sane["value"][others]).all()
    assert (np.array(model.get_leaf_values()) == broken).all()


# -- all libraries


def _same(whole: TreeTable, parts: list[TreeTable]) -> None:
    joined = concat(parts)
    for name in COLUMNS:
        assert np.array_equal(joined[name], whole[name], equal_nan=True), name
    assert joined.base == pytest.approx(whole.base)
    assert (joined.categories == whole.categories).all()


def _everywhere(rows: Any, y: Any) -> Iterator[tuple[TreeTable, Any]]:
    """A table and the library's margin from each library."""
    booster = xgboost.train({"nthread": 1, "max_depth": 3}, xgboost.DMatrix(rows, y), 3)
    yield xgb.read(booster), booster.predict(xgboost.DMatrix(rows), output_margin=True)
    parameters = {**QUIET, "min_data_in_leaf": 1, "num_leaves": 5}
    gbm = lightgbm.train(parameters, lightgbm.Dataset(rows, y, params={"min_data_in_bin": 1}), 3)
    yield lgb.read(gbm), gbm.predict(rows, raw_score=True)
    if len(np.unique(y)) > 1 and any(len(np.unique(c[~np.isnan(c)])) + np.isnan(c).any() > 1 for c in rows.T):
        model = catboost.CatBoost({**SILENT, "iterations": 3}).fit(rows, y)
        yield cat.read(model)[0], model.predict(rows, prediction_type="RawFormulaVal")


numbers = st.one_of(st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-40, 1e30, -1e30, np.nan]), st.floats(-10, 10, width=32))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_odd_inputs(data: st.DataObject) -> None:
    width = data.draw(st.integers(1, 3))
    size = data.draw(st.integers(4, 30))
    rows = np.array(data.draw(st.lists(numbers, min_size=size * width, max_size=size * width))).reshape(size, width)
    y = np.array(data.draw(st.lists(st.integers(-3, 3).map(float), min_size=size, max_size=size)))
    for table, margin in _everywhere(rows, y):
        _sound(table)
        _equal(margins(table, rows), margin)


def test_the_libraries_mean_the_same() -> None:
    # One stump on a step: whatever the library, each leaf holds half the step times the rate, and covers half the rows.
    rows = np.repeat([[0.0], [1.0]], 50, axis=0)
    y = np.repeat([2.0, 6.0], 50)
    stump = {"max_depth": 1, "eta": 0.5, "reg_lambda": 0, "nthread": 1}
    booster = xgboost.train(stump, xgboost.DMatrix(rows, y), 1)
    gbm = lightgbm.train({**QUIET, "num_leaves": 2, "learning_rate": 0.5}, lightgbm.Dataset(rows, y), 1)
    options = {"iterations": 1, "depth": 1, "learning_rate": 0.5, "l2_leaf_reg": 0, "bootstrap_type": "No"}
    model = catboost.CatBoostRegressor(**{**SILENT, **options, "random_strength": 0}).fit(rows, y)
    for table in (xgb.read(booster), lgb.read(gbm), cat.read(model)[0]):
        assert table.base == pytest.approx([4.0])
        assert table["feature"].tolist() == [0, -1, -1]
        assert table["value"] == pytest.approx([0.0, -1.0, 1.0])
        assert table["cover"] == pytest.approx([100, 50, 50])
        assert table["leaf"].tolist() == [False, True, True]
        assert 0.0 <= table["threshold"][0] <= 1.0


def test_a_table_is_a_mapping_of_columns() -> None:
    table = lgb.read(_lightgbm({}, "number"))
    assert dict(table)["value"] is table["value"]
    numbers_, parts = zip(*table.each_round(), strict=True)
    assert numbers_ == (0, 1, 2, 3, 4)
    _same(table, list(parts))
    assert set(table.of_rounds(1, 3)["round"]) == {1, 2}
    assert list(TreeTable.empty().each_round()) == []
    with pytest.raises(ValueError, match="at least one"):
        concat([])
    assert json.dumps(table["value"][:1].tolist())
