"""The json sink: lines of strict JSON and a file per spike."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynguard import records
from dynguard.actions import Action, Intervention
from dynguard.errors import RunDirectoryError
from dynguard.events import RunInfo
from dynguard.findings import Evidence, Finding, Metrics, Names, Record, RunEnd, RunStart, Section, Severity, Table
from dynguard_plugins.sinks.json import JsonSink

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


@pytest.mark.parametrize("order", ["metrics first", "finding first", "a step late", "flush between", "in two parts"])
def test_a_spike_has_a_file_with_the_norms_of_its_step(tmp_path: Path, order: str) -> None:
    metrics = step_metrics(4, gradient_norm=[0.1, NAN], gradient_baseline=[0.25, 0.5])
    told: dict[str, list[Record]] = {
        "metrics first": [metrics, NAN_GRAD],
        "finding first": [NAN_GRAD, metrics],
        "a step late": [metrics, step_metrics(5, gradient_norm=[9.0, 9.0]), NAN_GRAD],
        "flush between": [NAN_GRAD, metrics],
        "in two parts": [Metrics(4, metrics.values), NAN_GRAD, Metrics(4, {}, metrics.vectors)],
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


def test_a_spike_of_the_loss_alone_does_not_wait_for_ever(tmp_path: Path) -> None:
    sink = JsonSink()
    spike = Finding(kind="loss_spike", step=4)
    feed(sink, [spike, Metrics(4, {"loss": 8.0}), Metrics(5, {"loss": 2.0})], tmp_path, end=False)
    assert [found["loss"] for found in spikes(tmp_path).values()] == [8.0]
    sink.close(1.0)


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
