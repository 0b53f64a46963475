"""The ``json`` sink: ``events.jsonl``, strict JSON line by line, and one file per spike."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TextIO

import numpy as np
from pydantic import Field

from dynguard import records
from dynguard.errors import RunDirectoryError
from dynguard.events import RunInfo
from dynguard.findings import Finding, Metrics, Names, Record
from dynguard.hookspecs import hookimpl
from dynguard.options import validated

SPIKES = frozenset(
    (
        *("grad_spike", "loss_spike", "update_spike", "nan_grad", "inf_grad", "nan_loss", "inf_loss", "empty_batch"),
        *("nonfinite_param", "nan_forward", "nan_input", "nan_buffer"),
    )
)
_NORM, _BASELINE = "gradient_norm", "gradient_baseline"  # vectors of Metrics
_HELD = 256  # spikes that wait for the metrics of their step, at most
_RECENT = 4  # steps of a source whose metrics are remembered: reads="deferred" tells of a spike a step late


@dataclass(slots=True)
class _Held:
    finding: Finding
    path: Path | None = None  # once written, with what was known then
    metrics: Metrics | None = None


class JsonSink:
    """Writes ``events.jsonl``, one strict JSON object per line, and ``spikes/step-<step>-<kind>.json`` for each spike.

    Non-finite numbers are the strings "NaN", "Infinity" and "-Infinity".

    Args:
        directory: where to write; by default the run directory.
        metrics: whether the metrics of every step are written as well.
        vectors: whether these lines hold the vectors (one norm per layer and step): large.
        max_spikes: how many spike files are written at most; events.jsonl holds the findings all the same.
    """

    @validated
    def __init__(
        self,
        *,
        directory: Path | None = None,
        metrics: bool = True,
        vectors: bool = False,
        max_spikes: Annotated[int, Field(ge=0)] = 1000,
    ) -> None:
        self.directory = directory
        self.metrics = metrics
        self.vectors = vectors
        self.max_spikes = max_spikes
        self._events: TextIO | None = None
        self._spikes = Path()
        self._run = ""
        self._written = 0
        self._names: dict[tuple[str, str], tuple[str, ...]] = {}
        self._recent: dict[str, dict[int, Metrics]] = {}
        self._held: list[_Held] = []

    @property
    def needs_directory(self) -> bool:
        """Whether the run needs a directory for this sink's sake."""
        return self.directory is None

    @hookimpl
    def on_run_start(self, run: RunInfo) -> None:
        """Open ``events.jsonl`` to append; without a directory nothing is written."""
        directory = self.directory or run.directory
        if directory is None:
            return
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._events = _open_lines(directory / "events.jsonl")
        except OSError as error:
            raise RunDirectoryError(
                f"json: can't write to {str(directory)!r}: {error}. Give another directory="
            ) from error
        self._spikes = directory / "spikes"
        self._run = run.run

    @hookimpl
    def write(self, record: Record) -> None:
        """Write a record as one line."""
        if self._events is None:
            return
        if isinstance(record, Names):
            self._names[record.source, record.vector] = record.names
        if isinstance(record, Metrics):
            self._meet(record)
        elif isinstance(record, Finding) and record.kind in SPIKES:
            self._spike(record)
        if self.metrics or not isinstance(record, Metrics):
            self._events.write(self._line(record))

    @hookimpl
    def flush(self, timeout: float) -> None:
        """Bring out the lines, and the spikes that still wait for the metrics of their step."""
        if self._events is not None:
            self._events.flush()
            for held in self._held:
                self._save(held)

    @hookimpl
    def close(self, timeout: float) -> None:
        """Flush and let go of the file."""
        if self._events is not None:
            try:
                self.flush(timeout)
            finally:
                self._events.close()
                self._events = None

    def _line(self, record: Record) -> str:
        if isinstance(record, Metrics) and not self.vectors:
            record = Metrics(record.step, record.values, {}, record.source, record.time)
        return records.dumps(record) + "\n"

    def _spike(self, finding: Finding) -> None:
        """A finding comes before or after the metrics of its step; it waits for them, but is on disk with any flush."""
        if self._written + sum(held.path is None for held in self._held) >= self.max_spikes:
            return
        held = _Held(finding)
        if self._known(finding)[1]:
            self._save(held)
            return
        self._held.append(held)
        if len(self._held) > _HELD:
            self._save(self._held.pop(0))

    def _meet(self, metrics: Metrics) -> None:
        recent = self._recent.setdefault(metrics.source, {})
        if (part := recent.get(metrics.step)) is not None:  # the numbers of a step may come in several records
            values, vectors = {**part.values, **metrics.values}, {**part.vectors, **metrics.vectors}
            metrics = Metrics(metrics.step, values, vectors, metrics.source, metrics.time)
        recent[metrics.step] = metrics
        while len(recent) > _RECENT:
            del recent[next(iter(recent))]
        waiting, self._held = self._held, []
        for held in waiting:
            if held.finding.source == metrics.source and self._known(held.finding)[1]:
                self._save(held)
            else:
                self._held.append(held)

    def _known(self, finding: Finding) -> tuple[Metrics | None, bool]:
        """The metrics of a finding's step, and whether nothing more is to come."""
        recent = self._recent.get(finding.source, {})
        metrics = recent.get(finding.step)
        return metrics, (metrics is not None and _NORM in metrics.vectors) or any(
            step > finding.step for step in recent
        )

    def _save(self, held: _Held) -> None:
        metrics, _ = self._known(held.finding)
        if held.path is not None and (metrics is None or held.metrics is metrics):
            return  # there already, with all that is known
        self._spikes.mkdir(parents=True, exist_ok=True)
        self._written += held.path is None
        held.metrics = metrics
        held.path = held.path or _unused(self._spikes, f"step-{held.finding.step}-{held.finding.kind}")
        draft = held.path.with_suffix(".part")
        draft.write_text(records.write_json(self._describe(held.finding, metrics)) + "\n", encoding="ascii")
        draft.replace(held.path)

    def _describe(self, finding: Finding, metrics: Metrics | None) -> dict[str, Any]:
        evidence = {item.name: item.value for item in finding.evidence}
        norms = self._by_layer(finding.source, metrics, _NORM)
        baselines = self._by_layer(finding.source, metrics, _BASELINE)
        loss = evidence.get("loss", metrics.values.get("loss") if metrics else None)
        whole = records.encode(finding)
        spike = {
            "run": self._run,
            "step": finding.step,
            "layer": finding.subject,
            "kind": finding.kind,
            "ratio": evidence.get("ratio", _ratio(norms.get(finding.subject), baselines.get(finding.subject))),
            "severity": finding.severity,
            "action": finding.action,
            "loss": loss,
            "layer_norms": norms,
            "baselines": baselines,
            "nonfinite_layers": [name for name, norm in norms.items() if isinstance(norm, str)],
            "finding": whole,
        }
        return dict(records.strict(spike))

    def _by_layer(self, source: str, metrics: Metrics | None, vector: str) -> dict[str, Any]:
        """Name -> number as JSON has it, of a vector with one entry per layer."""
        if metrics is None or vector not in metrics.vectors:
            return {}
        values = records.numbers(metrics.vectors[vector])
        names = self._names.get((source, vector)) or self._names.get((source, _NORM)) or ()
        names += tuple(f"[{i}]" for i in range(len(names), len(values)))
        return dict(zip(names, values, strict=False))


def _ratio(norm: Any, baseline: Any) -> float | None:
    if norm is None or baseline is None or float(baseline) == 0.0:
        return None
    with np.errstate(all="ignore"):
        return float(np.float64(norm) / np.float64(baseline))


def _open_lines(path: Path) -> TextIO:
    """Open to append; a line that a killed run left half written is ended first."""
    torn = False
    if path.exists() and path.stat().st_size:
        with path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            torn = file.read(1) != b"\n"
    lines = path.open("a", encoding="ascii", newline="\n")
    if torn:
        lines.write("\n")
    return lines


def _unused(directory: Path, stem: str) -> Path:
    path, number = directory / f"{stem}.json", 1
    while path.exists():
        number += 1
        path = directory / f"{stem}-{number}.json"
    return path
