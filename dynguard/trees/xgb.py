"""Reads XGBoost's trees: only those of the rounds asked for, through a slice of the booster."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dynguard.trees.forest import build, flat, number, spread
from dynguard.trees.table import Array, Missing, Rule, TreeTable, UnreadableError

# Objectives whose base_score is kept as a prediction, by the link that turns it into a margin (ProbToMargin).
LOGIT = ("binary:logistic", "reg:logistic")
LOG = ("count:poisson", "reg:gamma", "reg:tweedie", "survival:cox", "survival:aft")


def read(booster: Any, start: int = 0, stop: int | None = None) -> TreeTable:
    """The trees of the rounds [start, stop).

    Args:
        booster: an ``xgboost.Booster`` with trees.
        start, stop: boosting rounds; None is the end.

    Raises:
        UnreadableError: a linear booster, which has no trees.
    """
    total = int(booster.num_boosted_rounds())
    stop = total if stop is None else min(stop, total)
    if start == 0 and stop == total:
        return parse(_json(booster))
    if start >= stop:
        return read(booster, 0, 1).rows(0, 0)
    return parse(_json(booster[start:stop]), start)


def _json(booster: Any) -> Any:
    return json.loads(bytes(booster.save_raw("json")))


def parse(model: Mapping[str, Any], start: int = 0) -> TreeTable:
    """The table of a model in XGBoost's JSON; ``start`` is the number of its first round.

    Raises:
        UnreadableError: a linear booster, which has no trees.
    """
    learner = model["learner"]
    gradient = learner["gradient_booster"]
    if gradient["name"] == "gblinear":
        raise UnreadableError("XGBoost's gblinear has no trees to read: use booster='gbtree' or 'dart'")
    inner = gradient["gbtree"]["model"] if "gbtree" in gradient else gradient["model"]
    whole: dict[str, Any] = {"base": base_margin(learner), "library": "xgboost", "single": True}
    trees = inner["trees"]
    if not trees:
        return TreeTable(TreeTable.empty().columns, **whole)
    numbers = _numbers(inner, start)
    whole["categories"] = flat((tree["categories"] for tree in trees), np.int64)
    table = build(*_columns(trees, numbers, gradient.get("weight_drop")), **whole)
    outputs = int(trees[0]["tree_param"]["size_leaf_vector"])
    return spread(table, _vectors(trees, outputs)) if outputs > 1 else table


def _numbers(inner: Mapping[str, Any], start: int) -> dict[str, Array]:
    """Number, round and class of every tree."""
    count = len(inner["trees"])
    per_round = np.diff(inner["iteration_indptr"])
    each = int(per_round[0])
    return {
        "tree": np.arange(count) + start * each,
        "round": np.repeat(np.arange(len(per_round)), per_round) + start,
        "class": np.asarray(inner["tree_info"], dtype=np.int64),
    }


def _columns(trees: Sequence[Any], numbers: Any, weights: Any) -> tuple[Array, Any, dict[str, Array]]:
    sizes = np.array([len(tree["left_children"]) for tree in trees])
    conditions = flat((tree["split_conditions"] for tree in trees), np.float32).astype(np.float64)
    left = flat((tree["left_children"] for tree in trees), np.int64)
    categorical = (flat((tree["split_type"] for tree in trees), np.int8) == 1) & (left >= 0)
    set_start, set_length = _sets(trees, sizes)
    columns = {
        "left": left,
        "right": flat((tree["right_children"] for tree in trees), np.int64),
        "feature": flat((tree["split_indices"] for tree in trees), np.int64),
        "threshold": np.where(categorical, np.nan, conditions),
        "rule": np.where(categorical, Rule.NOT_IN_SET, Rule.LESS),
        "missing": np.full(len(left), Missing.NAN),
        "default_left": flat((tree["default_left"] for tree in trees), np.bool_),
        "set_start": set_start,
        "set_length": set_length,
        "gain": flat((tree["loss_changes"] for tree in trees), np.float64),
        "cover": flat((tree["sum_hessian"] for tree in trees), np.float64),
        "value": conditions if weights is None else conditions * np.repeat(weights, sizes),
    }
    return sizes, numbers, columns


def _sets(trees: Sequence[Any], sizes: Array) -> tuple[Array, Array]:
    """Where each node's categories lie among those of all trees, and how many they are."""
    start, length = np.zeros(int(sizes.sum()), np.int64), np.zeros(int(sizes.sum()), np.int64)
    before = 0
    for tree, root in zip(trees, np.cumsum(sizes) - sizes, strict=True):
        if tree["categories"]:
            nodes = root + np.asarray(tree["categories_nodes"])
            start[nodes] = before + np.asarray(tree["categories_segments"])
            length[nodes] = tree["categories_sizes"]
            before += len(tree["categories"])
    return start, length


def _vectors(trees: Sequence[Any], outputs: int) -> Array:
    """(nodes, outputs) the leaves' values: in ``leaf_weights`` by number of the leaf since 3.1, else by node."""
    return np.concatenate([_leaves(tree, outputs) for tree in trees])


def _leaves(tree: Mapping[str, Any], outputs: int) -> Array:
    weights = tree.get("leaf_weights")
    if not weights:
        return np.asarray(tree["base_weights"], np.float64).reshape(-1, outputs)
    values = np.asarray(weights, np.float32).astype(np.float64).reshape(-1, outputs)
    left, right = np.asarray(tree["left_children"]), np.asarray(tree["right_children"])
    return np.where((left < 0)[:, None], values[np.where(left < 0, right, 0)], 0.0)


def base_margin(learner: Mapping[str, Any]) -> Array:
    """(outputs,) the margin before the first tree, from ``base_score``, which is kept as a prediction."""
    param = learner["learner_model_param"]
    outputs = max(int(param["num_class"]), int(param.get("num_target", 1)), 1)
    score = np.atleast_1d(np.asarray(json.loads(str(param["base_score"])), dtype=np.float64))
    name = learner["objective"]["name"]
    with np.errstate(divide="ignore", invalid="ignore"):
        if name in LOGIT:
            score = -np.log(1.0 / score - 1.0)
        elif name in LOG:
            score = np.log(score)
    return np.broadcast_to(score, (outputs,)).copy()


def feature_names(booster: Any) -> tuple[str, ...]:
    """The booster's own names, or f0, f1 ... as XGBoost calls them."""
    names = booster.feature_names
    return tuple(names) if names else tuple(f"f{column}" for column in range(booster.num_features()))


def parameters(booster: Any) -> dict[str, Any]:
    """The training parameters as the booster knows them, under XGBoost's canonical names and defaults included."""
    config = json.loads(booster.save_config())["learner"]
    gradient = config["gradient_booster"]
    found: dict[str, Any] = {"objective": config["objective"]["name"], "booster": gradient["name"]}
    for part in (config["learner_model_param"], gradient, gradient.get("gbtree", {}), config["objective"]):
        for name, value in part.items():
            if isinstance(value, str) and name != "name":
                found[name] = number(value)
            elif name.endswith("_param") and isinstance(value, dict):
                found.update({key: number(text) for key, text in value.items()})
    return found
