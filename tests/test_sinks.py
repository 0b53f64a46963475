"""The sinks history and memory, options of all, and whatever names and numbers may come."""

from __future__ import annotations

import io
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynguard import records
from dynguard.actions import Action, Intervention
from dynguard.errors import OptionError
from dynguard.events import RunInfo
from dynguard.findings import Evidence, Finding, Metrics, Names, Record, RunEnd, RunStart, Section, Severity, Table
from dynguard.history import History
from dynguard_plugins.sinks.console import Console
from dynguard_plugins.sinks.history import HistorySink
from dynguard_plugins.sinks.json import JsonSink
from dynguard_plugins.sinks.memory import Memory

NAN, INF = math.nan, math.inf
SPIKE = Finding(
    kind="grad_spike",
    severity=Severity.ERROR,
    step=12,
    subject="encoder.0.weight",
    action=Action.SKIP,
    evidence=(
        Evidence(name="norm", value=5123.456789),
        Evidence(name="baseline", value=1.25),
        Evidence(name="ratio", value=4098.765, unit="x"),
        Evidence(name="loss", value=2.5),
    ),
    premise="the gradient norm left its baseline",
    implies="one step would undo many",
    confidence=0.9987,
)
DEED = Intervention(step=12, action=Action.SKIP, subject="encoder.0.weight", detector="spike")
END = RunEnd(run="r", time=9.0, steps=40, overhead={"spike": 0.1}, dropped={"console": 0})


def feed(sink: Any, told: list[Record], directory: Path | None = None, *, end: bool = True) -> None:
    """A run as a sink sees it."""
    if hasattr(sink, "on_run_start"):
        sink.on_run_start(RunInfo(run="r", directory=directory))
    for record in told:
        sink.write(record)
    if end:
        for hook in ("flush", "close"):
            if hasattr(sink, hook):
                getattr(sink, hook)(1.0)


def no_constant(token: str) -> None:
    raise AssertionError(f"{token} is not JSON")


def lines(directory: Path) -> list[dict[str, Any]]:
    text = (directory / "events.jsonl").read_text(encoding="utf-8")
    return [json.loads(line, parse_constant=no_constant) for line in text.splitlines()]


def spikes(directory: Path) -> dict[str, dict[str, Any]]:
    return {
        path.name: json.loads(path.read_text(encoding="utf-8"), parse_constant=no_constant)
        for path in sorted((directory / "spikes").glob("*"))
    }


def test_the_history_sink_keeps_the_run(tmp_path: Path) -> None:
    told: list[Record] = [
        RunStart(run="r", time=1.0),
        *(Metrics(s, {"loss": float(s)}) for s in range(100)),
        SPIKE,
        DEED,
        END,
    ]
    feed(HistorySink(keep=10), told, tmp_path)
    with History(tmp_path) as history:
        assert (history.findings(), history.interventions(), history.end) == ([SPIKE], [DEED], END)
        assert 5 <= len(history.metrics("loss")) <= 12
        assert history.metrics("loss").high.max() == 99.0


def test_the_history_sink_brings_out_what_it_has_with_a_flush(tmp_path: Path) -> None:
    sink = HistorySink()
    feed(sink, [SPIKE], tmp_path, end=False)
    sink.flush(1.0)
    with History(tmp_path) as history:
        assert history.findings() == [SPIKE]
    sink.close(1.0)


def test_the_history_sink_says_what_was_lost(tmp_path: Path) -> None:
    sink = HistorySink()
    feed(sink, [SPIKE], tmp_path, end=False)
    assert sink.writer is not None
    sink.writer.lost = 17
    with pytest.raises(OSError, match="17 records did not reach"):
        sink.close(1.0)
    with History(tmp_path) as history:
        assert history.lost == 17


def test_without_a_run_directory_there_is_no_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    feed(HistorySink(), [SPIKE])
    assert list(tmp_path.iterdir()) == []


