"""A sink of one's own: one line of CSV for each thing that was done to the run.

A sink runs on a thread of its own; however slow it is, training does not wait for it.
Run it: python examples/custom_sink.py
"""

import csv
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dynguard import Action, Finding, FlowManager, Intervention, Signal, hookimpl, validated
from dynguard.findings import RunEnd
from dynguard.testing import scale_gradient


class CsvSink:
    """Writes interventions to ``interventions.csv`` in the run directory."""

    needs_directory = True

    @validated
    def __init__(self, *, filename: str = "interventions.csv") -> None:
        self.filename = filename
        self.rows: list[list[Any]] = [["step", "action", "subject", "reason"]]
        self.count = 0
        self.file: Path | None = None

    @hookimpl
    def on_run_start(self, run: Any) -> None:
        self.file = run.directory and run.directory / self.filename

    @hookimpl
    def write(self, record: Any) -> None:
        if isinstance(record, Intervention):
            self.count += 1
            self.rows.append([record.step, record.action, record.subject, record.reason])
        elif isinstance(record, RunEnd):
            print(f"{record.steps} steps, interventions: {self.count}")

    @hookimpl
    def flush(self, timeout: float) -> None:
        if self.file is not None:
            with self.file.open("a", newline="", encoding="utf-8") as stream:
                csv.writer(stream).writerows(self.rows)
            self.rows.clear()


class Limit:
    """Skips the update when a gradient's norm is above 1,000."""

    @hookimpl
    def on_gradients(self, event: Any) -> Signal:
        fired = ~(event.norms < 1e3)
        return Signal(event.norms.max(), fired, lambda: self.explain(event, fired), action=Action.SKIP)

    def explain(self, event: Any, fired: Any) -> Iterator[Finding]:
        for name, hit in zip(event.names, fired.tolist(), strict=True):
            if hit:
                yield Finding(kind="grad_spike", step=event.step, subject=name, action=Action.SKIP)


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with (
        FlowManager(model, optimizer, plugins=[Limit(), CsvSink()]) as flow,
        scale_gradient(model, "1.weight", 1e6, step=25, optimizer=optimizer),
    ):
        for _ in range(40):
            model(torch.randn(16, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    if flow.run_directory is not None:
        sys.stdout.write((flow.run_directory / "interventions.csv").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
