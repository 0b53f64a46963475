"""Decimation: a long run stays small, and what stood out in it still does."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dynguard.decimation import Cells
from dynguard.findings import (
    Metrics,
)
from dynguard.history import History, HistoryWriter

NAN, INF = math.nan, math.inf


def fill(path: Path, records: list[Any], **options: Any) -> HistoryWriter:
    writer = HistoryWriter(path, **options)
    for record in records:
        writer.write(record)
    writer.close()
    return writer


def by_hand(values: np.ndarray[Any, Any], first: int, last: int) -> tuple[float, float, float, int]:
    part = [float(v) for v in values[first : last + 1]]
    good = [v for v in part if math.isfinite(v)]
    bad = [v for v in part if not math.isfinite(v)]
    mean = math.fsum(v / len(good) for v in good) if good else sum(bad)
    spoilt = any(math.isnan(v) for v in part)
    return mean, NAN if spoilt else min(part), NAN if spoilt else max(part), len(bad)


@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(st.floats(-1e6, 1e6, width=32) | st.sampled_from([NAN, INF, -INF]), min_size=1, max_size=200),
    keep=st.integers(2, 20),
    every=st.integers(1, 60),
)
def test_buckets_hold_what_their_steps_held(values: list[float], keep: int, every: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        writer = HistoryWriter(Path(directory), keep=keep)
        for step, value in enumerate(values):
            writer.write(Metrics(step, {"loss": value}, {"norm": np.array([1.0, value], np.float32)}))
            if step % every == 0:
                writer.flush()
        writer.close()
        array = np.array(values)
        with History(directory) as history:
            curve, vectors = history.metrics("loss"), history.vectors("norm")
        assert len(curve) <= keep + keep // 4
        widths = (curve.last - curve.steps + 1)[:-1]
        assert len(set(widths.tolist())) <= 2  # one pass of merging at a time, so that no stretch is much coarser
        assert curve.steps[0] == 0
        assert curve.last[-1] == len(values) - 1
        np.testing.assert_array_equal(curve.steps[1:], curve.last[:-1] + 1)  # no step is left out or counted twice
        for i in range(len(curve)):
            mean, low, high, bad = by_hand(array, int(curve.steps[i]), int(curve.last[i]))
            np.testing.assert_allclose(curve.values[i], mean, rtol=1e-12, atol=1e-9)
            np.testing.assert_array_equal([curve.low[i], curve.high[i]], [low, high])
            np.testing.assert_allclose(vectors.mean[i], [1.0, mean], rtol=1e-5, atol=1.0)
            np.testing.assert_array_equal(vectors.high[i], [1.0, high])
            assert vectors.nonfinite[i].tolist() == [0, bad]
            assert curve.nonfinite[i] == bad


def test_extremes_survive_and_huge_values_do_not_overflow(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    norms = rng.lognormal(size=(3000, 5)).astype(np.float32)
    norms[1234, 3], norms[77, 0], norms[2001, 1] = 3e38, INF, NAN
    records = [Metrics(s, {"loss": 1.7e308 if s == 500 else 1.6e308}, {"norm": norms[s]}) for s in range(3000)]
    fill(tmp_path, records, keep=30)
    with History(tmp_path) as history:
        vectors, curve = history.vectors("norm"), history.metrics("loss")
    assert len(vectors) <= 37
    at = int(np.searchsorted(vectors.steps, 1234, side="right")) - 1
    assert vectors.steps[at] <= 1234 <= vectors.last[at]
    assert vectors.high[at, 3] == np.float32(3e38)
    assert np.isposinf(vectors.high[:, 0]).sum() == np.isnan(vectors.high[:, 1]).sum() == 1
    assert vectors.nonfinite.sum(axis=0).tolist() == [1, 1, 0, 0, 0]
    np.testing.assert_array_equal(np.fmax.reduce(vectors.high[:, [2, 4]]), norms[:, [2, 4]].max(axis=0))
    assert np.isfinite(vectors.mean).all()
    assert curve.high.max() == 1.7e308
    assert np.isfinite(curve.values).all()


def size_after(path: Path, steps: int, **options: Any) -> tuple[int, int]:
    """(bytes, buckets) of a run of so many steps with 500 layers."""
    path.mkdir()
    norms = np.random.default_rng(0).lognormal(size=500).astype(np.float32)
    writer = HistoryWriter(path, **options)
    for step in range(1, steps + 1):  # an odd beginning: no block of rows fits the pairs that are merged
        writer.write(Metrics(step, {"loss": 1.0 / (step + 1)}, {"norm": norms * (1 + step % 7)}))
        if step % 20 == 0:
            writer.flush()
    writer.close()
    with History(path) as history:
        curve = history.metrics("loss")
    assert (curve.last - curve.steps + 1).sum() == steps
    inner = (curve.last - curve.steps + 1)[1:-1]
    assert len(set(inner.tolist())) <= 2  # merged evenly, one pass after the other,
    assert np.count_nonzero(np.diff(inner)) <= 2  # each of which leaves nothing out
    return (path / "history.sqlite").stat().st_size, len(curve)


def test_the_file_does_not_grow_with_the_steps(tmp_path: Path) -> None:
    size, buckets = size_after(tmp_path / "a", 1_000, keep=200)
    assert 100 <= buckets <= 250
    longer, buckets = size_after(tmp_path / "b", 8_000, keep=200)
    assert 100 <= buckets <= 250
    assert longer < 1.5 * size
    # By that law 1e6 steps of 500 layers, with the 20,000 buckets that are kept by default, are this large:
    assert longer / 200 * 20_000 < 0.15e9


def test_a_wide_model_keeps_fewer_buckets(tmp_path: Path) -> None:
    _, buckets = size_after(tmp_path / "a", 1_000, max_bytes=1_000_000)
    assert 64 <= buckets <= 1_000_000 / 4_000 * 1.25


@settings(deadline=None)
@given(st.lists(st.floats(-1e308, 1e308), min_size=1, max_size=9))
def test_a_mean_lies_between_the_extremes(values: list[float]) -> None:
    column = np.array(values).reshape(-1, 1)
    merged = Cells.of(column, np.ones(column.shape, bool)).merge(np.array([0]))
    assert merged.low[0, 0] <= merged.mean[0, 0] <= merged.high[0, 0]


def test_equal_values_keep_their_mean() -> None:
    column = np.full((3, 1), 0.1)  # three times a third of it is not 0.1
    for count in range(1, 12):
        column = np.full((count, 1), 0.1)
        assert Cells.of(column, np.ones(column.shape, bool)).merge(np.array([0])).mean.tolist() == [[0.1]]
