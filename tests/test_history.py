"""History: what is written is read again, though the run lives or was killed, the disk was full or the file damaged."""

from __future__ import annotations

import json
import math
import random
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynguard import history_writer
from dynguard.actions import Action, Intervention
from dynguard.errors import RunDirectoryError
from dynguard.findings import (
    Evidence,
    Figure,
    Finding,
    Metrics,
    Names,
    Prescription,
    Record,
    RunEnd,
    RunStart,
    Section,
    Table,
)
from dynguard.history import History, HistoryWriter, create_run_directory

LONG = 60.0
NAN, INF = math.nan, math.inf


def fill(path: Path, records: list[Any], **options: Any) -> HistoryWriter:
    writer = HistoryWriter(path, **options)
    for record in records:
        writer.write(record)
    writer.close()
    return writer


def run_script(script: str, *args: str, **options: Any) -> subprocess.Popen[str]:
    head = """
    import os, signal, sys, time
    from pathlib import Path
    import numpy as np
    from dynguard.findings import *
    from dynguard.history import History, HistoryWriter
    """
    code = textwrap.dedent(head) + textwrap.dedent(script)
    return subprocess.Popen([sys.executable, "-c", code, *args], stdout=subprocess.PIPE, text=True, **options)


# -- the run directory


def test_a_run_gets_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = (create_run_directory(None, resume=False) for _ in range(2))
    assert first != second
    for made in (first, second):
        assert made.is_dir()
        assert made.is_absolute()
        assert made.parent == tmp_path / "dynguard-runs"
        assert re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{4}", made.name)


def test_a_directory_that_holds_a_run_is_refused_unless_it_is_resumed(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "run"
    assert create_run_directory(target, resume=False) == target
    (target / "notes.txt").write_text("the user's own")
    assert create_run_directory(target, resume=False) == target
    fill(target, [RunStart(run="r", time=1.0)])
    with pytest.raises(RunDirectoryError, match=r"already holds a run.*another run_dir.*resume=True"):
        create_run_directory(target, resume=False)
    assert create_run_directory(target, resume=True) == target
    assert create_run_directory(tmp_path / "new", resume=True) == tmp_path / "new"


def test_a_directory_that_holds_events_is_refused(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").touch()
    with pytest.raises(RunDirectoryError, match="already holds a run"):
        create_run_directory(tmp_path, resume=False)


@pytest.mark.parametrize("name", ["file", "file/below", "nul\0", "x" * 5000])
def test_an_unusable_directory_is_one_clear_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunDirectoryError, match="run_dir=") as caught:
        create_run_directory(tmp_path / name, resume=False)
    assert "Give a" in str(caught.value)


def test_a_directory_that_is_not_writable_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**options: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)  # root may write anywhere
    with pytest.raises(RunDirectoryError, match=r"can't write to run_dir=.*Permission denied"):
        create_run_directory(tmp_path, resume=False)


def test_resuming_needs_to_know_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunDirectoryError, match=r"give run_dir="):
        create_run_directory(None, resume=True)


# -- round trip

FINDING = Finding(
    kind="grad_spike",
    step=7,
    subject="fc.weight",
    rows=(3, 5),
    action=Action.SKIP,
    evidence=(
        Evidence(name="norm", value=INF, unit="1"),
        Evidence(name="ratio", value=NAN),
        Evidence(name="ok", value=True),
    ),
    confidence=0.9999,
    prescriptions=(Prescription(parameter="lr", current=0.1, proposed=-INF),),
)


def test_every_kind_of_record_comes_back(tmp_path: Path) -> None:
    start = RunStart(run="r", time=5.0, info={"torch": "2.4", "list": [1, 2.5, None, {"a": True}]})
    deed = Intervention(step=7, action=Action.SKIP, subject="fc.weight", detector="spike", reason="too large")
    section = Section(
        title="Costs",
        tables=(Table(columns=("a", "b"), rows=((1, NAN), ("x", None), (2.5, True))),),
        figures=(Figure(title="f", x=(0, 1), series={"s": (NAN, None), "t": (1.0, INF)}),),
        findings=(FINDING,),
    )
    end = RunEnd(run="r", time=9.0, steps=8, error="ValueError: x", overhead={"spike": NAN}, dropped={"json": 3})
    fill(tmp_path, [start, FINDING, deed, section, end])
    with History(tmp_path) as history:
        assert history.run == start
        assert repr(history.findings()) == repr([FINDING])  # NaN is not equal to itself
        assert history.interventions() == [deed]
        assert repr(history.sections()) == repr([section])
        assert repr(history.end) == repr(end)
        assert history.steps == 8
        assert history.problems == []


