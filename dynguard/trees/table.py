"""One columnar tree table for all three libraries: numpy columns, one entry per node, the same meaning everywhere.

Columns (all of shape (nodes,)):

====================  =======  =========================================================================================
``tree``              int64    number of the tree in the model; a tree whose leaves are vectors appears once per output
``round``             int64    boosting round, from 0, counted over continued training
``class``             int64    output that the tree adds to, 0 where there is one
``node``              int64    number of the node in its tree: 0 is the root, a tree's nodes follow one another
``parent``            int64    number of the parent in the same tree, -1 at the root
``left``, ``right``   int64    numbers of the children in the same tree, -1 at a leaf
``feature``           int64    column of the split, -1 at a leaf
``threshold``         float64  of a numeric split, NaN otherwise
``rule``              int8     which rows go left: see :class:`Rule`
``missing``           int8     what counts as missing here: see :class:`Missing`
``default_left``      bool     whether what is missing goes left
``set_start``,        int64    where a categorical split's set lies in ``table.categories`` (its length is 0 for a
``set_length``        int64    numeric split)
``gain``              float64  of the split as the library counts it, 0 at a leaf: comparable within one library only
``cover``             float64  sum of hessians (XGBoost, LightGBM) or of row weights (CatBoost) in the node
``count``             float64  rows in the node; NaN where the library keeps no count (XGBoost, CatBoost)
``value``             float64  what a leaf adds to the raw margin, learning rate and tree weight included; 0 at a split
``depth``             int64    0 at the root
``leaf``              bool     whether the node is a leaf
====================  =======  =========================================================================================

The margin of a row is ``base[class]`` plus the values of the leaves that it falls into. A base that a library writes
into the leaves of its first trees (LightGBM) is taken out of them.

>>> table = TreeTable.empty(outputs=1, library="xgboost")
>>> len(table), sorted(table)[:3], len(table["value"])
(20, ['class', 'count', 'cover'], 0)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynguard.errors import DynguardError

Array = NDArray[Any]

COLUMNS: Mapping[str, Any] = {
    "tree": np.int64, "round": np.int64, "class": np.int64, "node": np.int64, "parent": np.int64,
    "left": np.int64, "right": np.int64, "feature": np.int64, "threshold": np.float64, "rule": np.int8,
    "missing": np.int8, "default_left": np.bool_, "set_start": np.int64, "set_length": np.int64,
    "gain": np.float64, "cover": np.float64, "count": np.float64, "value": np.float64, "depth": np.int64,
    "leaf": np.bool_,
}  # fmt: skip
CHUNK = 2_000_000  # (row, tree) pairs that are walked at a time
ZERO = 1e-35  # LightGBM's kZeroThreshold: what is nearer to 0 counts as zero


class UnreadableError(DynguardError, ValueError):
    """A model, or a part of one, that can't be read into a table or predicted from it; says which and what can."""


class Rule(IntEnum):
    """Which rows of a split go left."""

    LEAF = 0
    LESS = 1  # x < threshold (XGBoost)
    LESS_EQUAL = 2  # x <= threshold (LightGBM, CatBoost)
    IN_SET = 3  # the category is in the set (LightGBM)
    NOT_IN_SET = 4  # it is not (XGBoost, CatBoost)
    OPAQUE = 5  # decided by what the table does not hold: CatBoost's target statistics of categories


class Missing(IntEnum):
    """What goes the default way of a split."""

    NOTHING = 0  # NaN counts as 0
    NAN = 1
    ZERO = 2  # zero and NaN


@dataclass(frozen=True, slots=True, eq=False)
class TreeTable(Mapping[str, Array]):
    """The columns by name (it is a Mapping), and what belongs to the whole model.

    Attributes:
        columns: name -> (nodes,) array; see the module's docstring.
        base: (outputs,) margin before the first tree.
        categories: (c,) the sets of all categorical splits, one after another.
        library: ``xgboost``, ``lightgbm`` or ``catboost``.
        single: whether the library compares in float32.
        average: whether the margin is the mean over the rounds rather than the sum (LightGBM's random forest).
    """

    columns: Mapping[str, Array]
    base: Array
    categories: Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    library: str = ""
    single: bool = False
    average: bool = False

    def __getitem__(self, name: str) -> Array:
        return self.columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __len__(self) -> int:
        return len(self.columns)

    @classmethod
    def empty(cls, outputs: int = 1, **rest: Any) -> TreeTable:
        """A table of no trees."""
        return cls({name: np.zeros(0, dtype) for name, dtype in COLUMNS.items()}, np.zeros(outputs), **rest)

    @property
    def nodes(self) -> int:
        """How many nodes there are."""
        return len(self.columns["node"])

    @property
    def outputs(self) -> int:
        """How many margins a row has."""
        return len(self.base)

    def rows(self, start: int, stop: int) -> TreeTable:
        """The nodes [start, stop), as views."""
        return replace(self, columns={name: column[start:stop] for name, column in self.columns.items()})

    def of_rounds(self, start: int, stop: int) -> TreeTable:
        """The trees of the rounds [start, stop), as views."""
        first, last = np.searchsorted(self.columns["round"], [start, stop])
        return self.rows(int(first), int(last))

    def each_round(self) -> Iterator[tuple[int, TreeTable]]:
        """(round, its trees), in order."""
        numbers, starts = np.unique(self.columns["round"], return_index=True)
        for number, start, stop in zip(numbers, starts, np.append(starts, self.nodes)[1:], strict=True):
            yield int(number), self.rows(int(start), int(stop))


