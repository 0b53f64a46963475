"""Reads LightGBM's trees from its text format: only those of the rounds asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dynguard.trees.forest import build, number
from dynguard.trees.table import Array, Missing, Rule, TreeTable, UnreadableError

CATEGORICAL, DEFAULT_LEFT = 1, 2  # bits of decision_type; the two above them are the type of missing value
MISSING = np.array([Missing.NOTHING, Missing.ZERO, Missing.NAN, Missing.NAN])
CLOSE = 1e-4  # the text keeps six digits of an inner node's value

Tree = Mapping[str, str]


def rounds(booster: Any) -> int:
    """How many rounds the booster holds."""
    return int(booster.current_iteration())


def read(booster: Any, start: int = 0, stop: int | None = None, base: Array | None = None) -> TreeTable:
    """The trees of the rounds [start, stop).

    LightGBM writes the margin that it starts from into the leaves of the first round; it is taken out of them and is
    the table's ``base``.

    Args:
        booster: a ``lightgbm.Booster``.
        start, stop: boosting rounds; None is the end.
        base: what the first round's trees gave, for rounds after it; None reads them again.

    Raises:
        UnreadableError: linear trees.
    """
    total = rounds(booster)
    stop = total if stop is None else min(stop, total)
    if start > 0 and base is None:
        base = read(booster, 0, 1).base
    if start >= stop:
        text = booster.model_to_string(start_iteration=0, num_iteration=1)
        return parse(text, 0, base).rows(0, 0)
    return parse(booster.model_to_string(start_iteration=start, num_iteration=stop - start), start, base)


def parse(text: str, start: int = 0, base: Array | None = None) -> TreeTable:
    """The table of a model in LightGBM's text; ``start`` is the number of its first round.

    Raises:
        UnreadableError: linear trees, or a text that is no model.
    """
    head, trees = _split(text)
    if "num_tree_per_iteration" not in head:
        raise UnreadableError("this text is no LightGBM model: it lacks num_tree_per_iteration")
    if any(tree.get("is_linear") == "1" for tree in trees):
        raise UnreadableError("LightGBM's linear trees (linear_tree=True) have a model in each leaf: not supported")
    outputs = int(head["num_tree_per_iteration"])
    average = "average_output" in head
    whole: dict[str, Any] = {"base": np.zeros(outputs), "library": "lightgbm", "average": average}
    if not trees:
        return TreeTable(TreeTable.empty().columns, **whole)
    count = np.arange(len(trees))
    numbers = {"tree": count + start * outputs, "round": count // outputs + start, "class": count % outputs}
    whole["categories"], columns, sizes = _columns(trees)
    table = build(sizes, numbers, columns, **whole)
    found = _base(table, trees[:outputs], head) if start == 0 or base is None else base
    return _without(table, found)


def _split(text: str) -> tuple[Tree, list[Tree]]:
    """The header's and each tree's lines as mappings; what follows the trees but the parameters is left out."""
    body, _, tail = text.partition("end of trees")
    head, *trees = body.split("\nTree=")
    found = dict(_pairs(head))
    for line in tail.splitlines():
        if line.startswith(("[boost_from_average:", "[learning_rate:")):
            name, _, value = line.strip("[]").partition(": ")
            found[name] = value
    return found, [dict(_pairs(tree)) for tree in trees]


def _pairs(lines: str) -> Iterator[tuple[str, str]]:
    for line in lines.splitlines():
        name, _, value = line.partition("=")
        yield name, value


def _numbers(trees: Sequence[Tree], name: str, dtype: Any = np.float64) -> Array:
    """One array of a field of all trees."""
    return np.array(" ".join(tree.get(name, "") for tree in trees).split(), dtype=dtype)


def _columns(trees: Sequence[Tree]) -> tuple[Array, dict[str, Array], Array]:
    """Categories, columns and sizes: in each tree the splits first, then the leaves."""
    leaves = np.array([int(tree["num_leaves"]) for tree in trees])
    sizes = 2 * leaves - 1
    splits = np.repeat(leaves - 1, sizes)
    leaf = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes) >= splits

    def column(at_split: Array | float, at_leaf: Array | float) -> Array:
        whole = np.empty(len(leaf), dtype=np.float64)
        whole[~leaf], whole[leaf] = at_split, at_leaf
        return whole

    kind = _numbers(trees, "decision_type", np.int64)
    categorical = (kind & CATEGORICAL) > 0
    threshold = _numbers(trees, "threshold")
    categories, starts, lengths = _sets(trees, leaves - 1, categorical, threshold)
    more = np.repeat(leaves - 1, leaves - 1)  # a child below 0 is the complement of a leaf's number
    children = {side: _numbers(trees, f"{side}_child", np.int64) for side in ("left", "right")}
    columns = {side: column(np.where(to < 0, ~to + more, to), -1).astype(np.int64) for side, to in children.items()}
    columns |= {
        "feature": column(_numbers(trees, "split_feature"), -1),
        "threshold": column(np.where(categorical, np.nan, threshold), np.nan),
        "rule": column(np.where(categorical, Rule.IN_SET, Rule.LESS_EQUAL), Rule.LEAF),
        "missing": column(np.where(categorical, Missing.NAN, MISSING[(kind >> 2) & 3]), Missing.NAN),
        "default_left": column(((kind & DEFAULT_LEFT) > 0) & ~categorical, 0.0),
        "set_start": column(starts, 0),
        "set_length": column(lengths, 0),
        "gain": column(_numbers(trees, "split_gain"), 0.0),
        "cover": column(_numbers(trees, "internal_weight"), _of_leaves(trees, "leaf_weight")),
        "count": column(_numbers(trees, "internal_count"), _of_leaves(trees, "leaf_count")),
        "value": column(0.0, _numbers(trees, "leaf_value")),
    }
    return categories, columns, sizes


def _of_leaves(trees: Sequence[Tree], name: str) -> Array:
    """A field with an entry per leaf; LightGBM leaves it empty in a tree of one leaf."""
    return np.array(
        " ".join(tree.get(name) or " ".join(["nan"] * int(tree["num_leaves"])) for tree in trees).split(), float
    )


def _sets(trees: Sequence[Tree], splits: Array, categorical: Array, threshold: Array) -> tuple[Array, Array, Array]:
    """The categories of all sets, and each split's start and length: LightGBM keeps them as bits of 32-bit words."""
    start, length = np.zeros(len(categorical), np.int64), np.zeros(len(categorical), np.int64)
    found: list[Array] = []
    before = 0
    for tree, last in zip(trees, np.cumsum(splits), strict=True):
        if tree.get("num_cat", "0") == "0":
            continue
        bounds = np.array(tree["cat_boundaries"].split(), np.int64)
        words = np.array(tree["cat_threshold"].split(), np.uint32)
        mine = slice(last - (int(tree["num_leaves"]) - 1), last)
        for split in np.flatnonzero(categorical[mine]) + mine.start:
            which = int(threshold[split])
            members = _bits(words[bounds[which] : bounds[which + 1]])
            start[split], length[split] = before, len(members)
            before += len(members)
            found.append(members)
    return np.concatenate(found) if found else np.zeros(0, np.int64), start, length


