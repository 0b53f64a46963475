"""The console sink: what it shows, where, and what it keeps from the terminal."""

from __future__ import annotations

import io
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from dynguard.actions import Action, Intervention
from dynguard.events import RunInfo
from dynguard.findings import Evidence, Finding, Metrics, Record, RunEnd, RunStart, Section, Severity
from dynguard_plugins.sinks.console import Console

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