def concat(tables: Sequence[TreeTable]) -> TreeTable:
    """The tables one after another; base and library are the first one's.

    Raises:
        ValueError: there is no table.
    """
    if not tables:
        raise ValueError("concat: give at least one table")
    shifts = np.cumsum([0, *(len(table.categories) for table in tables[:-1])])
    columns = {name: np.concatenate([table[name] for table in tables]) for name in COLUMNS}
    starts = [np.where(t["set_length"] > 0, t["set_start"] + by, 0) for t, by in zip(tables, shifts, strict=True)]
    columns["set_start"] = np.concatenate(starts)
    return replace(tables[0], columns=columns, categories=np.concatenate([table.categories for table in tables]))


def margins(table: TreeTable, rows: Any) -> Array:
    """Raw margins, predicted from the table alone.

    Args:
        table: of the trees to add up.
        rows: (n, features) numbers; a categorical column holds what the library splits on (XGBoost and LightGBM: the
            codes; CatBoost: its 32-bit hash of the category).

    Returns:
        (n, outputs) float64.

    Raises:
        UnreadableError: a split is decided by what the table does not hold (CatBoost's target statistics).
    """
    data = np.asarray(rows, dtype=np.float64)
    if (table["rule"] == Rule.OPAQUE).any():
        raise UnreadableError(
            "margins: the model splits on CatBoost's target statistics of categories (CTR), which the table names but "
            "does not hold; predict with the model, or train with one_hot_max_size above the number of categories"
        )
    out = np.zeros((len(data), table.outputs))
    roots = np.flatnonzero(table["node"] == 0)
    if len(roots):
        keys = _set_keys(table)
        step = max(1, CHUNK // len(roots))
        for start in range(0, len(data), step):
            _add(table, roots, keys, data[start : start + step], out[start : start + step])
    if table.average and len(roots):
        out /= len(np.unique(table["round"]))
    return out + table.base


def _add(table: TreeTable, roots: Array, keys: tuple[Array, int, int], data: Array, out: Array) -> None:
    """Add the leaves' values of some rows to ``out``."""
    at = np.broadcast_to(roots, (len(data), len(roots))).copy()
    first = at.copy()
    row = np.broadcast_to(np.arange(len(data))[:, None], at.shape)
    for _ in range(int(table["depth"].max())):
        inner = ~table["leaf"][at]
        node = at[inner]
        go = _goes_left(table, node, data[row[inner], table["feature"][node]], keys)
        at[inner] = first[inner] + np.where(go, table["left"][node], table["right"][node])
    values, outputs = table["value"][at], table["class"][roots]
    for output in range(out.shape[1]):
        out[:, output] += values[:, outputs == output].sum(axis=1)


def _goes_left(table: TreeTable, node: Array, x: Array, keys: tuple[Array, int, int]) -> Array:
    rule, missing, threshold = table["rule"][node], table["missing"][node], table["threshold"][node]
    nan = np.isnan(x)
    number = np.where(nan, 0.0, x)
    away = ((missing == Missing.NAN) & nan) | ((missing == Missing.ZERO) & (np.abs(number) <= ZERO))
    if table.single:
        with np.errstate(over="ignore"):
            x = number.astype(np.float32)
    else:
        x = number
    left = np.where(rule == Rule.LESS, x < threshold, x <= threshold)
    by_set = rule >= Rule.IN_SET
    if by_set.any():
        inside = _in_set(table, node[by_set], number[by_set], keys)
        left[by_set] = np.where(rule[by_set] == Rule.IN_SET, inside, ~inside)
    return np.where(away, table["default_left"][node], left)


def _set_keys(table: TreeTable) -> tuple[Array, int, int]:
    """Every (node, category) of the sets as one sorted number, with the lowest category and the span of them."""
    low, high = (int(table.categories.min()), int(table.categories.max())) if len(table.categories) else (0, 0)
    length = table["set_length"]
    owner = np.repeat(np.arange(table.nodes), length)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(length) - length, length)
    members = table.categories[np.repeat(table["set_start"], length) + within]
    return np.sort(owner * (high - low + 1) + members - low), low, high - low + 1


def _in_set(table: TreeTable, node: Array, x: Array, keys: tuple[Array, int, int]) -> Array:
    known, low, span = keys
    category = np.trunc(np.clip(x, -(2.0**62), 2.0**62)).astype(np.int64)
    wanted = node * span + np.clip(category - low, 0, span - 1)
    at = np.searchsorted(known, wanted)
    found: Array = (np.append(known, -1)[at] == wanted) & (category >= low) & (category < low + span)
    return found