def test_metrics_come_back_as_they_were(tmp_path: Path) -> None:
    losses = [1.5, NAN, INF, -INF, 1e300, 0.1]
    norms = [np.array([step, NAN, INF if step == 2 else 3e38], np.float32) for step in range(6)]
    records: list[Record] = [Names("gradient_norm", ("a", "b", "c"), "adam")]
    records += [
        Metrics(step, {"loss": losses[step], "lr": 0.1}, {"gradient_norm": norms[step]}, "adam") for step in range(6)
    ]
    records += [Metrics(3, {"loss": 42.0}, time=77.5)]
    fill(tmp_path, records)
    with History(tmp_path / "history.sqlite") as history:
        steps, values = history.metrics("loss", "adam")
        np.testing.assert_array_equal(steps, range(6))
        np.testing.assert_array_equal(values, losses)
        curve = history.metrics("loss", "adam")
        np.testing.assert_array_equal(curve.low, losses)
        np.testing.assert_array_equal(curve.high, losses)
        np.testing.assert_array_equal(curve.nonfinite, [0, 1, 1, 1, 0, 0])
        steps, mean, high, names = history.vectors("gradient_norm", "adam")
        np.testing.assert_array_equal(steps, range(6))
        assert mean.dtype == high.dtype == np.float32
        np.testing.assert_array_equal(mean, norms)
        np.testing.assert_array_equal(high, norms)
        assert names == ("a", "b", "c")
        assert history.metrics("loss").times.tolist() == [77.5]
        assert history.sources == ("adam", "")
        assert history.scalars("adam") == ("loss", "lr")
        assert history.vector_names("adam") == ("gradient_norm",)
        assert len(history.metrics("nothing", "adam")) == len(history.metrics("loss", "nobody")) == 0
        assert history.vectors("nothing").mean.shape == (0, 0)
        assert history.steps == 6
        assert history.end is None


def test_names_that_come_later_and_vectors_that_grow(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path)
    for step in range(6):
        values = {"loss": 1.0} | ({"lr": 0.5} if step >= 3 else {})
        vectors = {"norm": np.arange(2 if step < 2 else 4, dtype=np.float32)}
        if step == 5:
            vectors["score"] = np.ones(1, np.float32)
        writer.write(Metrics(step, values, vectors))
        writer.flush()
    writer.write(Metrics(5, {"sharpness": 9.0}))  # a second record of the same step
    writer.close()
    with History(tmp_path) as history:
        assert history.metrics("lr").steps.tolist() == [3, 4, 5]
        steps, mean, _, names = history.vectors("norm")
        assert steps.tolist() == list(range(6))
        np.testing.assert_array_equal(mean[1], [0, 1, NAN, NAN])
        np.testing.assert_array_equal(mean[4], [0, 1, 2, 3])
        assert history.vectors("norm").nonfinite.sum() == 0  # what was not given is not a NaN that was
        assert names == ("[0]", "[1]", "[2]", "[3]")
        assert history.vectors("score").steps.tolist() == [5]
        assert history.metrics("sharpness").values.tolist() == [9.0]
        assert history.metrics("loss").values.tolist() == [1.0] * 6


names = st.text(st.characters(codec=None), max_size=12) | st.sampled_from(
    ["", "\ud800", "a\0b", "'; DROP TABLE record; --", '"', "\n\r\t\x1b[31m", "[bold]x[/]", "\U0001f9e8\u202e", "NaN"]
)
numbers = st.floats(allow_nan=True) | st.sampled_from([NAN, INF, -INF, 1e308, -1e308, 5e-324, -0.0])


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_hostile_names_and_values_come_back(data: st.DataObject) -> None:
    source, subject, vector = (data.draw(names) for _ in range(3))
    values = data.draw(st.dictionaries(names, numbers, max_size=4))
    entries = data.draw(st.lists(st.floats(width=32), max_size=5))
    labels = tuple(data.draw(names) for _ in entries)
    finding = Finding(
        kind="nan_grad", step=3, subject=subject, source=source, evidence=(Evidence(name=subject, value=1),)
    )
    array = np.array(entries, np.float32)
    with tempfile.TemporaryDirectory() as directory:
        fill(
            Path(directory),
            [
                finding,
                Names(vector, labels, source),
                Metrics(3, values, {vector: array}, source),
                Names(vector, ("no",), "x"),
            ],
        )
        with History(directory) as history:
            assert history.problems == []
            assert history.findings() == [finding]
            assert history.sources == (source,)
            assert set(history.scalars(source)) == set(values)
            for name, value in values.items():
                np.testing.assert_array_equal(history.metrics(name, source).values, [value])
            read = history.vectors(vector, source)
            assert read.names == labels
            np.testing.assert_array_equal(read.mean, array.reshape(1, -1) if len(array) else np.empty((0, 0)))


