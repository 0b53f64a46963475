"""The ``memory`` sink: keeps records in lists, for tests and notebooks."""

from __future__ import annotations

from dynguard.actions import Intervention
from dynguard.events import RunInfo
from dynguard.findings import Finding, Metrics, Names, Record, RunEnd, RunStart, Section
from dynguard.hookspecs import hookimpl
from dynguard.options import validated


class Memory:
    """Keeps all records in memory.

    Attributes:
        records: all records in order; ``findings``, ``metrics``, ``names``, ``interventions`` and ``sections`` by kind.
        run: what ``on_run_start`` was told, or None.
        start, end: the RunStart and RunEnd records, or None.
        flushes: how often it was flushed.
        closed: whether it was closed.
    """

    @validated
    def __init__(self) -> None:
        self.records: list[Record] = []
        self.findings: list[Finding] = []
        self.metrics: list[Metrics] = []
        self.names: list[Names] = []
        self.interventions: list[Intervention] = []
        self.sections: list[Section] = []
        self.run: RunInfo | None = None
        self.start: RunStart | None = None
        self.end: RunEnd | None = None
        self.flushes = 0
        self.closed = False

    @hookimpl
    def on_run_start(self, run: RunInfo) -> None:
        """Keep what is known about the run."""
        self.run = run

    @hookimpl
    def write(self, record: Record) -> None:
        """Keep a record."""
        self.records.append(record)
        match record:
            case Finding():
                self.findings.append(record)
            case Metrics():
                self.metrics.append(record)
            case Names():
                self.names.append(record)
            case Intervention():
                self.interventions.append(record)
            case Section():
                self.sections.append(record)
            case RunStart():
                self.start = record
            case RunEnd():
                self.end = record

    @hookimpl
    def flush(self, timeout: float) -> None:
        """Count it: there is nothing to bring out."""
        self.flushes += 1

    @hookimpl
    def close(self, timeout: float) -> None:
        """Remember that it was closed; the records stay."""
        self.closed = True
