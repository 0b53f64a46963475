"""The sinks console, history, json and memory: what they show and keep, whatever names and numbers come."""

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
from dynguard.errors import OptionError, RunDirectoryError
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


# -- console


def shown(capsys: pytest.CaptureFixture[str], told: list[Record], directory: Path | None = None, **options: Any) -> str:
    feed(Console(**options), told, directory)
    out, err = capsys.readouterr()
    assert out == ""  # stdout is the user's
    return err


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


def test_on_a_terminal_a_finding_is_a_panel_with_all_that_is_known(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = shown(capsys, [SPIKE], tmp_path, force_terminal=True)
    assert "\x1b[" in text  # colour
    assert "╭" in text
    for fact in (
        "grad_spike",
        "error",
        "step 12",
        "encoder.0.weight",
        "5123",
        "1.25",
        "4099 x",
        "2.5",
        "skip",
        "0.9987",
    ):
        assert fact in text
    assert tmp_path.name in text.replace("\n", "")


def test_the_loss_of_the_step_is_shown_where_the_finding_does_not_tell_it(capsys: pytest.CaptureFixture[str]) -> None:
    bare = Finding(kind="grad_spike", step=3)
    assert "7.125" in shown(capsys, [Metrics(3, {"loss": 7.125}), bare], force_terminal=True)
    assert "7.125" not in shown(capsys, [Metrics(2, {"loss": 7.125}), bare], force_terminal=True)


def test_without_a_terminal_each_error_is_one_plain_line(capsys: pytest.CaptureFixture[str]) -> None:
    warning = SPIKE.model_copy(update={"severity": Severity.WARNING})
    told: list[Record] = [RunStart(run="r", time=0.0), Metrics(0, {"loss": 1.0}), warning, SPIKE, DEED]
    text = shown(capsys, told, log_every=1)
    assert "\x1b" not in text
    (line,) = text.splitlines()
    for fact in ("step 12", "error", "grad_spike", "encoder.0.weight", "5123", "4099", "skip"):
        assert fact in line


def test_what_is_less_severe_than_asked_for_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    told: list[Record] = [
        Finding(kind=f"kind_{severity.value}", severity=severity, subject=severity.value) for severity in Severity
    ]
    for terminal, least, expected in [
        (True, "info", {"info", "warning", "error", "critical"}),
        (True, "warning", {"warning", "error", "critical"}),
        (True, "critical", {"critical"}),
        (False, "info", {"error", "critical"}),
        (False, "critical", {"critical"}),
    ]:
        text = shown(capsys, told, force_terminal=terminal, min_severity=least)
        assert {severity.value for severity in Severity if f"kind_{severity.value}" in text} == expected


def test_repeats_are_folded_into_one_line_at_the_end(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    told = [SPIKE.model_copy(update={"step": step}) for step in range(57)]
    other = SPIKE.model_copy(update={"subject": "head.bias", "step": 99})
    lines = shown(capsys, [*told, other, DEED, DEED, END], tmp_path).splitlines()
    assert [line.split(":")[1].strip() for line in lines[:4]] == ["step 0", "step 1", "step 2", "step 99"]
    summary = "\n".join(lines[4:])
    assert "58 findings in 40 steps" in summary
    assert "grad_spike 58x" in summary
    assert "skip 2x" in summary
    assert "encoder.0.weight: 57 times" in summary
    assert "head.bias" not in summary
    assert str(tmp_path) in summary


def test_where_nothing_was_found_nothing_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    quiet: list[Record] = [RunStart(run="r", time=0.0), Metrics(0, {"loss": 1.0}), Section(title="Costs"), END]
    assert shown(capsys, quiet, tmp_path) == ""
    assert shown(capsys, quiet, tmp_path, force_terminal=True) == ""


def test_records_that_did_not_arrive_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    end = END.model_copy(update={"dropped": {"wandb": 120, "json": 0}})
    text = shown(capsys, [SPIKE, end])
    assert "wandb 120" in text
    assert "json" not in text


def test_a_line_of_metrics_every_so_many_steps(capsys: pytest.CaptureFixture[str]) -> None:
    told: list[Record] = [Metrics(step, {"loss": float(step)}) for step in range(25)]
    lines = shown(capsys, told, log_every=10, force_terminal=True).splitlines()
    assert ["step 0 " in lines[0], "step 10 " in lines[1], "step 20 " in lines[2], len(lines)] == [True, True, True, 3]
    assert "loss 20" in lines[2]
    assert shown(capsys, told, force_terminal=True) == ""


def test_names_can_not_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = SPIKE.model_copy(update={"subject": "[red]x[/red]:smile: \x1b[2J\r\n\x07\u202e\ud800"})
    for terminal in (True, False):
        text = shown(capsys, [hostile], force_terminal=terminal)
        assert "[red]x[/red]:smile: \\x1b[2J\\r\\n\\x07\\u202e\\ud800" in text
        assert "\x1b[2J" not in text
        assert "\x07" not in text


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_strict_stream_gets_only_what_it_can_hold(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for terminal in (True, False):
        raw = io.BytesIO()
        monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(raw, encoding=encoding, errors="strict"))
        feed(Console(force_terminal=terminal), [SPIKE.model_copy(update={"subject": "层.\U0001f9e8.é"}), END])
        sys.stderr.flush()
        text = raw.getvalue().decode(encoding)
        assert ("层" if encoding == "utf-8" else "\\u5c42") in text


def test_a_process_without_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    for terminal in (True, False, None):
        feed(Console(force_terminal=terminal), [SPIKE, END])


# -- json


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


def test_every_record_is_a_line_of_strict_json(tmp_path: Path) -> None:
    told: list[Record] = [
        RunStart(run="r", time=1.0, info={"torch": "2.4"}),
        Names("gradient_norm", ("a",)),
        Metrics(0, {"loss": NAN, "lr": -INF}, {"gradient_norm": np.array([INF], np.float32)}, time=2.0),
        SPIKE,
        DEED,
        Section(title="s", tables=(Table(columns=("a",), rows=((INF,),)),)),
        END,
    ]
    feed(JsonSink(vectors=True), told, tmp_path)
    read = lines(tmp_path)
    assert [line["type"] for line in read] == [
        *("run_start", "names", "metrics", "finding", "intervention", "section", "run_end")
    ]
    assert read[2]["values"] == {"loss": "NaN", "lr": "-Infinity"}
    assert read[2]["vectors"] == {"gradient_norm": ["Infinity"]}
    assert read[3]["severity"] == "error"
    assert read[3]["action"] == "skip"
    assert [repr(records.decode(line)) for line in read] == [repr(record) for record in told]


def test_metrics_and_vectors_are_a_choice(tmp_path: Path) -> None:
    told: list[Record] = [Metrics(0, {"loss": 1.0}, {"gradient_norm": np.ones(3, np.float32)}), SPIKE]
    feed(JsonSink(), told, tmp_path / "a")
    assert (lines(tmp_path / "a")[0]["values"], lines(tmp_path / "a")[0]["vectors"]) == ({"loss": 1.0}, {})
    feed(JsonSink(metrics=False), told, tmp_path / "b")
    assert [line["type"] for line in lines(tmp_path / "b")] == ["finding"]


def step_metrics(step: int, **vectors: list[float]) -> Metrics:
    arrays = {name: np.array(values, np.float32) for name, values in vectors.items()}
    return Metrics(step, {"loss": 2.25}, arrays)


LAYERS = Names("gradient_norm", ("stem", "head.weight"))
NAN_GRAD = Finding(kind="nan_grad", severity=Severity.CRITICAL, step=4, subject="head.weight", action=Action.SKIP)


@pytest.mark.parametrize("order", ["metrics first", "finding first", "a step late", "flush between"])
def test_a_spike_has_a_file_with_the_norms_of_its_step(tmp_path: Path, order: str) -> None:
    metrics = step_metrics(4, gradient_norm=[0.1, NAN], gradient_baseline=[0.25, 0.5])
    told: dict[str, list[Record]] = {
        "metrics first": [metrics, NAN_GRAD],
        "finding first": [NAN_GRAD, metrics],
        "a step late": [metrics, step_metrics(5, gradient_norm=[9.0, 9.0]), NAN_GRAD],
        "flush between": [NAN_GRAD, metrics],
    }
    sink = JsonSink()
    before = step_metrics(3, gradient_norm=[7.0, 7.0])
    feed(sink, [LAYERS, before, *told[order][: 1 if "flush" in order else None]], tmp_path, end=False)
    if order == "flush between":
        sink.flush(1.0)
        (early,) = spikes(tmp_path).values()
        assert (early["layer"], early["layer_norms"]) == ("head.weight", {})
        sink.write(metrics)
    sink.close(1.0)
    (name, spike), *others = spikes(tmp_path).items()
    assert others == []
    assert name == "step-4-nan_grad.json"
    expected = {
        "run": "r",
        "step": 4,
        "kind": "nan_grad",
        "layer": "head.weight",
        "ratio": "NaN",
        "severity": "critical",
        "action": "skip",
        "loss": 2.25,
        "layer_norms": {"stem": 0.1, "head.weight": "NaN"},
        "baselines": {"stem": 0.25, "head.weight": 0.5},
        "nonfinite_layers": ["head.weight"],
    }
    assert {key: spike[key] for key in expected} == expected
    assert records.decode(spike["finding"]) == NAN_GRAD


def test_the_evidence_of_a_spike_goes_before_what_the_metrics_say(tmp_path: Path) -> None:
    metrics = Metrics(12, {"loss": 99.0}, {"gradient_norm": np.ones(1, np.float32)})
    feed(JsonSink(), [Names("gradient_norm", ("encoder.0.weight",)), metrics, SPIKE], tmp_path)
    (spike,) = spikes(tmp_path).values()
    assert (spike["ratio"], spike["loss"], spike["baselines"]) == (4098.765, 2.5, {})


def test_a_spike_without_metrics_still_has_its_file(tmp_path: Path) -> None:
    sink = JsonSink()
    feed(sink, [NAN_GRAD], tmp_path, end=False)
    sink.close(1.0)
    (spike,) = spikes(tmp_path).values()
    assert (spike["loss"], spike["layer_norms"], spike["ratio"]) == (None, {}, None)


def test_spike_files_never_overwrite_each_other(tmp_path: Path) -> None:
    told: list[Record] = [NAN_GRAD.model_copy(update={"subject": f"../{i}/\0"}) for i in range(3)]
    for _ in range(2):  # and not those of the run that is resumed
        feed(JsonSink(), told, tmp_path)
    assert len(spikes(tmp_path)) == 6
    assert {spike["layer"] for spike in spikes(tmp_path).values()} == {f"../{i}/\0" for i in range(3)}


def test_only_spikes_have_files_and_not_without_end(tmp_path: Path) -> None:
    slow: list[Record] = [Finding(kind="dead_rows", step=1)]
    feed(JsonSink(max_spikes=5), [*slow, *(NAN_GRAD.model_copy(update={"step": s}) for s in range(400))], tmp_path)
    assert len(spikes(tmp_path)) == 5
    assert len(lines(tmp_path)) == 401


def test_spikes_of_several_sources_are_told_apart(tmp_path: Path) -> None:
    told: list[Record] = []
    for source in ("gen", "disc"):
        told.append(Names("gradient_norm", (f"{source}.w",), source))
        told.append(NAN_GRAD.model_copy(update={"source": source, "subject": f"{source}.w"}))
    for source, norm in (("disc", 2.0), ("gen", 1.0)):
        told.append(Metrics(4, {}, {"gradient_norm": np.array([norm], np.float32)}, source))
    feed(JsonSink(), told, tmp_path)
    norms = {spike["layer"]: spike["layer_norms"] for spike in spikes(tmp_path).values()}
    assert norms == {"disc.w": {"disc.w": 2.0}, "gen.w": {"gen.w": 1.0}}


def test_a_resumed_run_appends_after_a_torn_line(tmp_path: Path) -> None:
    feed(JsonSink(), [RunStart(run="r", time=1.0)], tmp_path)
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"type":"metr')
    feed(JsonSink(), [RunStart(run="r", time=2.0)], tmp_path)
    first, torn, last = (tmp_path / "events.jsonl").read_text().splitlines()
    assert json.loads(first)["time"] == 1.0
    assert torn == '{"type":"metr'
    assert json.loads(last)["time"] == 2.0


def test_where_json_writes(tmp_path: Path) -> None:
    feed(JsonSink(), [SPIKE])  # no run directory: nowhere
    feed(JsonSink(directory=tmp_path / "here"), [SPIKE], tmp_path / "there")
    assert lines(tmp_path / "here")
    assert not (tmp_path / "there").exists()
    assert JsonSink().needs_directory
    assert not JsonSink(directory=tmp_path).needs_directory
    (tmp_path / "file").touch()
    with pytest.raises(RunDirectoryError, match="json: can't write to"):
        feed(JsonSink(directory=tmp_path / "file"), [])


# -- history, memory, options


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