def test_memory_keeps_everything_in_order() -> None:
    metrics, named, section = Metrics(0, {}), Names("v", ()), Section(title="s")
    start = RunStart(run="r", time=0.0)
    told: list[Record] = [start, named, metrics, SPIKE, DEED, section, END]
    sink = Memory()
    feed(sink, told)
    assert sink.records == told
    assert (sink.metrics, sink.names, sink.findings) == ([metrics], [named], [SPIKE])
    assert (sink.interventions, sink.sections, sink.start, sink.end) == ([DEED], [section], start, END)
    assert (sink.flushes, sink.closed) == (1, True)
    assert sink.run == RunInfo(run="r")


@pytest.mark.parametrize(
    ("plugin", "options"),
    [
        (Console, {"min_severity": "loud"}),
        (Console, {"log_every": -1}),
        (Console, {"colour": True}),
        (JsonSink, {"directory": 3}),
        (JsonSink, {"max_spikes": -1}),
        (HistorySink, {"keep": 1}),
        (Memory, {"size": 3}),
    ],
)
def test_wrong_options_are_refused_by_name(plugin: Any, options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=rf"'{plugin.__name__}'.*{next(iter(options))}"):
        plugin(**options)


# -- whatever comes

words = st.text(st.characters(codec=None), max_size=10) | st.sampled_from(
    [
        "\ud800",
        "a\0b",
        '"\n\r\t',
        "[bold]x[/bold]",
        "[/]",
        ":smile:",
        "\x1b]0;title\x07",
        "\U0001f9e8",
        "\u202egnp",
        "é" * 900,
    ]
)
scalars = st.none() | st.booleans() | st.integers() | st.sampled_from([10**400, -(10**20)]) | st.floats() | words


@st.composite
def any_record(draw: st.DrawFn) -> Record:
    step, source, subject = draw(st.integers(0, 3)), draw(words), draw(words)
    match draw(st.sampled_from(["finding", "metrics", "names", "intervention", "section"])):
        case "finding":
            evidence = [
                Evidence(name=draw(words), value=draw(scalars), unit=draw(words))
                for _ in range(draw(st.integers(0, 3)))
            ]
            evidence += [Evidence(name="ratio", value=draw(scalars))] if draw(st.booleans()) else []
            return Finding(
                kind=draw(st.sampled_from(["nan_grad", "dead_rows"])),
                severity=draw(st.sampled_from(Severity)),
                step=step,
                source=source,
                subject=subject,
                premise=draw(words),
                evidence=tuple(evidence),
            )
        case "metrics":
            entries = np.array(draw(st.lists(st.floats(width=32), max_size=3)), np.float32)
            return Metrics(
                step, draw(st.dictionaries(words, st.floats(), max_size=3)), {"gradient_norm": entries}, source, 1.0
            )
        case "names":
            return Names("gradient_norm", tuple(draw(st.lists(words, max_size=3))), source)
        case "intervention":
            return Intervention(step=step, action=Action.SKIP, subject=subject, reason=draw(words), source=source)
    return Section(title=subject, text=draw(words), tables=(Table(columns=(source,), rows=((draw(scalars),),)),))


def spelt(record: Record) -> str:
    """repr, of which the numbers that JSON spells as words are equal to these words."""
    text = repr(record)
    for word, number in (("'NaN'", "nan"), ("'Infinity'", "inf"), ("'-Infinity'", "-inf")):
        text = text.replace(word, number)
    return text


@settings(max_examples=50, deadline=None)
@given(told=st.lists(any_record(), max_size=8))
def test_nothing_that_can_be_told_is_too_much(told: list[Record]) -> None:
    saved, sys.stderr = sys.stderr, io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="strict")
    try:
        for terminal in (True, False):
            feed(Console(force_terminal=terminal, min_severity=Severity.INFO, log_every=1), [*told, END])
    finally:
        sys.stderr = saved
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        feed(JsonSink(vectors=True), told, directory)
        assert [spelt(records.decode(line)) for line in lines(directory)] == [spelt(record) for record in told]
        assert len(spikes(directory)) == sum(isinstance(r, Finding) and r.kind == "nan_grad" for r in told)
        feed(HistorySink(), told, directory)
        with History(directory) as history:
            assert history.problems == []
            read: dict[type, list[Any]] = {
                Finding: history.findings(),
                Intervention: history.interventions(),
                Section: history.sections(),
            }
        for kind, kept in read.items():
            assert [spelt(record) for record in kept] == [spelt(r) for r in told if isinstance(r, kind)]
