"""``dynguard demo``: one small GPT trained twice from one seed, plain and guarded, with three faults at known steps."""

from __future__ import annotations

import importlib.util
import math
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from dynguard.errors import MissingExtraError, RunDirectoryError, SetupError
from dynguard.findings import Finding

if TYPE_CHECKING:
    from dynguard.flow import FlowManager
    from dynguard.torch.demo import Fault, Outcome, Size

SEED = 0
# The default, but the console in plain lines: a panel of its own would be drawn over the progress bar.
PLUGINS = ("default", ("console", {"force_terminal": False}))
PLAIN, GUARDED = "#d55e00", "#0072b2"  # Okabe and Ito's vermilion and blue: told apart by colour-blind eyes too


@dataclass(frozen=True, slots=True)
class Catch:
    """What the guard made of one planted fault."""

    fault: Fault
    subject: str = ""
    action: str = ""
    kind: str = ""
    evidence: str = ""

    @property
    def ok(self) -> bool:
        """Whether the update of that very step was kept from the weights, for the right layer where there is one."""
        right_layer = not self.fault.layer or self.subject.startswith(f"{self.fault.layer}.")
        return self.action in ("skip", "rollback") and right_layer


@dataclass(frozen=True, slots=True)
class Result:
    """All that the demo's verdict rests on."""

    plain: Outcome
    guarded: Outcome
    catches: tuple[Catch, ...]
    false_alarms: int
    same_before_faults: bool

    @property
    def ok(self) -> bool:
        """Every fault caught, and the guarded run ends finite and below the plain run (a NaN is below nothing)."""
        lower = not self.guarded.held_out >= self.plain.held_out
        return all(c.ok for c in self.catches) and math.isfinite(self.guarded.held_out) and lower


def run(out: Path = Path("dynguard-demo"), *, quick: bool = False, device: str = "cpu") -> bool:
    """Train twice, show what happened, and write ``loss.png``, ``result.json`` and the run directory into ``out``.

    Args:
        out: folder for the results, made where it is missing.
        quick: a tiny model and few steps, for tests.
        device: of torch, e.g. ``cpu`` or ``cuda``.

    Returns:
        Whether every fault was caught at its step (and in its layer) and the guarded run ended better.

    Raises:
        MissingExtraError: torch or matplotlib is not installed.
        SetupError: there is no such device.
        RunDirectoryError: ``out`` can't be written to.
    """
    for library in ("torch", "matplotlib"):
        if importlib.util.find_spec(library) is None:
            raise MissingExtraError(library, "demo", "the demo")
    from dynguard.torch.demo import QUICK, Size

    size = QUICK if quick else Size()
    _check_device(device)
    console = Console()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirectoryError(f"folder {out} can't be made: {error.strerror or error}") from None
    run_directory = _unused(out / "run")
    plain, guarded, flow = _train_twice(size, device, run_directory, console)
    result = _judge(size, plain, guarded, flow)
    _draw(result, out / "loss.png")
    (out / "result.json").write_bytes(_json(result, size, run_directory))
    _tell(result, out, run_directory, console)
    return result.ok


def _check_device(device: str) -> None:
    import torch

    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise SetupError(f"torch can't use device {device!r}: {str(error).splitlines()[0]}") from None


def _unused(directory: Path) -> Path:
    """``directory``, or the next free one: a run directory holds one run."""
    number, free = 2, directory
    while free.exists():
        number, free = number + 1, directory.with_name(f"{directory.name}-{number}")
    return free


def _train_twice(
    size: Size, device: str, run_directory: Path, console: Console
) -> tuple[Outcome, Outcome, FlowManager]:
    from dynguard.flow import FlowManager
    from dynguard.torch.demo import train

    columns = (TextColumn("{task.description:<8}"), BarColumn(), TextColumn("step {task.completed:>3}/{task.total}"),
               TextColumn("loss {task.fields[loss]:.3g}"), TimeElapsedColumn())  # fmt: skip
    with Progress(*columns, console=console) as progress:
        bars = {name: progress.add_task(name, total=size.steps, loss=math.nan) for name in ("plain", "guarded")}

        def advance(bar: TaskID, loss: float) -> None:
            progress.update(bar, advance=1, loss=loss)

        plain, _ = train(size, seed=SEED, device=device, guard=None, advance=lambda x: advance(bars["plain"], x))
        progress.stop_task(bars["plain"])
        if plain.dead_since is not None:
            console.print(f"The plain run's weights are NaN since step {plain.dead_since}: nothing left to train.")
        guarded, flow = train(
            size, seed=SEED, device=device, advance=lambda x: advance(bars["guarded"], x),
            guard=lambda model, optimizer: FlowManager(model, optimizer, plugins=PLUGINS, run_dir=run_directory),
        )  # fmt: skip
    assert flow is not None
    return plain, guarded, flow


