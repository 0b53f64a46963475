"""``dynguard report``: what happened in a run, in plain text. Works while the run lives and after it was killed."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from dynguard.errors import RunDirectoryError
from dynguard.findings import Evidence, Finding, Prescription, RunEnd, Section, Severity
from dynguard.history import Curve, History
from dynguard.history_file import FILE

if TYPE_CHECKING:
    from dynguard.actions import Intervention
    from dynguard.findings import Scalar

RUNS = Path("dynguard-runs")
BLOCKS, ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.-=+*%#"
STYLES = {"info": "cyan", "warning": "yellow", "error": "red", "critical": "bold red"}
WORDS = {"grad": "gradient", "nan": "NaN", "inf": "infinite", "param": "parameter", "nonfinite": "non-finite"}
DONE = {"clip": "clipped", "skip": "skipped", "rollback": "rolled back", "raise": "stopped the run",
        "proceed": "accepted as the new normal", "warn": "reported"}  # fmt: skip
WIDTH = 16  # of a sparkline
ROWS = 20  # of a table; the rest is counted


def find(run: Path | None = None) -> Path:
    """The history file of a run.

    Args:
        run: run directory or history file; None takes the newest run in ``./dynguard-runs``.

    Raises:
        RunDirectoryError: there is none.
    """
    if run is None:
        files = list(RUNS.glob(f"*/{FILE}"))
        if not files:
            raise RunDirectoryError(f"no run in ./{RUNS}. Name one: dynguard report RUN")
        return max(files, key=_last_written)
    file = run / FILE if run.is_dir() else run
    if not file.is_file():
        what = f"{run} holds no {FILE}, so it is no run directory" if run.is_dir() else f"no run at {run}"
        raise RunDirectoryError(f"{what}.{_others()}")
    return file


def _last_written(file: Path) -> float:
    """When the history was written to last; SQLite writes to a file beside it first."""
    return max(p.stat().st_mtime for p in (file, file.with_name(f"{FILE}-wal")) if p.exists())


def _others() -> str:
    runs = sorted(file.parent for file in RUNS.glob(f"*/{FILE}"))
    return f" The newest in ./{RUNS} is {runs[-1]}." if runs else ""


def show(file: Path, console: Console | None = None) -> None:
    """Print the report of the history ``file``; RunDirectoryError where nothing can be read from it."""
    if console is None:
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")  # a layer's name must not end the report on a narrow terminal
        console = Console(highlight=False)
    with History(file) as history:
        if history.problems and history.run is None and not history.steps:
            raise RunDirectoryError(f"nothing can be read from {file}: {history.problems[0]}")
        console.print(render(history, blocks=BLOCKS if "utf" in console.encoding.lower() else ASCII_BLOCKS))


@dataclass(frozen=True, slots=True)
class Told:
    """What a history told when it was read; a live one tells more every moment."""

    run: str
    findings: tuple[Finding, ...]
    interventions: tuple[Intervention, ...]
    steps: int
    end: RunEnd | None
    written: float

    @classmethod
    def by(cls, history: History) -> Told:
        """Read it."""
        start = history.run
        return cls(
            run=start.run if start else history.file.absolute().parent.name,
            findings=tuple(history.findings()),
            interventions=tuple(history.interventions()),
            steps=history.steps,
            end=history.end,
            written=_last_written(history.file),
        )


def render(history: History, blocks: str = BLOCKS) -> RenderableType:
    """The report as something that rich can print.

    Args:
        history: of the run.
        blocks: characters of growing height for the sparklines.
    """
    told = Told.by(history)
    parts: list[RenderableType] = [Text(_plain(f"Run {told.run}"), "bold"), verdict(told), Text()]
    if told.findings:
        parts += [_heading("Findings"), *map(_show_group, _grouped(told.findings))]
    if told.interventions:
        parts += [_heading("Interventions"), _interventions(told.interventions)]
    parts += _course(history, blocks)
    for section in history.sections():
        parts += [_heading(section.title), *_section(section)]
    parts += _itself(told.end, history.problems)
    return Group(*parts)


def verdict(told: Told) -> Text:
    """The run in one sentence: how many problems, the worst of them, and how the run ended."""
    findings = [f for f in told.findings if f.severity >= Severity.WARNING]
    if not findings:
        return Text(
            _plain(f"No problems found; {_ending(told)}."), "" if told.end is None or told.end.error else "green"
        )
    worst = min(findings, key=lambda f: (-f.severity.rank, f.step))
    deeds = [i for i in told.interventions if (i.step, i.source) == (worst.step, worst.source)]
    if deeds:  # of several findings at that step, the one that decided it
        worst = next((f for f in findings if (f.step, f.subject) == (worst.step, deeds[0].subject)), worst)
    count = len({_problem(f) for f in findings})
    lead = "1 problem, " if count == 1 else f"{count} problems, the worst "
    done = _done(deeds[0]) if deeds else "reported"
    text = f"{lead}at step {worst.step}{_where(worst)}: {_words(worst.kind)}{_ratio(worst)}, {done}; {_ending(told)}."
    return Text(_plain(text), STYLES[worst.severity.value])


def _problem(finding: Finding) -> tuple[str, ...]:
    """What makes two findings one problem: the same bad step, or the same slow fault seen again."""
    if finding.action.intervenes:
        return finding.source, str(finding.step)
    return finding.source, finding.kind, finding.subject


def _ending(told: Told) -> str:
    end = told.end
    if end is None:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(told.written))
        last = (
            f"last record: step {told.steps - 1}, written {when}" if told.steps else f"no step yet, last written {when}"
        )
        return f"the run is still going on or was killed ({last})"
    if end.error:
        return f"the run ended after {end.steps} steps with {end.error}".rstrip(".")
    return f"the run ended normally after {end.steps} steps"


def _where(finding: Finding) -> str:
    source = f" ({finding.source})" if finding.source else ""
    return f" in {finding.subject}{source}" if finding.subject else source


def _words(kind: str) -> str:
    return " ".join(WORDS.get(word, word) for word in kind.split("_"))


def _ratio(finding: Finding) -> str:
    ratio = {item.name: item.value for item in finding.evidence}.get("ratio")
    return f" x{_scalar(float(ratio))}" if isinstance(ratio, (int, float)) and math.isfinite(ratio) else ""


def _done(deed: Intervention) -> str:
    done = DONE[deed.action.value]
    return done if deed.carried_out else f"would have been {done} (mode observe)"


def _grouped(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Findings of one kind about one subject together, the most severe group first, then the earliest."""
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.kind, finding.subject, finding.source), []).append(finding)
    return sorted(groups.values(), key=lambda g: (-max(f.severity.rank for f in g), g[0].step))