def test_nonsense_among_the_numbers_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    values: dict[Any, Any] = {"loss": 1, "word": "x", "none": None, 3: 4.0, "huge": 10**400}
    vectors: dict[str, Any] = {"ok": [1, 2], "words": ["a"], "ragged": [[1], [1, 2]], "wide": [1e300]}
    fill(tmp_path, [Metrics(0, values, vectors), Metrics(1, values, vectors)])
    with History(tmp_path) as history:
        assert history.scalars() == ("loss", "3")
        assert history.vector_names() == ("ok", "wide")
        assert history.vectors("wide").mean.tolist() == [[INF], [INF]]
    assert len([r for r in caplog.records if "'word'" in r.getMessage()]) == 1


def test_a_record_that_is_none_does_not_spoil_the_others(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path)
    writer.write(Metrics(0, {"loss": 1.0}))
    for nonsense in (Metrics(10**30, {}), object(), None, Metrics("x", {})):  # type: ignore[arg-type]  # on purpose
        with pytest.raises((TypeError, ValueError)):
            writer.write(nonsense)  # type: ignore[arg-type]  # on purpose
    writer.write(Finding(kind="grad_spike", step=10**30))
    writer.write(RunStart(run="r", time=NAN))
    writer.close()
    with History(tmp_path) as history:
        assert len(history.metrics("loss")) == 1
        assert history.findings()[0].step == 10**30
        assert writer.lost == 0


def test_a_plugin_that_invents_names_does_not_grow_the_file_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_writer, "MAX_SCALARS", 10)
    monkeypatch.setattr(history_writer, "MAX_VECTOR", 10)
    four, two = np.ones(4, np.float32), np.ones(2, np.float32)
    fill(tmp_path, [Metrics(s, {f"at step {s}": 1.0}, {f"v{s}": four, "v": two}) for s in range(50)])
    with History(tmp_path) as history:
        assert history.scalars() == tuple(f"at step {s}" for s in range(10))
        assert history.vector_names() == ("v0", "v", "v1")
        assert len(history.vectors("v")) == 50


# -- decimation


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
    for step in range(steps):
        writer.write(Metrics(step, {"loss": 1.0 / (step + 1)}, {"norm": norms * (1 + step % 7)}))
        if step % 20 == 0:
            writer.flush()
    writer.close()
    with History(path) as history:
        return (path / "history.sqlite").stat().st_size, len(history.metrics("loss"))


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


# -- resuming


def test_a_resumed_run_goes_on_and_goes_over_some_steps_again(tmp_path: Path) -> None:
    fill(
        tmp_path,
        [RunStart(run="r", time=1.0), *(Metrics(s, {"loss": 1.0}) for s in range(10)), RunEnd(run="r", time=2.0)],
    )
    with History(tmp_path) as history:
        assert history.end is not None
    again = [Metrics(s, {"loss": 2.0, "lr": 0.1}) for s in range(6, 15)]
    fill(tmp_path, [RunStart(run="r", time=3.0), *again])
    with History(tmp_path) as history:
        steps, losses = history.metrics("loss")
        assert steps.tolist() == list(range(15))
        assert losses.tolist() == [1.0] * 6 + [2.0] * 9
        assert history.metrics("lr").steps.tolist() == list(range(6, 15))
        assert history.end is None  # it lives again
        assert history.run == RunStart(run="r", time=3.0)


def test_a_run_resumed_in_the_middle_of_a_merge_keeps_every_step(tmp_path: Path) -> None:
    step = 0
    for keep in (50, 40, 30, 10):
        writer = HistoryWriter(tmp_path, keep=keep)
        for _ in range(137):
            writer.write(Metrics(step, {"loss": float(step)}))
            if step % 10 == 0:
                writer.flush()
            step += 1
        writer.close()
    with History(tmp_path) as history:
        curve = history.metrics("loss")
    assert len(curve) <= 12
    np.testing.assert_array_equal(curve.steps[1:], curve.last[:-1] + 1)
    assert (curve.steps[0], curve.last[-1]) == (0, 4 * 137 - 1)
    np.testing.assert_allclose(curve.values, (curve.steps + curve.last) / 2)


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    fill(tmp_path, [RunStart(run="r", time=1.0)])
    with sqlite3.connect(tmp_path / "history.sqlite") as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    for open_it in (History, HistoryWriter):
        with pytest.raises(RunDirectoryError, match=r"newer dynguard \(schema 99.*pip install -U"):
            open_it(tmp_path)


