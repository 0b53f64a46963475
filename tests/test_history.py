"""The run directory and its history: what is written is what is read."""

from __future__ import annotations

import json
import math
import re
import sqlite3
import tempfile
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

NAN, INF = math.nan, math.inf


def fill(path: Path, records: list[Any], **options: Any) -> HistoryWriter:
    writer = HistoryWriter(path, **options)
    for record in records:
        writer.write(record)
    writer.close()
    return writer


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


# -- the file


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