def _show_group(group: Sequence[Finding]) -> RenderableType:
    finding = max(group, key=lambda f: f.severity.rank)
    head = Text(finding.severity.value.upper(), STYLES[finding.severity.value])
    head.append(_plain(f"  {_words(finding.kind)}{_where(finding)}"), "bold")
    head.append(f"  {_steps(group)}", "not bold default")
    lines = [
        ("", finding.premise),
        ("Means: ", finding.implies),
        ("Evidence: ", ", ".join(map(_evidence, finding.evidence))),
        ("Rows: ", _shortened(finding.rows)),
        *(("Do: ", _prescription(p)) for p in finding.prescriptions),
        ("Effect: ", finding.expected_effect),
        ("", _signature(finding)),
    ]
    body = [Padding(Text(_plain(label + text)), (0, 0, 0, 4)) for label, text in lines if text]
    return Group(head, *body, Text())


def _steps(group: Sequence[Finding]) -> str:
    steps = [finding.step for finding in group]
    if len(steps) == 1:
        return f"step {steps[0]}"
    return f"{len(steps)} times, steps {_shortened(steps)}"


def _shortened(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return f"{shown} ... {numbers[-1]}" if len(numbers) > 8 else shown


def _evidence(item: Evidence) -> str:
    return f"{item.name} {_scalar(item.value)}{' ' if item.unit else ''}{item.unit}"


def _scalar(value: Scalar) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.4g}"
    return str(value)


def _prescription(item: Prescription) -> str:
    change = f"{item.parameter}: {_scalar(item.current)} -> {_scalar(item.proposed)}"
    return ". ".join(part for part in (change, item.why, f"Undo: {item.undo}" if item.undo else "") if part)


def _signature(finding: Finding) -> str:
    sure = f", confidence {finding.confidence:.3g}" if finding.confidence is not None else ""
    return f"({finding.detector or 'unsigned'} asks to {finding.action}{sure})"


