"""The ``console`` sink: says on stderr what was found; a panel per finding on a terminal, a plain line elsewhere."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from dynguard.actions import Action, Intervention
from dynguard.events import RunInfo
from dynguard.findings import Evidence, Finding, Metrics, Record, RunEnd, Scalar, Severity
from dynguard.hookspecs import hookimpl
from dynguard.options import validated

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.console import RenderableType

_SHOWN = 3  # findings of one kind about one subject that are shown; the rest is counted
_LONGEST = 400  # characters of one text
_COLOURS = {Severity.INFO: "cyan", Severity.WARNING: "yellow", Severity.ERROR: "red", Severity.CRITICAL: "bold red"}


class Console:
    """Shows findings on stderr: on a terminal a panel each, elsewhere one plain line for each error.

    Args:
        min_severity: the least that is shown. Where stderr is no terminal, nothing below ``error`` is.
        log_every: on a terminal, a line with the metrics of every so many steps; 0 for none.
        force_terminal: True or False to treat stderr as a terminal or not, whatever it is.
    """

    @validated
    def __init__(
        self,
        *,
        min_severity: Severity = Severity.WARNING,
        log_every: Annotated[int, Field(ge=0)] = 0,
        force_terminal: bool | None = None,
    ) -> None:
        self.min_severity = min_severity
        self.log_every = log_every
        self.force_terminal = force_terminal
        self._directory: Path | None = None
        self._seen: Counter[tuple[str, str]] = Counter()
        self._done: Counter[Action] = Counter()
        self._latest: dict[str, Metrics] = {}
        self._next_log: dict[str, int] = {}
        self._rich: RichConsole | None = None

    @hookimpl
    def on_run_start(self, run: RunInfo) -> None:
        """Remember where the report will lie."""
        self._directory = run.directory

    @hookimpl
    def write(self, record: Record) -> None:
        """Show a record, or remember it for the summary."""
        match record:
            case Finding():
                self._finding(record)
            case Metrics():
                self._metrics(record)
            case Intervention():
                self._done[record.action] += record.carried_out
            case RunEnd():
                self._end(record)

    def _finding(self, finding: Finding) -> None:
        key = (finding.kind, finding.subject)
        self._seen[key] += 1
        terminal = self._on_terminal()
        least = self.min_severity if terminal else max(self.min_severity, Severity.ERROR)
        if finding.severity < least or self._seen[key] > _SHOWN:
            return
        if terminal:
            self._print(self._panel(finding))
        else:
            self._say(self._line(finding))

    def _metrics(self, metrics: Metrics) -> None:
        self._latest[metrics.source] = metrics
        if not self.log_every or metrics.step < self._next_log.get(metrics.source, 0):
            return
        self._next_log[metrics.source] = (metrics.step // self.log_every + 1) * self.log_every
        if self._on_terminal():
            self._print(self._progress(metrics))

    def _end(self, end: RunEnd) -> None:
        if not self._seen:
            return
        for line in self._summary(end):
            self._say(line)

    def _panel(self, finding: Finding) -> RenderableType:
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        for label, value in self._facts(finding):
            grid.add_row(Text(visible(label, 40)), Text(visible(value)))
        title = Text(f"{finding.kind} ({finding.severity}) at step {finding.step}")
        colour = _COLOURS[finding.severity]
        return Panel(grid, title=title, title_align="left", border_style=colour, expand=False)

    def _facts(self, finding: Finding) -> Iterator[tuple[str, str]]:
        if finding.subject:
            yield "layer", finding.subject
        if finding.source:
            yield "source", finding.source
        if finding.premise:
            yield "seen", finding.premise
        for item in finding.evidence:
            yield item.name, measured(item)
        loss = self._loss(finding)
        if loss is not None:
            yield "loss", number(loss)
        if finding.implies:
            yield "means", finding.implies
        yield "action", f"{finding.action}" + (f": {finding.expected_effect}" if finding.expected_effect else "")
        if finding.confidence is not None:
            yield "confidence", number(finding.confidence)
        if self._directory is not None:
            yield "report", str(self._directory)

    def _loss(self, finding: Finding) -> float | None:
        """Of the step, where the finding's own evidence does not tell it."""
        latest = self._latest.get(finding.source)
        if latest is None or latest.step != finding.step or any(item.name == "loss" for item in finding.evidence):
            return None
        return latest.values.get("loss")

    def _line(self, finding: Finding) -> str:
        where = f" {visible(finding.subject)}" if finding.subject else ""
        facts = ", ".join(f"{visible(item.name, 40)} {visible(measured(item), 80)}" for item in finding.evidence[:6])
        said = "; ".join(part for part in (visible(finding.premise), facts) if part)
        text = f"dynguard: step {finding.step}: {finding.severity}: {finding.kind}{where}"
        return f"{text}: {said} -> {finding.action}" if said else f"{text} -> {finding.action}"

    def _progress(self, metrics: Metrics) -> RenderableType:
        from rich.text import Text

        where = f" {visible(metrics.source, 40)}" if metrics.source else ""
        values = "  ".join(f"{visible(name, 40)} {number(value)}" for name, value in list(metrics.values.items())[:8])
        counts = f"findings {self._seen.total()}  interventions {self._done.total()}"
        return Text(f"dynguard:{where} step {metrics.step}  {values}  {counts}", style="dim")

    def _summary(self, end: RunEnd) -> Iterator[str]:
        kinds: Counter[str] = Counter()
        for (kind, _), count in self._seen.items():
            kinds[kind] += count
        found = ", ".join(f"{kind} {count}x" for kind, count in kinds.most_common())
        done = ", ".join(f"{action} {count}x" for action, count in self._done.most_common() if count) or "none"
        yield f"dynguard: {self._seen.total()} findings in {end.steps} steps: {found}; interventions: {done}"
        for (kind, subject), count in self._seen.most_common(10):
            if count > _SHOWN:
                yield f"dynguard: {kind} {visible(subject)}: {count} times, the first {_SHOWN} of them shown"
        lost = ", ".join(f"{visible(sink, 40)} {count}" for sink, count in end.dropped.items() if count)
        if lost:
            yield f"dynguard: records that did not reach their sink: {lost}"
        if self._directory is not None:
            yield f"dynguard: report: {visible(str(self._directory))}"

    def _on_terminal(self) -> bool:
        if self.force_terminal is not None:
            return self.force_terminal
        return sys.stderr is not None and sys.stderr.isatty()

    def _print(self, what: RenderableType) -> None:
        from rich.console import Console as RichConsole

        if self._rich is None:
            self._rich = RichConsole(stderr=True, force_terminal=True, force_jupyter=False, highlight=False)
        if sys.stderr is not None:
            self._rich.print(what)

    def _say(self, line: str) -> None:
        if sys.stderr is not None:
            print(line, file=sys.stderr, flush=True)


def visible(text: str, longest: int = _LONGEST) -> str:
    """``text`` on one line, with what a terminal would obey, hide or can't show as escapes, and cut where too long."""
    shown = text if len(text) <= longest else text[: longest - 1] + "…"
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in shown)
    encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
    return shown.encode(encoding, "backslashreplace").decode(encoding)


def measured(item: Evidence) -> str:
    """The value of an evidence item with its unit."""
    return number(item.value) + (f" {item.unit}" if item.unit else "")


def number(value: Scalar) -> str:
    """A number with four digits, anything else as it is."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int) and abs(value) >= 10**15:
        return f"{value:.4g}" if value.bit_length() < 1000 else f"{'-' if value < 0 else ''}2^{value.bit_length()}"
    return str(value)
