"""What the detectors know of a run: one small record per round, running sums over features, and the curves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dynguard_plugins.trees.curves import Curve, Curves

if TYPE_CHECKING:
    from dynguard.events import TreeEvent

Floats = npt.NDArray[np.float64]
QUANTILES = (0.0, 0.05, 0.5, 0.95, 1.0)
BLOCKS = 64
THRESHOLDS = 256
NARROW = 0.01  # a leaf with less than this share of its tree's weight is narrow


@dataclass(slots=True)
class Round:
    """One boosting round; all that is kept of its trees.

    Attributes:
        number: of the round.
        trees, splits: how many it added.
        extreme: the leaf value of largest magnitude, with its sign; NaN or infinite where one is.
        rms: sqrt of the mean square of the leaf values, weighted by cover.
        mean: mean of the leaf values, weighted by cover, over all outputs.
        offset: mean leaf over the leaves' standard deviation, both weighted by cover: the least over the outputs.
        sign: 1 or -1 where all leaves have that sign, else 0.
        cover: mean cover of the roots.
        thin: share of the tree's cover in the leaf of largest magnitude.
        narrow: share of the leaves' squared values, weighted by cover, that lies in narrow leaves.
        quantiles: of the leaf values, at 0, 5, 50, 95 and 100 %.
        top, top_gain: the feature that gained most in this round, and its share.
    """

    number: int
    trees: int = 0
    splits: int = 0
    extreme: float = 0.0
    rms: float = 0.0
    mean: float = 0.0
    offset: float = 0.0
    sign: int = 0
    cover: float = math.nan
    thin: float = math.nan
    narrow: float = 0.0
    quantiles: tuple[float, ...] = ()
    top: int = -1
    top_gain: float = 0.0

    @property
    def largest(self) -> float:
        """Magnitude of the largest leaf, infinite where one is not finite."""
        return abs(self.extreme) if math.isfinite(self.extreme) else math.inf

    @property
    def root_only(self) -> bool:
        """Whether none of the round's trees has a split."""
        return self.trees > 0 and self.splits == 0


@dataclass(slots=True)
class Sums:
    """By feature, over rounds: gain, number of splits, cover of the nodes that split on it."""

    gain: dict[int, float] = field(default_factory=dict)
    splits: dict[int, float] = field(default_factory=dict)
    cover: dict[int, float] = field(default_factory=dict)

    def add(self, trees: Mapping[str, Any]) -> dict[int, float]:
        """Take up a round; its gain by feature."""
        inner = ~trees["leaf"]
        if not inner.any():
            return {}
        found, at = np.unique(trees["feature"][inner], return_inverse=True)
        gain = np.bincount(at, np.nan_to_num(trees["gain"][inner], posinf=0.0, neginf=0.0))
        cover = np.bincount(at, np.nan_to_num(trees["cover"][inner], posinf=0.0, neginf=0.0))
        for mine, new in ((self.gain, gain), (self.splits, np.bincount(at)), (self.cover, cover)):
            for feature, value in zip(found.tolist(), new.tolist(), strict=True):
                mine[feature] = mine.get(feature, 0.0) + float(value)
        return dict(zip(found.tolist(), gain.tolist(), strict=True))


@dataclass(slots=True)
class History:
    """One booster's run.

    Attributes:
        source, library, names, parameters: as of the newest event that knew them.
        base: margin before the first tree, of all outputs.
        average: whether trees are averaged, not added up.
        rounds: of the rounds whose trees were seen, in order.
        sums: by feature over all rounds.
        blocks: gain by feature of every ``block`` rounds, at most 64 of them.
        thresholds: of the feature that gained most in each round, distinct, at most 256 a feature.
        curves: training and validation.
        newest: number of the newest round that was told of.
        root_run: how many rounds in a row, up to now, had no split.
        peak: the largest leaf of all rounds before the newest.
        told: kinds that were told already.
    """

    source: str = ""
    library: str = ""
    names: tuple[str, ...] = ()
    parameters: dict[str, Any] = field(default_factory=dict)
    base: tuple[float, ...] = ()
    average: bool = False
    rounds: list[Round] = field(default_factory=list)
    sums: Sums = field(default_factory=Sums)
    blocks: list[dict[int, float]] = field(default_factory=list)
    block: int = 1
    thresholds: dict[int, list[float]] = field(default_factory=dict)
    curves: Curves = field(default_factory=Curves)
    newest: int = -1
    root_run: int = 0
    peak: float = 0.0
    told: list[str] = field(default_factory=list)
    onset: dict[str, float] = field(default_factory=dict)

    def begins_again(self, event: TreeEvent) -> bool:
        """Whether the event is of another fit: its round has been told of already, trees, metrics or both."""
        has_trees = len(event.trees["node"]) > 0
        if has_trees and self.rounds and event.round <= self.rounds[-1].number:
            return True
        seen = max((c.rounds[-1] for c in (self.curves.train, self.curves.validation) if c and c.rounds), default=-1)
        return bool(event.metrics) and event.round <= seen

    def add(self, event: TreeEvent) -> None:
        """Take up one round: O(nodes of the round)."""
        self.source, self.library = event.source, event.library
        self.names = tuple(event.feature_names) or self.names
        self.parameters = dict(event.parameters) or self.parameters
        self.newest = max(self.newest, event.round)
        if event.metrics:
            self.curves.add(event.round, event.metrics)
        if len(event.trees["node"]):
            self._grow(event)

    def _grow(self, event: TreeEvent) -> None:
        trees = event.trees
        if self.rounds:
            self.peak = max(self.peak, self.rounds[-1].largest)
        else:
            self.base = tuple(float(value) for value in np.atleast_1d(getattr(trees, "base", ())))
            self.average = bool(getattr(trees, "average", False))
        round_ = measured(event.round, trees)
        gains = self.sums.add(trees)
        if gains:
            round_.top = max(gains, key=lambda feature: gains[feature])
            round_.top_gain = gains[round_.top] / total if (total := sum(gains.values())) > 0 else 0.0
            self._note_thresholds(round_.top, trees)
        if len(self.rounds) % self.block == 0:
            self._open_block()
        for feature, gain in gains.items():
            self.blocks[-1][feature] = self.blocks[-1].get(feature, 0.0) + gain
        self.rounds.append(round_)
        self.root_run = self.root_run + 1 if round_.root_only else 0

    def _note_thresholds(self, feature: int, trees: Mapping[str, Any]) -> None:
        known = self.thresholds.setdefault(feature, [])
        if len(known) < THRESHOLDS:
            new = np.unique(trees["threshold"][trees["feature"] == feature])
            known += sorted(set(new[np.isfinite(new)].tolist()) - set(known))[: THRESHOLDS - len(known)]

    def _open_block(self) -> None:
        """A new block; at the most there may be, two become one and blocks are twice as long."""
        if len(self.blocks) == BLOCKS:
            self.blocks = [joined(a, b) for a, b in zip(self.blocks[::2], self.blocks[1::2], strict=True)]
            self.block *= 2
        self.blocks.append({})

    def name(self, feature: int) -> str:
        """Of a feature, by column."""
        return self.names[feature] if 0 <= feature < len(self.names) else f"column {feature}"

    def first_time(self, kind: str) -> bool:
        """True once per kind."""
        if kind in self.told:
            return False
        self.told.append(kind)
        return True


