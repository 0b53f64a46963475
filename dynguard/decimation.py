"""Buckets of steps: how a million steps of metrics stay small and keep every extreme.

A bucket holds, per number, the mean of its finite values, their maximum (for scalars their minimum too) and how many
values were finite and how many were not. Steps ``[k * width, (k + 1) * width)`` share bucket k; when there are too many
buckets, the width doubles and neighbours are merged. Maximum and minimum are NaN where a NaN was among the values.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
Row: TypeAlias = tuple[Any, ...]

SCALAR = np.dtype("<f8")
VECTOR = np.dtype("<f4")
_COUNT = np.dtype("<u4")


@dataclass(slots=True)
class Cells:
    """Statistics of shape (buckets, numbers). Where neither ``finite`` nor ``bad`` values were seen, all else is NaN.

    ``mean`` is that of the finite values; where there are none, it is what there was (NaN, inf).
    """

    mean: Array
    low: Array
    high: Array
    finite: Array
    bad: Array

    @classmethod
    def of(cls, values: Array, present: Array) -> Cells:
        """One bucket per row of ``values`` (k, n); ``present`` says which entries were given."""
        values = np.where(present, values, np.nan)
        good = np.isfinite(values)
        return cls(values, values, values, good.astype(_COUNT), (present & ~good).astype(_COUNT))

    @classmethod
    def join(cls, parts: Sequence[Cells]) -> Cells:
        """All of the parts, which have the same columns."""
        columns = zip(*((part.mean, part.low, part.high, part.finite, part.bad) for part in parts), strict=True)
        return cls(*(np.concatenate(column) for column in columns))

    def take(self, rows: Any) -> Cells:
        """Some of the buckets."""
        return Cells(self.mean[rows], self.low[rows], self.high[rows], self.finite[rows], self.bad[rows])

    def merge(self, starts: Array) -> Cells:
        """Merge runs of neighbouring buckets; ``starts`` are the first of each run, ascending from 0."""
        if len(starts) == len(self.mean):
            return self
        finite, bad = np.add.reduceat(self.finite, starts), np.add.reduceat(self.bad, starts)
        sizes = np.diff(starts, append=len(self.mean))
        seen = (self.finite > 0) | (self.bad > 0)
        weight = self.finite / np.repeat(np.maximum(finite, 1), sizes, axis=0)  # of 1 in all, so that no sum overflows
        with np.errstate(invalid="ignore", over="ignore"):
            low = np.minimum.reduceat(np.where(seen, self.low, np.inf), starts)
            high = np.maximum.reduceat(np.where(seen, self.high, -np.inf), starts)
            mean = np.add.reduceat(np.where(self.finite > 0, self.mean, 0) * weight, starts)
            mean = np.fmin(np.fmax(mean, low), high)  # rounding must not carry it past what was seen
            rest = np.add.reduceat(np.where((self.finite == 0) & seen, self.mean, 0), starts)
        mean = np.where(finite > 0, mean, rest)
        nothing = (finite == 0) & (bad == 0)
        mean, low, high = (np.where(nothing, np.nan, part) for part in (mean, low, high))
        kind = self.mean.dtype
        return Cells(mean.astype(kind), low.astype(kind), high.astype(kind), finite.astype(_COUNT), bad.astype(_COUNT))

    def encode(self, count: Array) -> Iterator[tuple[bytes, bytes | None, bytes | None, bytes | None]]:
        """(mean, low, high, counts) of every bucket as BLOBs; None where the mean, or the number of steps, says all."""
        whole = (self.finite == count[:, None]).all(axis=1)
        single = (count == 1) & ((self.finite + self.bad) == 1).all(axis=1)
        for i, implied in enumerate(whole | single):
            mean, low, high = self.mean[i].tobytes(), self.low[i].tobytes(), self.high[i].tobytes()
            counts = None if implied else zlib.compress(self.finite[i].tobytes() + self.bad[i].tobytes(), 1)
            yield mean, None if low == mean else low, None if high == mean else high, counts

    @classmethod
    def decode(cls, blobs: Sequence[Row], count: Array, kind: np.dtype[Any], columns: Array) -> Cells:
        """The buckets again; of their numbers only ``columns``, NaN in buckets that are older than the number."""
        shape = (len(blobs), len(columns))
        cells = cls(*(np.full(shape, np.nan, kind) for _ in range(3)), *(np.zeros(shape, _COUNT) for _ in range(2)))
        for i, (mean, low, high, counts) in enumerate(blobs):
            if mean is not None:
                cells._fill(i, mean, low, high, counts, int(count[i]), columns)
        return cells

    def _fill(self, row: int, mean: Any, low: Any, high: Any, counts: Any, count: int, columns: Array) -> None:
        kind = self.mean.dtype
        values = np.frombuffer(mean, kind)
        known = columns < len(values)
        pick = columns[known].astype(np.intp)  # no columns at all may come as floats
        self.mean[row, known] = values[pick]
        self.low[row, known] = values[pick] if low is None else np.frombuffer(low, kind)[pick]
        self.high[row, known] = values[pick] if high is None else np.frombuffer(high, kind)[pick]
        if counts is not None:
            finite, bad = np.frombuffer(zlib.decompress(counts), _COUNT).reshape(2, -1)
            self.finite[row, known], self.bad[row, known] = finite[pick], bad[pick]
        else:
            good = np.isfinite(values[pick]) if count == 1 else True
            self.finite[row, known] = np.where(good, count, 0)
            self.bad[row, known] = np.where(good, 0, count)


@dataclass(slots=True)
class Columns:
    """Which column of a source's rows holds which number. Columns are only ever appended, so old rows stay readable.

    A vector that grows gets further segments: ``segments`` holds (first entry, length, first column) of each.
    """

    scalars: dict[str, int] = field(default_factory=dict)
    segments: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)
    width: int = 0  # columns of all vectors together

    def add(self, name: str, kind: str, start: int, length: int) -> None:
        """Append a scalar, or entries ``start : start + length`` of a vector."""
        if kind == "scalar":
            self.scalars[name] = len(self.scalars)
        else:
            self.segments.setdefault(name, []).append((start, length, self.width))
            self.width += length

    def length(self, name: str) -> int:
        """Entries of a vector."""
        return sum(length for _, length, _ in self.segments.get(name, ()))

    def missing(self, values: Iterable[str], vectors: Mapping[str, Array]) -> list[tuple[str, str, int, int]]:
        """What has to be added before a record with these can be stored: (name, kind, start, length)."""
        new = [(name, "scalar", 0, 1) for name in values if name not in self.scalars]
        for name, vector in vectors.items():
            known = self.length(name)
            if len(vector) > known or name not in self.segments:
                new.append((name, "vector", known, len(vector) - known))
        return new

    def place(self, name: str) -> Array:
        """The columns of a vector's entries, in order."""
        return np.concatenate([np.arange(at, at + length) for _, length, at in self.segments[name]] or [np.arange(0)])

    def gather(self, records: Sequence[Any]) -> Buckets:
        """One bucket for each of k ``Metrics`` of which nothing is ``missing``."""
        k = len(records)
        scalars, vectors = np.zeros((k, len(self.scalars)), SCALAR), np.zeros((k, self.width), VECTOR)
        given, filled = np.zeros(scalars.shape, bool), np.zeros(vectors.shape, bool)
        for i, record in enumerate(records):
            at = [self.scalars[name] for name in record.values]
            scalars[i, at], given[i, at] = list(record.values.values()), True
            for name, vector in record.vectors.items():
                for start, length, column in self.segments[name]:
                    part = vector[start : start + length]
                    vectors[i, column : column + len(part)], filled[i, column : column + len(part)] = part, True
        steps = np.array([record.step for record in records], np.int64)
        times = np.array([record.time for record in records], np.float64)
        ones = np.ones(k, np.int64)
        return Buckets(steps, steps, times, ones, Cells.of(scalars, given), Cells.of(vectors, filled))