def _bits(words: Array) -> Array:
    return np.flatnonzero(np.unpackbits(words.astype("<u4").view(np.uint8), bitorder="little"))


def _base(table: TreeTable, first: Sequence[Tree], head: Tree) -> Array:
    """(outputs,) the margin that training started from, as LightGBM wrote it into the first tree of each output.

    It does so for objectives of its own under boost_from_average, and the tree's shrinkage is then 1.
    """
    base = np.zeros(table.outputs)
    if head.get("boost_from_average", "1") != "1" or head.get("objective", "custom") in ("custom", "none"):
        return base
    roots = np.flatnonzero(table["node"] == 0).tolist()
    for output, (tree, root) in enumerate(zip(first, roots, strict=False)):
        if float(tree.get("shrinkage") or 1) == 1.0:
            base[output] = _root_value(tree, table.rows(root, root + 2 * int(tree["num_leaves"]) - 1))
    return base


def _root_value(tree: Tree, nodes: TreeTable) -> float:
    """The root's value: to six digits in the text, else the mean of the leaves that rounds to it."""
    leaf = nodes["leaf"]
    values, weights = nodes["value"][leaf], nodes["cover"][leaf]
    if len(values) == 1:
        return float(values[0])
    written = float(tree["internal_value"].split(maxsplit=1)[0])
    mean = float((values * weights).sum() / weights.sum()) if weights.sum() > 0 else np.nan
    return mean if abs(mean - written) <= CLOSE * abs(written) else written


def _without(table: TreeTable, base: Array) -> TreeTable:
    """Take the base out of the leaves that hold it: those of the first round, or of all in a random forest."""
    holds = table["leaf"] & (table.average | (table["round"] == 0))
    columns = {**table.columns, "value": table["value"] - np.where(holds, base[table["class"]], 0.0)}
    return replace(table, columns=columns, base=base)


def nothing_added(table: TreeTable, round_: int) -> TreeTable:
    """A tree of one leaf worth 0 per output: what a round is that LightGBM dropped because no tree could split."""
    outputs = table.outputs
    zeros = np.zeros(outputs, np.int64)
    numbers = {"tree": np.arange(outputs) + round_ * outputs, "round": zeros + round_, "class": np.arange(outputs)}
    unknown = {name: np.full(outputs, np.nan) for name in ("threshold", "cover")}
    columns = {"left": zeros - 1, "right": zeros - 1, "feature": zeros - 1, "value": np.zeros(outputs),
               "gain": np.zeros(outputs), "default_left": zeros > 0, **unknown}  # fmt: skip
    return build(zeros + 1, numbers, columns, base=table.base, library="lightgbm", average=table.average)


def parameters(text: str) -> dict[str, Any]:
    """All training parameters that a model's text ends with, under LightGBM's canonical names."""
    lines = text.partition("\nparameters:")[2].partition("end of parameters")[0].splitlines()
    pairs = (line.strip("[]").partition(": ") for line in lines if line.startswith("["))
    return {name: number(value) for name, _, value in pairs}