def joined(one: Mapping[int, float], other: Mapping[int, float]) -> dict[int, float]:
    """The sums of two."""
    return {key: one.get(key, 0.0) + other.get(key, 0.0) for key in {**one, **other}}


def measured(number: int, trees: Mapping[str, Any]) -> Round:
    """The record of a round's trees."""
    leaf, root = trees["leaf"], trees["node"] == 0
    values = np.asarray(trees["value"][leaf], dtype=np.float64)
    found = Round(number, trees=int(root.sum()), splits=int((~leaf).sum()))
    if not len(values):
        return found
    cover = np.asarray(trees["cover"], dtype=np.float64)
    found.cover = float(cover[root].mean())
    weight = _weights(cover[leaf])
    at = int(np.argmax(np.where(np.isnan(values), np.inf, np.abs(values))))
    found.extreme = float(values[at])
    if not np.isfinite(values).all():
        return found
    own = _own_root(cover, root)[leaf]
    share = np.divide(weight, own, out=np.full(len(own), np.nan), where=own > 0)
    square = weight * values**2
    total = weight.sum()
    found.rms = float(np.sqrt(square.sum() / total))
    found.mean = float((weight * values).sum() / total)
    found.thin = float(share[at])
    found.narrow = float(square[share < NARROW].sum() / square.sum()) if square.sum() > 0 else 0.0
    found.quantiles = tuple(np.quantile(values, QUANTILES).tolist())
    found.offset = _offset(values, weight, trees["class"][leaf])
    found.sign = int(np.sign(values[0])) if len(set(np.sign(values).tolist())) == 1 else 0
    return found


def _weights(cover: Floats) -> Floats:
    """The leaves' cover, or ones where there is none."""
    usable = np.isfinite(cover) & (cover > 0)
    return np.where(usable, cover, 0.0) if usable.any() else np.ones(len(cover))


def _own_root(cover: Floats, root: npt.NDArray[np.bool_]) -> Floats:
    """Each node's root's cover."""
    found: Floats = np.where(root, cover, 0.0)[np.maximum.accumulate(np.where(root, np.arange(len(root)), 0))]
    return np.where(np.isfinite(found), found, 0.0)


def _offset(values: Floats, weight: Floats, output: npt.NDArray[np.int64]) -> float:
    """Mean over standard deviation of the leaves, the least over the outputs; infinite where they do not differ."""
    total = np.bincount(output, weight)
    mean = np.bincount(output, weight * values) / np.where(total > 0, total, 1.0)
    spread = np.sqrt(np.bincount(output, weight * (values - mean[output]) ** 2) / np.where(total > 0, total, 1.0))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(mean == 0, 0.0, np.abs(mean) / spread)
    return float(ratio[total > 0].min())


def saved(history: History) -> dict[str, Any]:
    """Plain numbers, strings, lists and dicts."""
    return asdict(history)


def restored(state: Mapping[str, Any]) -> History:
    """What :func:`saved` gave; keys may have become text on the way (JSON)."""
    given = dict(state)
    given["rounds"] = [Round(**{**one, "quantiles": tuple(one["quantiles"])}) for one in given["rounds"]]
    given["sums"] = Sums(**{name: _keyed(column) for name, column in given["sums"].items()})
    given["blocks"] = [_keyed(block) for block in given["blocks"]]
    given["thresholds"] = {int(key): list(values) for key, values in given["thresholds"].items()}
    given["curves"] = Curves(**{name: None if c is None else Curve(**c) for name, c in given["curves"].items()})
    given["names"], given["base"] = tuple(given["names"]), tuple(given["base"])
    return History(**given)


def _keyed(column: Mapping[Any, float]) -> dict[int, float]:
    return {int(key): float(value) for key, value in column.items()}
