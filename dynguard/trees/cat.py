"""Reads CatBoost's trees from its JSON export, of a fitted model: its training shows none."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from dynguard.trees.forest import build, spread
from dynguard.trees.table import Array, Missing, Rule, TreeTable

Split = tuple[int, float, int, bool, int | None]  # feature, threshold, rule, whether NaN goes left, category
Node = tuple[int, int, Split | None, float, Any]  # left, right, split, weight, value
LEAF: Split = (-1, np.nan, Rule.LEAF, False, None)


def read(model: Any) -> tuple[TreeTable, tuple[str, ...]]:
    """The trees of a fitted model, and the names of its columns.

    A split on a target statistic (CTR) stands on its categorical feature, or where it combines several, on a column of
    its own behind the others, named after them; such a table can't be predicted from.

    Gain is the weighted spread of the leaves' values that the split makes, w_l w_r / (w_l + w_r) (v_l - v_r)^2 with the
    weights w and mean values v beneath it: CatBoost keeps no gain (compare its PredictionValuesChange, which takes the
    same term over pairs of leaves).

    Args:
        model: a fitted CatBoost model of any class, or one that was loaded.
    """
    exported, values = export(model)
    names = [str(name) for name in model.feature_names_]
    table = parse(exported, names, values)
    return table, tuple(names)


def export(model: Any) -> tuple[Any, Array | None]:
    """CatBoost's JSON, and the leaves' values where these are infinite.

    Its JSON writer refuses infinities: then a copy of the model is written whose leaves hold their own numbers.
    """
    from catboost import CatBoostError  # type: ignore[import-untyped]  # it ships no types

    with tempfile.TemporaryDirectory() as folder:
        try:
            return _written(model, Path(folder)), None
        except CatBoostError as error:
            values = np.asarray(model.get_leaf_values(), dtype=np.float64)
            if np.isfinite(values).all() and np.isfinite(model.get_scale_and_bias()[1]).all():
                raise error
            return _numbered(model, values, Path(folder)), values


def _written(model: Any, folder: Path) -> Any:
    path = folder / "model.json"
    model.save_model(str(path), format="json")
    return json.loads(path.read_text(encoding="utf-8"))


def _numbered(model: Any, values: Array, folder: Path) -> Any:
    """The JSON of a copy whose leaf values are 0, 1, 2 ...; only a model read from a file may be changed."""
    from catboost import CatBoost

    path = folder / "model.cbm"
    model.save_model(str(path))
    scale, bias = model.get_scale_and_bias()
    copy = CatBoost().load_model(str(path))
    copy.set_leaf_values(np.arange(len(values), dtype=np.float64))
    copy.set_scale_and_bias(1.0, [0.0] * np.size(bias))
    found = _written(copy, folder)
    found["scale_and_bias"] = [scale, np.atleast_1d(bias).tolist()]
    return found


def parse(model: Mapping[str, Any], names: list[str], values: Array | None = None) -> TreeTable:
    """The table of a model in CatBoost's JSON.

    Args:
        model: the parsed JSON.
        names: of the columns; combinations of categories are added to it.
        values: the true values of the leaves where the JSON holds their numbers.
    """
    splits = _Splits(model["features_info"], names)
    trees = [_oblivious(tree, splits) for tree in model.get("oblivious_trees", ())]
    trees += [_free(tree, splits) for tree in model.get("trees", ())]
    scale, bias = model.get("scale_and_bias", (1.0, [0.0]))
    base = np.atleast_1d(np.asarray(bias, dtype=np.float64))
    whole: dict[str, Any] = {"library": "catboost", "single": True}
    if not trees:
        return TreeTable(TreeTable.empty().columns, base, **whole)
    nodes = [node for tree in trees for node in tree]
    leaves = np.array([node[4] for node in nodes if node[2] is None], dtype=np.float64)
    leaves = leaves.reshape(len(leaves), -1)
    if values is not None:
        leaves = values[leaves.astype(np.int64)]
    whole["base"] = np.broadcast_to(base, (leaves.shape[1],)).copy()
    table = _table([len(tree) for tree in trees], nodes, whole)
    vectors = np.zeros((table.nodes, leaves.shape[1]))
    vectors[table["leaf"]] = leaves * scale
    return spread(_measured(table, vectors), vectors)


def _table(sizes: Sequence[int], nodes: Sequence[Node], whole: dict[str, Any]) -> TreeTable:
    left, right, found, weight, _ = zip(*nodes, strict=True)
    feature, threshold, rule, default_left, category = zip(*(split or LEAF for split in found), strict=True)
    one = np.array([value is not None for value in category])
    whole["categories"] = np.array([value for value in category if value is not None], dtype=np.int64)
    number = np.arange(len(sizes))
    columns = {
        "left": np.array(left),
        "right": np.array(right),
        "feature": np.array(feature),
        "threshold": np.array(threshold),
        "rule": np.array(rule),
        "missing": np.full(len(left), Missing.NAN),
        "default_left": np.array(default_left),
        "set_start": np.where(one, np.cumsum(one) - 1, 0),
        "set_length": one.astype(np.int64),
        "gain": np.zeros(len(left)),
        "cover": np.array(weight, dtype=np.float64),
        "value": np.zeros(len(left)),
    }
    return build(np.array(sizes), {"tree": number, "round": number, "class": number * 0}, columns, **whole)


def _measured(table: TreeTable, vectors: Array) -> TreeTable:
    """With cover and gain of the splits, from the leaves upwards."""
    first = np.arange(table.nodes) - table["node"]
    depth, leaf = table["depth"], table["leaf"]
    weight, gain = np.where(leaf, table["cover"], 0.0), np.zeros(table.nodes)
    mean = vectors.copy()
    for level in range(int(depth.max()) - 1, -1, -1):
        node = np.flatnonzero((depth == level) & ~leaf)
        a, b = first[node] + table["left"][node], first[node] + table["right"][node]
        total = weight[a] + weight[b]
        with np.errstate(
            invalid="ignore", over="ignore", divide="ignore"
        ):  # infinite leaves are what may be looked for
            share = np.where(total > 0, weight[b] / np.where(total > 0, total, 1.0), 0.5)
            gain[node] = weight[a] * share * ((mean[a] - mean[b]) ** 2).sum(axis=1)
            mean[node] = (1 - share)[:, None] * mean[a] + share[:, None] * mean[b]
        weight[node] = total
    return replace(table, columns={**table.columns, "cover": weight, "gain": gain})


class _Splits:
    """Turns a split of the JSON into numbers: its features are counted by kind, columns over all kinds."""

    def __init__(self, info: Mapping[str, Any], names: list[str]) -> None:
        self.names = names
        self.floats = {f["feature_index"]: f for f in info.get("float_features", ())}
        self.categorical = {f["feature_index"]: f["flat_feature_index"] for f in info.get("categorical_features", ())}
        before = sum(len(f.get("borders") or ()) for f in info.get("float_features", ()))
        before += sum(len(f.get("values") or ()) for f in info.get("categorical_features", ()))
        self.statistics: dict[int, tuple[int, ...]] = {}  # number of the split -> columns of its categories
        for ctr in info.get("ctrs", ()):
            columns = tuple(self._columns(ctr))
            for _ in ctr["borders"]:
                self.statistics[before] = columns
                before += 1

    def _columns(self, ctr: Mapping[str, Any]) -> Iterator[int]:
        for element in ctr["elements"]:
            if "cat_feature_index" in element:
                yield self.categorical[element["cat_feature_index"]]
            elif "float_feature_index" in element:
                yield self.floats[element["float_feature_index"]]["flat_feature_index"]

    def __call__(self, split: Mapping[str, Any]) -> Split:
        kind = split["split_type"]
        if kind == "FloatFeature":
            feature = self.floats[split["float_feature_index"]]
            nan_left = feature.get("nan_value_treatment") != "AsTrue"
            return feature["flat_feature_index"], float(np.float32(split["border"])), Rule.LESS_EQUAL, nan_left, None
        if kind == "OneHotFeature":
            column = self.categorical[split["cat_feature_index"]]
            return column, np.nan, Rule.NOT_IN_SET, True, int(split["value"])
        columns = self.statistics.get(split.get("split_index", -1), ())
        return self._named(columns, kind), float(split.get("border", np.nan)), Rule.OPAQUE, False, None

    def _named(self, columns: tuple[int, ...], kind: str) -> int:
        """The column itself, or one of its own for a combination."""
        if len(columns) == 1:
            return columns[0]
        name = " + ".join(self.names[column] for column in columns) or kind
        if name not in self.names:
            self.names.append(name)
        return self.names.index(name)


@cache
def _shape(depth: int) -> tuple[list[int], list[int], list[int]]:
    """Left, right and the leaf's number of every node of a full tree, level by level; CatBoost's leaf number has the
    answer of the first split in its lowest bit."""
    inner = 2**depth - 1
    left = [2 * i + 1 for i in range(inner)] + [-1] * 2**depth
    right = [2 * i + 2 for i in range(inner)] + [-1] * 2**depth
    leaf = [int(f"{i:0{depth}b}"[::-1], 2) if depth else 0 for i in range(2**depth)]
    return left, right, leaf


def _oblivious(tree: Mapping[str, Any], splits: _Splits) -> list[Node]:
    """All nodes of a level ask the same."""
    asked = [splits(split) for split in tree.get("splits") or ()]
    left, right, leaf = _shape(len(asked))
    weights = tree.get("leaf_weights") or [np.nan] * len(leaf)
    values = np.asarray(tree["leaf_values"], dtype=np.float64).reshape(len(leaf), -1)
    inner = [split for level, split in enumerate(asked) for _ in range(2**level)]
    nodes: list[Node] = [(left[i], right[i], split, 0.0, None) for i, split in enumerate(inner)]
    return nodes + [(-1, -1, None, weights[i], values[i]) for i in leaf]


def _free(tree: Mapping[str, Any], splits: _Splits) -> list[Node]:
    """Depthwise and Lossguide: nested nodes, numbered as they are met level by level."""
    queue: list[Any] = [tree]
    nodes: list[Node] = []
    for at in queue:  # grows on the way
        if "split" not in at:
            nodes.append((-1, -1, None, at.get("weight", np.nan), np.atleast_1d(at["value"])))
            continue
        nodes.append((len(queue), len(queue) + 1, splits(at["split"]), 0.0, None))
        queue += [at["left"], at["right"]]
    return nodes


def parameters(model: Any) -> dict[str, Any]:
    """All training parameters of a fitted model (defaults included), else those that were given."""
    found = model.get_all_params() if model.is_fitted() else model.get_params()
    return {name: value for name, value in found.items() if isinstance(value, str | int | float | bool)}