# -- other processes


def test_a_run_can_be_read_while_it_lives_and_after_it_was_killed(tmp_path: Path) -> None:
    script = """
        writer = HistoryWriter(Path(sys.argv[1]))
        writer.write(RunStart(run="alive", time=1.0))
        writer.write(Finding(kind="grad_spike", step=0))
        for step in range(10**9):
            now = time.time()
            writer.write(Metrics(step, {"loss": 1.0}, {"norm": np.ones(50, np.float32)}, time=now))
            print(step, now, flush=True)
            time.sleep(0.005)  # so slow that only the time can be what brings records out
    """
    run = run_script(script, str(tmp_path))
    assert run.stdout is not None
    try:
        seen: list[int] = []
        line = run.stdout.readline()
        while len(seen) < 3:  # three looks, each of which shows more than the one before
            with History(tmp_path) as history:
                found = len(history.metrics("loss"))
                if found > (seen[-1] if seen else 0):
                    seen.append(found)
                    assert history.vectors("norm").mean.sum() >= 50 * found
                    assert history.findings() == [Finding(kind="grad_spike", step=0)]
                    assert history.end is None
                    assert history.problems == []
            for _ in range(20):
                line = run.stdout.readline()
                assert line, "the writer died"
    finally:
        run.send_signal(signal.SIGKILL)
        rest = run.communicate(timeout=LONG)[0].splitlines()
    last_step, last_time = (rest[-1] if rest else line).split()
    with History(tmp_path) as history:
        steps, _ = history.metrics("loss")
        np.testing.assert_array_equal(steps, range(len(steps)))
        assert len(steps) <= int(last_step) + 2
        assert history.metrics("loss").times[-1] > float(last_time) - 1.0  # all but the last second
        assert history.run == RunStart(run="alive", time=1.0)
        assert history.problems == []


def test_a_forked_child_that_ends_does_no_harm(tmp_path: Path) -> None:
    script = """
        import gc
        writer = HistoryWriter(Path(sys.argv[1]))
        for step in range(300):
            writer.write(Metrics(step, {"loss": 1.0}))
            if step % 100 == 50:
                writer.flush()
                child = os.fork()
                if child == 0:
                    writer.write(Metrics(9999, {"loss": 1.0}))
                    writer.flush()
                    writer.close()
                    del writer
                    gc.collect()
                    sys.exit(0)
                assert os.waitpid(child, 0)[1] == 0
        writer.close()
    """
    run = run_script(script, str(tmp_path))
    run.communicate(timeout=LONG)
    assert run.returncode == 0
    with History(tmp_path) as history:
        assert history.metrics("loss").steps.tolist() == list(range(300))
        assert history.problems == []


def test_a_full_disk_costs_records_and_nothing_else(tmp_path: Path) -> None:
    script = """
        import logging, resource
        logging.disable()
        writer = HistoryWriter(Path(sys.argv[1]))
        def write(first, last):
            for step in range(first, last):
                values = {"loss": 1.0} | ({"lr": 0.1} if first else {})  # a new column while nothing can be written
                writer.write(Metrics(step, values, {"norm": np.ones(500, np.float32)}))
                if step % 100 == 0:
                    writer.flush()
        write(0, 200)
        writer.flush()
        assert not writer.problem
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
        write(200, 3000)
        assert writer.problem and writer.lost >= 500, (writer.problem, writer.lost)
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        write(3000, 3100)
        writer.flush()
        assert not writer.problem, writer.problem
        writer.close()
        print(writer.lost)
    """
    run = run_script(script, str(tmp_path))
    lost = int(run.communicate(timeout=LONG)[0])
    with History(tmp_path) as history:
        steps, _ = history.metrics("loss")
        assert len(steps) + lost == 3100
        assert history.metrics("lr").steps.tolist() == [step for step in steps if step >= 200]
        assert set(range(200)) < set(steps.tolist())
        assert set(range(2900, 3100)) < set(steps.tolist())  # the newest is what is kept while waiting
        assert history.lost == lost
        assert any(f"{lost} records were lost" in problem for problem in history.problems)


