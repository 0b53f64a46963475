"""A sink: one small file that says how far the run is, replaced as a whole so that a reader never sees half of it."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from dynguard import Metrics, hookimpl, validated


class Heartbeat:
    """Keeps ``heartbeat.json`` in the run directory up to date for a watchdog."""

    needs_directory = True

    @validated
    def __init__(self, *, every: Annotated[float, Field(ge=0)] = 1.0) -> None:
        self.every = every
        self.file: Path | None = None
        self.beat: dict[str, Any] = {}
        self.due = -math.inf

    @hookimpl
    def on_run_start(self, run: Any) -> None:
        """Learn where the run's files go; without a directory (another rank, say) nothing is written."""
        if run.directory is not None:
            self.file = Path(run.directory) / "heartbeat.json"
            self.beat = {"run": run.run, "pid": os.getpid(), "alive": True}

    @hookimpl
    def write(self, record: Any) -> None:
        """Take note of the step; write it down when the last time is ``every`` seconds ago."""
        if isinstance(record, Metrics):
            loss = record.values.get("loss", math.nan)
            self.beat |= {"step": record.step, "time": record.time, "loss": loss if math.isfinite(loss) else None}
            if time.monotonic() >= self.due:
                self.due = time.monotonic() + self.every
                self.save()

    @hookimpl
    def flush(self, timeout: float) -> None:
        """Write down the newest step."""
        self.save()

    @hookimpl
    def close(self, timeout: float) -> None:
        """Say that the run has ended."""
        self.beat["alive"] = False
        self.save()

    def save(self) -> None:
        """Replace the file in one move."""
        if self.file is not None:
            part = self.file.with_suffix(".part")
            part.write_text(json.dumps(self.beat, allow_nan=False), encoding="utf-8")
            part.replace(self.file)
