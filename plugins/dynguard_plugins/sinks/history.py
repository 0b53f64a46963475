"""The ``history`` sink: everything that the run tells, in ``history.sqlite`` of its run directory."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dynguard.events import RunInfo
from dynguard.findings import Record
from dynguard.history import HistoryWriter
from dynguard.hookspecs import hookimpl
from dynguard.options import validated


class HistorySink:
    """Writes ``history.sqlite`` in the run directory: readable while the run lives and after it was killed.

    Args:
        keep: buckets of steps kept per optimizer or booster; longer runs merge neighbours and keep their extremes.
    """

    needs_directory = True

    @validated
    def __init__(self, *, keep: Annotated[int, Field(ge=2)] = 20_000) -> None:
        self.keep = keep
        self.writer: HistoryWriter | None = None

    @hookimpl
    def on_run_start(self, run: RunInfo) -> None:
        """Open the file; without a run directory there is none and nothing is kept."""
        if run.directory is not None:
            self.writer = HistoryWriter(run.directory, keep=self.keep)

    @hookimpl
    def write(self, record: Record) -> None:
        """Take a record."""
        if self.writer is not None:
            self.writer.write(record)

    @hookimpl
    def flush(self, timeout: float) -> None:
        """Bring what waits to the disk, in one transaction."""
        if self.writer is not None:
            self.writer.flush()

    @hookimpl
    def close(self, timeout: float) -> None:
        """Let go of the file. Raises OSError where records were lost on the way."""
        if self.writer is None:
            return
        self.writer.close()
        if self.writer.lost:
            why = self.writer.problem or "the disk was full or failed for a while"
            raise OSError(f"{self.writer.lost} records did not reach {self.writer.file}: {why}")