def test_what_can_not_be_written_by_the_end_is_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = HistoryWriter(tmp_path)
    writer.write(Metrics(0, {"loss": 1.0}))
    writer.flush()
    blocker = sqlite3.connect(tmp_path / "history.sqlite", isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    writer.write(Metrics(1, {"loss": 1.0}))
    writer.write(Finding(kind="grad_spike"))
    writer.close()
    blocker.close()
    assert writer.lost == 2
    assert "locked" in writer.problem
    assert "2 records lost" in caplog.text
    with History(tmp_path) as history:
        assert len(history.metrics("loss")) == 1


# -- damage


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("healthy")
    records: list[Any] = [RunStart(run="r", time=1.0), Names("norm", tuple(f"layer{i}" for i in range(100)))]
    records += [Metrics(s, {"loss": 1.0}, {"norm": np.full(100, s, np.float32)}) for s in range(600)]
    records += [Finding(kind="grad_spike", step=s, subject="x" * 300) for s in range(600)]
    fill(path, records)
    return (path / "history.sqlite").read_bytes()


def look(history: History) -> tuple[int, int]:
    """(findings, steps) that can be read; looks at all the rest as well."""
    _ = (
        history.run,
        history.end,
        history.steps,
        history.sources,
        history.lost,
        history.interventions(),
        history.sections(),
    )
    vectors = history.vectors("norm")
    assert len(vectors.names) == vectors.mean.shape[1] or not len(vectors)
    return len(history.findings()), len(history.metrics("loss"))


@pytest.mark.parametrize("seed", range(40))
def test_whatever_is_damaged_the_rest_is_read(healthy: bytes, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    content = bytearray(healthy)
    if seed % 2:
        del content[rng.randrange(len(content)) :]
    for _ in range(rng.choice([0, 1, 10])):
        at, length = rng.randrange(len(healthy)), rng.choice([1, 20, 5000])
        content[at : at + length] = rng.randbytes(length)[: max(0, len(content) - at)]
    (tmp_path / "history.sqlite").write_bytes(content)
    try:
        with History(tmp_path) as history:
            findings, steps = look(history)
            assert 0 <= findings <= 600
            assert 0 <= steps <= 600
            assert history.problems or (findings, steps) == (600, 600)
    except RunDirectoryError as error:
        if "newer dynguard" not in str(error):  # then the version itself was hit
            raise


def test_most_of_a_shortened_file_is_read(healthy: bytes, tmp_path: Path) -> None:
    (tmp_path / "history.sqlite").write_bytes(healthy[: len(healthy) * 6 // 10])
    with History(tmp_path) as history:
        findings, steps = look(history)
        assert findings + steps > 400
        assert history.run == RunStart(run="r", time=1.0)
        assert history.problems


def test_one_bad_page_costs_only_what_was_on_it(healthy: bytes, tmp_path: Path) -> None:
    content = bytearray(healthy)
    at = content.index(b'"step":300,"subject"') // 4096 * 4096  # in the middle of the findings
    content[at : at + 4096] = b"\xff" * 4096
    (tmp_path / "history.sqlite").write_bytes(content)
    with History(tmp_path) as history:
        findings, steps = look(history)
        assert 580 <= findings < 600
        assert steps == 600
        assert [f.step for f in history.findings()] == sorted({f.step for f in history.findings()})
        assert any("record" in problem for problem in history.problems)


@pytest.mark.parametrize("content", [b"", b"not a database at all" * 500, b"SQLite format 3\0" + bytes(5000)])
def test_a_file_that_is_no_history(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "history.sqlite").write_bytes(content)
    with History(tmp_path) as history:
        assert look(history) == (0, 0)
        assert history.problems
    if content:
        with pytest.raises(RunDirectoryError, match=r"can't write the history.*Give another run_dir"):
            HistoryWriter(tmp_path)


def test_where_there_is_no_run(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(RunDirectoryError, match="there is no run in"):
            History(path)


def test_the_file_is_plain_sql_and_strict_json(tmp_path: Path) -> None:
    fill(tmp_path, [FINDING, Metrics(0, {"loss": 2.0}, {"norm": np.array([3.0], np.float32)})])
    db = sqlite3.connect(tmp_path / "history.sqlite")
    text, kind = db.execute("SELECT json, json_extract(json, '$.kind') FROM record WHERE type = 'finding'").fetchone()
    loss, norm, high = db.execute("SELECT scalar_mean, vector_mean, vector_high FROM bucket").fetchone()
    db.close()

    def refuse(token: str) -> None:
        raise AssertionError(f"{token} is not JSON")

    assert json.loads(text, parse_constant=refuse)["evidence"][0]["value"] == "Infinity"
    assert kind == "grad_spike"
    assert np.frombuffer(loss, "<f8").tolist() == [2.0]
    assert np.frombuffer(norm, "<f4").tolist() == [3.0]
    assert high is None
