"""A sink that keeps what it is given, for tests."""

from __future__ import annotations

from typing import TypeVar

from dynguard.actions import Intervention
from dynguard.findings import Finding, Metrics, Record, Section
from dynguard.hookspecs import hookimpl

R = TypeVar("R")


class MemorySink:
    """Keeps all records in order; read them after ``flow.close()``, when the worker thread has delivered the last.

    Attributes:
        records: all records so far.
        flushed: how often ``flush`` was called.
        closed: whether ``close`` was called.
    """

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.flushed = 0
        self.closed = False

    @hookimpl
    def write(self, record: Record) -> None:
        """Keep the record."""
        self.records.append(record)

    @hookimpl
    def flush(self, timeout: float) -> None:
        """Count the call: nothing is held back."""
        self.flushed += 1

    @hookimpl
    def close(self, timeout: float) -> None:
        """Note the call."""
        self.closed = True

    def of(self, kind: type[R]) -> list[R]:
        """The records of one class, e.g. ``sink.of(RunEnd)``."""
        return [record for record in self.records if isinstance(record, kind)]

    @property
    def findings(self) -> list[Finding]:
        """The findings."""
        return self.of(Finding)

    @property
    def interventions(self) -> list[Intervention]:
        """The interventions."""
        return self.of(Intervention)

    @property
    def metrics(self) -> list[Metrics]:
        """The numbers of the steps."""
        return self.of(Metrics)

    @property
    def sections(self) -> list[Section]:
        """The report sections."""
        return self.of(Section)