@dataclass(slots=True)
class Buckets:
    """Buckets in the order of their steps: first and last step, time of the last, number of records, and the cells."""

    first: Array
    last: Array
    time: Array
    count: Array
    scalars: Cells
    vectors: Cells

    def __len__(self) -> int:
        return len(self.first)

    def merge(self, width: int) -> Buckets:
        """Sort by step and merge those that share a bucket of ``width`` steps."""
        order = np.argsort(self.first, kind="stable")
        key = self.first[order] // width
        starts = np.flatnonzero(np.diff(key, prepend=key[0] - 1))
        ends = np.append(starts[1:], len(key)) - 1
        return Buckets(
            self.first[order][starts],
            np.maximum.reduceat(self.last[order], starts),
            self.time[order][ends],
            np.add.reduceat(self.count[order], starts),
            self.scalars.take(order).merge(starts),
            self.vectors.take(order).merge(starts),
        )

    def rows(self) -> Iterator[Row]:
        """The rows of the table ``bucket``, without source."""
        scalars, vectors = self.scalars.encode(self.count), self.vectors.encode(self.count)
        plain = zip(self.first.tolist(), self.last.tolist(), self.time.tolist(), self.count.tolist(), strict=True)
        for head, (mean, low, high, counts), vector in zip(plain, scalars, vectors, strict=True):
            yield (*head, mean, low, high, counts, vector[0], vector[2], vector[3])

    @classmethod
    def parse(cls, rows: Sequence[Row], scalars: Array, vectors: Array) -> Buckets:
        """From such rows, with the columns that are wanted. ValueError or TypeError where one is damaged."""
        first, last, time, count = (np.array([row[i] for row in rows], t) for i, t in enumerate("qqdq"))
        return cls(
            first, last, time, count,
            Cells.decode([row[4:8] for row in rows], count, SCALAR, scalars),
            Cells.decode([(row[8], None, *row[9:]) for row in rows], count, VECTOR, vectors),
        )  # fmt: skip

    @classmethod
    def join(cls, parts: Sequence[Buckets]) -> Buckets:
        """All of the parts, which have the same columns."""
        heads = zip(*((part.first, part.last, part.time, part.count) for part in parts), strict=True)
        first, last, time, count = (np.concatenate(column) for column in heads)
        scalars, vectors = (Cells.join([getattr(p, group) for p in parts]) for group in ("scalars", "vectors"))
        return cls(first, last, time, count, scalars, vectors)