def _judge(size: Size, plain: Outcome, guarded: Outcome, flow: FlowManager) -> Result:
    from dynguard.torch.demo import faults

    planted = faults(size)
    steps = {fault.step for fault in planted}
    first = min(steps)
    return Result(
        plain=plain,
        guarded=guarded,
        catches=tuple(_catch(fault, flow) for fault in planted),
        false_alarms=sum(i.action.intervenes and i.step not in steps for i in flow.interventions),
        same_before_faults=plain.losses[: first + 1] == guarded.losses[: first + 1],
    )


def _catch(fault: Fault, flow: FlowManager) -> Catch:
    done = [i for i in flow.interventions if i.step == fault.step and i.carried_out]
    found = [f for f in flow.findings if f.step == fault.step]
    if not done:
        return Catch(fault)
    finding = next((f for f in found if f.subject == done[0].subject), found[0] if found else None)
    return Catch(
        fault,
        subject=done[0].subject,
        action=str(done[0].action),
        kind=finding.kind if finding else "",
        evidence=_ratio(finding) if finding else "",
    )


def _ratio(finding: Finding) -> str:
    """The ratio to the baseline, where the finding has one."""
    values = {item.name: item.value for item in finding.evidence}
    ratio = values.get("ratio")
    return f"x{ratio:.0f}" if isinstance(ratio, (int, float)) and math.isfinite(ratio) else ""


def _json(result: Result, size: Size, run_directory: Path) -> bytes:
    """Strict JSON: NaN and infinities as strings."""
    content: dict[str, Any] = {"ok": result.ok, "seed": SEED, "size": asdict(size), "run": run_directory.name}
    content |= asdict(result)
    for entry, catch in zip(content["catches"], result.catches, strict=True):
        entry["ok"] = catch.ok
    return to_json(content, inf_nan_mode="strings", indent=2)


def _tell(result: Result, out: Path, run_directory: Path, console: Console) -> None:
    console.print(_table(result))
    plain, guarded = result.plain, result.guarded
    if plain.dead_since is not None:
        console.print(f"Plain run: weights NaN since step {plain.dead_since}, held-out loss {plain.held_out:.3f}.")
    else:
        console.print(f"Plain run: held-out loss {plain.held_out:.3f}.")
    console.print(f"Guarded run: held-out loss {guarded.held_out:.3f} nats per character.")
    same = "the same to the last bit" if result.same_before_faults else "NOT the same"
    console.print(f"Until the first fault both runs' losses were {same}.")
    if result.false_alarms:
        console.print(f"The guard also intervened at {result.false_alarms} steps without a planted fault.")
    caught = sum(catch.ok for catch in result.catches)
    verdict = f"{caught} of {len(result.catches)} faults caught where they were planted"
    style = "bold green" if result.ok else "bold red"
    console.print(Text(f"{verdict}, {'as promised.' if result.ok else 'which is NOT what the demo promises.'}", style))
    console.print(Text(f"Picture: {out / 'loss.png'}   Report: dynguard report {run_directory}"), soft_wrap=True)


def _table(result: Result) -> Table:
    table = Table(title="What was planted, what the guard made of it, and the loss after it", box=box.SIMPLE_HEAD)
    for column in ("step", "planted", "found", "in", "done", "plain", "guarded"):
        table.add_column(column, overflow="fold")
    for catch in result.catches:
        row = (str(catch.fault.step), catch.fault.text, f"{catch.kind} {catch.evidence}".strip() or "nothing")
        after = (f"{_after(run, catch.fault.step):.3f}" for run in (result.plain, result.guarded))
        done = Text(catch.action or "missed", "green" if catch.ok else "red")
        table.add_row(*map(Text, (*row, catch.subject)), done, *after)
    return table


def _after(outcome: Outcome, step: int) -> float:
    """Mean training loss of the ten steps that follow."""
    return statistics.fmean(outcome.losses[step + 1 : step + 11])


def _draw(result: Result, path: Path) -> None:
    """Both loss curves on a log scale, with the faults marked. Without pyplot, so no display or global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(yscale="log", xlabel="step", ylabel="training loss (nats per character)")
    axes.plot(result.plain.losses, color=PLAIN, linewidth=1.2, label="plain")
    axes.plot(result.guarded.losses, color=GUARDED, linewidth=1.2, label="guarded")
    for catch in result.catches:
        axes.axvline(catch.fault.step, color="0.6", linestyle=":", zorder=0)
        label = f"{catch.fault.text}\n{catch.action or 'missed'}: {catch.subject}"
        axes.annotate(label, (catch.fault.step, 0.98), (5, 0), xycoords=("data", "axes fraction"), va="top", ha="left",
                      textcoords="offset points", rotation=90, fontsize=8, color="0.25")  # fmt: skip
    if result.plain.dead_since is not None:
        last = max(i for i, loss in enumerate(result.plain.losses) if math.isfinite(loss))
        axes.plot(last, result.plain.losses[last], "x", color=PLAIN, markersize=10, markeredgewidth=2.5,
                  label=f"plain run's weights are NaN (step {result.plain.dead_since})")  # fmt: skip
    axes.set_title("One GPT, one seed, the same batches: plain and guarded by dynguard")
    axes.legend(loc="upper left")
    axes.grid(alpha=0.25)
    figure.savefig(path, dpi=130)