def _interventions(deeds: Sequence[Intervention]) -> RenderableType:
    rows = [
        (d.step, _done(d), f"{d.subject}{f' ({d.source})' if d.source else ''}", d.detector, d.reason) for d in deeds
    ]
    return _table(("step", "done", "about", "by", "reason"), rows)


def _table(columns: Sequence[str], rows: Sequence[Sequence[Scalar]]) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(Text(_plain(column)), overflow="fold")
    for row in rows[:ROWS]:
        table.add_row(*(Text(_plain(_scalar(cell))) for cell in row))
    return Group(table, Text(f"... and {len(rows) - ROWS} more")) if len(rows) > ROWS else table


def _course(history: History, blocks: str) -> list[RenderableType]:
    """First, last, smallest and largest loss, gradient norm, learning rate (of trees: metrics), and how they went."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("", "first", "last", "min", "max", "not\nfinite"):
        table.add_column(column, justify="right" if column else "left", overflow="fold")
    table.add_column("", no_wrap=True, min_width=WIDTH)
    for source in history.sources:
        names = history.scalars(source)
        boosted = () if "gradient_norm" in names else [n for n in names if "-" in n][:8]  # data set and metric
        for name in ("loss", "gradient_norm", "lr", *boosted):
            curve = history.metrics(name, source)
            if len(curve):
                table.add_row(Text(_plain(f"{name} ({source})" if source else name)), *_row(curve, blocks))
    return [_heading("Course"), table] if table.row_count else []


def _row(curve: Curve, blocks: str) -> Iterator[str]:
    ends = (curve.values[0], curve.values[-1])
    finite = [x for x in (*curve.values, *curve.low, *curve.high) if math.isfinite(x)] or [math.nan]
    yield from (_scalar(float(x)) for x in (*ends, min(finite), max(finite)))
    yield str(curve.nonfinite.sum() or "")
    yield sparkline(curve.high.tolist(), blocks)


def sparkline(values: Sequence[float], blocks: str = BLOCKS, width: int = WIDTH) -> str:
    """A curve as ``width`` characters: the largest value of each stretch, ``!`` where one is not finite.

    The height is logarithmic where all values are positive and span more than a factor of 100.
    """
    stretches = [list(part) for part in _stretches(values, width)]
    finite = [max(part) for part in stretches if all(map(math.isfinite, part))]
    if not finite:
        return "!" * len(stretches)
    low, high = min(finite), max(finite)
    scale = math.log if low > 0 and high > 100 * low else float
    bottom, span = scale(low), scale(high) - scale(low)

    def character(part: list[float]) -> str:
        if not all(map(math.isfinite, part)):
            return "!"
        height = (scale(max(part)) - bottom) / span if span else 0.0
        return blocks[min(int(height * len(blocks)), len(blocks) - 1)]

    return "".join(map(character, stretches))


def _stretches(values: Sequence[float], width: int) -> Iterator[Sequence[float]]:
    count = min(width, len(values))
    for i in range(count):
        yield values[i * len(values) // count : (i + 1) * len(values) // count]


def _section(section: Section) -> Iterator[RenderableType]:
    if section.text:
        yield Text(_plain(section.text))
    for table in section.tables:
        if table.title:
            yield Text(_plain(table.title), "italic")
        yield _table(table.columns, table.rows)
    for figure in section.figures:
        yield Text(_plain(f"Figure: {figure.title}. {figure.alt}".rstrip()))


def _itself(end: RunEnd | None, problems: Sequence[str]) -> list[RenderableType]:
    """What dynguard cost, what it lost, and what could not be read."""
    lines: list[Text] = []
    if end and end.overhead:
        costs = sorted(end.overhead.items(), key=lambda item: -item[1])
        lines.append(Text(_plain("Cost: " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in costs))))
    lost = {sink: count for sink, count in (end.dropped.items() if end else ()) if count}
    lines += [Text(_plain(f"Dropped: {count} records did not reach {sink}"), "yellow") for sink, count in lost.items()]
    lines += [Text(_plain(f"Reading: {problem}"), "yellow") for problem in problems]
    return [_heading("dynguard itself"), *lines] if lines else []


def _heading(text: str) -> Rule:
    return Rule(Text(_plain(text), "bold"), align="left", style="dim")


def _plain(text: str) -> str:
    """Text that can't steer a terminal: control characters in a layer's name are spelled out."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
