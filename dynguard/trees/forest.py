"""From a library's arrays to the table: what is the same for all three."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from dynguard.trees.table import COLUMNS, Array, Missing, Rule, TreeTable, concat


def flat(lists: Iterable[Iterable[Any]], dtype: Any) -> Array:
    """One array of many lists, converted at once: an array for each would cost more than its numbers."""
    return np.array(list(chain.from_iterable(lists)), dtype=dtype)


def number(text: str) -> int | float | str:
    """A parameter's text as a number where it is one."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def build(sizes: Array, numbers: Mapping[str, Array], columns: Mapping[str, Array], **whole: Any) -> TreeTable:
    """The table of trees whose nodes follow one another, root first.

    Args:
        sizes: (trees,) nodes of each tree.
        numbers: ``tree``, ``round`` and ``class``, each (trees,).
        columns: the library's columns, each (nodes,): at least left, right (-1 at a leaf), feature, value; others are
            filled with what they are where nothing is known.
        whole: further attributes of the table.
    """
    total = int(sizes.sum())
    first = np.repeat(np.cumsum(sizes) - sizes, sizes)
    leaf = columns["left"] < 0
    parent, depth = _descend(first, columns["left"], columns["right"])
    full: dict[str, Array] = {
        **{name: np.repeat(column, sizes) for name, column in numbers.items()},
        "node": np.arange(total) - first,
        "parent": parent,
        "depth": depth,
        "leaf": leaf,
        "rule": np.where(leaf, Rule.LEAF, Rule.LESS_EQUAL),
        "missing": np.full(total, Missing.NAN),
        "count": np.full(total, np.nan),
        "set_start": np.zeros(total),
        "set_length": np.zeros(total),
        **columns,
    }
    for name, at_leaf in (("feature", -1), ("threshold", np.nan), ("gain", 0.0), ("rule", Rule.LEAF), ("left", -1),
                          ("right", -1), ("default_left", False)):  # fmt: skip
        full[name] = np.where(leaf, at_leaf, full[name])
    full["value"] = np.where(leaf, full["value"], 0.0)
    table = TreeTable({name: full[name].astype(dtype, copy=False) for name, dtype in COLUMNS.items()}, **whole)
    return table if (depth >= 0).all() else _reached(table)


def _descend(first: Array, left: Array, right: Array) -> tuple[Array, Array]:
    """Parent and depth of every node; depth -1 where no path leads. Paths to the root are doubled at each pass."""
    inner = np.flatnonzero(left >= 0)
    start = first[inner]
    up = np.arange(len(first))
    up[start + left[inner]] = inner
    up[start + right[inner]] = inner
    parent = np.where(up == np.arange(len(first)), -1, up - first)
    depth = (parent >= 0).astype(np.int64)
    while (up != up[up]).any():
        depth += depth[up]
        up = up[up]
    return parent, np.where(up == first, depth, -1)


def _reached(table: TreeTable) -> TreeTable:
    """Without the nodes that pruning left behind, the rest renumbered."""
    keep = table["depth"] >= 0
    first = np.flatnonzero(table["node"] == 0)
    sizes = np.diff([*first, table.nodes])
    before = np.cumsum(keep) - 1  # a node's place among those that are kept
    number = before - np.repeat(before[first], sizes)
    start = np.repeat(first, sizes)
    columns = dict(table.columns)
    columns["node"] = number
    for name in ("parent", "left", "right"):
        columns[name] = np.where(columns[name] < 0, -1, number[start + np.maximum(columns[name], 0)])
    return replace(table, columns={name: column[keep] for name, column in columns.items()})


def spread(table: TreeTable, vectors: Array) -> TreeTable:
    """Each tree once per output, where leaves are vectors.

    Args:
        table: with one entry per node.
        vectors: (nodes, outputs) what each leaf adds.
    """
    outputs = vectors.shape[1]
    roots = np.flatnonzero(table["node"] == 0)
    stops = np.append(roots[1:], table.nodes)
    rows = [np.tile(np.arange(a, b), outputs) for a, b in zip(roots, stops, strict=True)]
    classes = [np.repeat(np.arange(outputs), b - a) for a, b in zip(roots, stops, strict=True)]
    row = np.concatenate(rows) if rows else np.zeros(0, np.int64)
    output = np.concatenate(classes) if classes else np.zeros(0, np.int64)
    columns = {name: column[row] for name, column in table.columns.items()}
    columns["class"] = output
    columns["value"] = np.where(columns["leaf"], vectors[row, output], 0.0)
    return replace(table, columns=columns)


def joined(tables: list[TreeTable]) -> TreeTable:
    """The folds' trees in one table, numbered on."""
    if len(tables) == 1:
        return tables[0]
    numbered = []
    next_tree = 0
    for table in tables:
        tree = table["tree"] - (table["tree"].min() if table.nodes else 0) + next_tree
        numbered.append(replace(table, columns={**table.columns, "tree": tree}))
        next_tree = int(tree.max()) + 1 if table.nodes else next_tree
    return concat(numbered)


def renumbered(table: TreeTable, by: int) -> TreeTable:
    """The same trees with the rounds counted from elsewhere."""
    return replace(table, columns={**table.columns, "round": table["round"] + by})
