"""What dynguard costs, as ratios: everything that is compared takes turns in one process.

    python benchmarks/overhead.py [--quick] [--only guard step reads dispatch import] [--json FILE]

- ``guard``: the guard's own work on a clean step (the optimizer's hooks, called on real gradients with fresh noise)
  over one ``clip_grad_norm_`` of the same gradients. ``floor`` is one bare read of them, ``get_total_norm``.
- ``step``: whole training steps over plain ones: with ``clip_grad_norm_``, with dynguard's default plugins, with the
  ``clip`` plugin as well (also over the step with ``clip_grad_norm_``), and with published releases of stabilityguard.
  ``background`` is the worker threads' processor time per guarded second.
- ``reads``: host reads per clean step beyond those of the optimizer itself, counted, not timed.
- ``dispatch``: nanoseconds per event on a hot hook with 20 trivial plugins, beside pluggy's own call.
- ``import``: seconds of ``import dynguard`` over those of starting Python.

A ratio is taken per round; printed are its median and quartiles over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict
from importlib import metadata
from math import exp
from pathlib import Path
from typing import Any

import pluggy
import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks import peers
from benchmarks.reads import HostReads
from benchmarks.timing import QUICK, Effort, Figure, Work, interleave, quiet, ratios
from benchmarks.workloads import WORKLOADS, Workload
from dynguard import FlowManager, hookimpl
from dynguard.arrays import as_on_device
from dynguard.bus import Bus
from dynguard.hookspecs import PROJECT, Hooks

PARTS = ("guard", "step", "reads", "dispatch", "import")


class Trainer:
    """One model with its optimizer and whatever watches it; ``step()`` is one whole training step."""

    def __init__(self, workload: Workload, model: nn.Module, *, fused: bool = False) -> None:
        self.workload = workload
        self.model = model
        self.parameters = list(model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-5, fused=fused)
        self.batches = workload.batches()
        self.watched: Any = self.optimizer
        self.flow: FlowManager | None = None
        self.clip = False

    def guard(self, folder: Path, plugins: Sequence[str] = ("default",), **settings: Any) -> Trainer:
        self.flow = FlowManager(self.model, self.optimizer, plugins=list(plugins), run_dir=folder, **settings)
        return self

    def peer(self, version: str, folder: Path) -> Trainer:
        guarded = peers.load(version).GuardedOptimizer
        self.watched = guarded(self.optimizer, self.model, log_dir=str(folder))
        return self

    def backward(self) -> None:
        loss = self.workload.loss(self.model, next(self.batches))
        if self.flow is not None:
            self.flow.observe(loss=loss)
        loss.backward()  # type: ignore[no-untyped-call] # torch leaves it untyped

    def step(self) -> None:
        self.backward()
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.watched.step()
        self.optimizer.zero_grad()

    def warm_up(self, effort: Effort) -> None:
        for _ in range(effort.warm if self.flow is not None else min(effort.warm, 10)):
            self.step()

    def close(self) -> None:
        if self.flow is not None:
            self.flow.close()
            if self.flow._bus.failures:
                raise RuntimeError(f"the figures would flatter dynguard: plugins failed: {self.flow._bus.failures}")
        if self.watched is not self.optimizer:
            self.watched.close()


def measure_guard(workload: Workload, effort: Effort, folder: Path) -> list[Figure]:
    """The guard's hooks over one clip_grad_norm_, on the same gradients."""
    trainer = Trainer(workload, workload.build()).guard(folder / "guard")
    assert trainer.flow is not None
    trainer.warm_up(effort)
    trainer.backward()
    base = [p.grad for p in trainer.parameters if p.grad is not None]
    optimizer, parameters = trainer.optimizer, trainer.parameters
    before, after = hooks(optimizer)

    def prepare() -> None:
        common = random.gauss(0.0, 0.2)
        factors = [exp(common + random.gauss(0.0, 0.1)) for _ in base]
        for parameter, gradient in zip(parameters, torch._foreach_mul(base, factors), strict=True):
            parameter.grad = gradient

    def guard() -> None:
        for hook in before:
            hook(optimizer, (), {})
        for hook in after:
            hook(optimizer, (), {})

    works: dict[str, Work] = {
        "nothing": lambda: None,
        "floor": lambda: torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]),
        "clip": lambda: torch.nn.utils.clip_grad_norm_(parameters, float("inf")),
        "dynguard": guard,
    }
    seconds = interleave(works, effort.rounds, effort.calls, prepare)
    interventions = len(trainer.flow.interventions)
    trainer.close()
    notes = {"us": 1e6 * statistics.median(seconds["dynguard"]), "interventions": interventions}
    return [
        Figure.of(
            "guard", workload.name, "dynguard", "x clip_grad_norm_", ratios(seconds, "dynguard", "clip"), **notes
        ),
        Figure.of("guard", workload.name, "floor", "x clip_grad_norm_", ratios(seconds, "floor", "clip")),
    ]


def hooks(optimizer: torch.optim.Optimizer) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """The hooks that run before and after the optimizer's own step."""
    before = list(optimizer._optimizer_step_pre_hooks.values())
    after = list(optimizer._optimizer_step_post_hooks.values())
    if not before:
        raise RuntimeError("the guard has put no hook on the optimizer: nothing to measure")
    return before, after


def measure_step(workload: Workload, effort: Effort, folder: Path) -> list[Figure]:
    """Whole steps, each contender with a copy of the same model."""
    model = workload.build()
    trainers = {
        "plain": Trainer(workload, model),
        "clip_grad_norm_": Trainer(workload, deepcopy(model)),
        "dynguard": Trainer(workload, deepcopy(model)).guard(folder / "step"),
    }
    trainers["clip_grad_norm_"].clip = True
    trainers["dynguard + clip"] = Trainer(workload, deepcopy(model)).guard(folder / "clip", plugins=["default", "clip"])
    for version in peers.VERSIONS if effort.peers else ():
        trainers[f"{peers.NAME} {version}"] = Trainer(workload, deepcopy(model)).peer(version, folder / version)
    for trainer in trainers.values():
        trainer.warm_up(effort)
    start = time.perf_counter()
    trainers["plain"].step()
    calls = max(1, min(50, round(effort.block / (time.perf_counter() - start))))
    works: dict[str, Work] = {name: trainer.step for name, trainer in trainers.items()}
    seconds = interleave(works, effort.rounds, calls)
    share = background(trainers["dynguard"], 30 * effort.block)
    flow = trainers["dynguard"].flow
    assert flow is not None
    notes = {"background": share, "interventions": len(flow.interventions)}
    for trainer in trainers.values():
        trainer.close()
    milliseconds = {name: 1e3 * statistics.median(values) for name, values in seconds.items()}
    clipped = ratios(seconds, "dynguard + clip", "clip_grad_norm_")
    return [
        Figure.of("step", workload.name, "dynguard + clip", "x step with clip_grad_norm_", clipped),
        *[
        Figure.of(
            "step", workload.name, name, "x plain step", ratios(seconds, name, "plain"),
            ms=milliseconds[name], **(notes if name == "dynguard" else {}),
        )
        for name in trainers
        ],
    ]  # fmt: skip


def background(trainer: Trainer, seconds: float) -> float:
    """Processor time of all other threads, per second of guarded training: sinks must not hide their cost there."""
    start, process, thread = time.perf_counter(), time.process_time(), time.thread_time()
    elapsed = 0.0
    while not elapsed or elapsed < seconds:
        trainer.step()
        elapsed = time.perf_counter() - start
    others = (time.process_time() - process) - (time.thread_time() - thread)
    return max(0.0, others) / elapsed


def measure_reads(workload: Workload, effort: Effort, folder: Path) -> list[Figure]:
    """Host reads per clean step: those of a guarded step less those of a plain one."""
    with as_on_device():  # from the first step on, so that what detectors keep is what they would keep there
        plain = _reads(Trainer(workload, workload.build(), fused=True), effort)
        guarded = _reads(Trainer(workload, workload.build(), fused=True).guard(folder / "reads"), effort)
    counts = [count - bare for count, bare in zip(guarded, plain, strict=True)]
    return [Figure.of("reads", workload.name, "dynguard", "per step", counts, most=max(counts), least=min(counts))]


def _reads(trainer: Trainer, effort: Effort) -> list[float]:
    trainer.warm_up(effort)
    counts: list[float] = []
    for _ in range(2 * effort.rounds):
        with HostReads().counting() as reads:
            trainer.step()
        counts.append(float(sum(reads.counts.values()) + sum(reads.elsewhere.values())))
    trainer.close()
    return counts


class Trivial:
    """A plugin that does nothing."""

    @hookimpl
    def on_gradients(self, event: object) -> None:
        return None


def measure_dispatch(effort: Effort, folder: Path, plugins: int = 20) -> list[Figure]:
    """Nanoseconds per event, by the bus and by pluggy."""
    bus = Bus([(f"plugin{i:02}", Trivial()) for i in range(plugins)])
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(Hooks)
    for i in range(plugins):
        manager.register(Trivial(), name=f"plugin{i:02}")
    event, loops = object(), 100 * effort.calls
    fast, slow = bus.gradients, manager.hook.on_gradients

    def through_bus() -> None:
        for _ in range(loops):
            fast(event)

    def through_pluggy() -> None:
        for _ in range(loops):
            slow(event=event)

    works: dict[str, Work] = {"dynguard": through_bus, "pluggy": through_pluggy}
    seconds = interleave(works, 4 * effort.rounds, 1)
    return [
        Figure.of(
            "dispatch", f"{plugins} plugins", name, "ns per event", [1e9 * value / loops for value in seconds[name]]
        )
        for name in works
    ]


def measure_import(effort: Effort, folder: Path) -> list[Figure]:
    """Seconds that ``import dynguard`` adds to starting Python, and whether torch came along."""
    code = "import sys, dynguard; sys.exit('torch' in sys.modules)"
    torch_too = subprocess.run([sys.executable, "-c", code], cwd=folder, check=False).returncode
    works: dict[str, Work] = {
        "pass": lambda: subprocess.run([sys.executable, "-c", "pass"], cwd=folder, check=True),
        "dynguard": lambda: subprocess.run([sys.executable, "-c", "import dynguard"], cwd=folder, check=True),
    }
    seconds = interleave(works, min(9, effort.rounds), 1)
    extra = [a - b for a, b in zip(seconds["dynguard"], seconds["pass"], strict=True)]
    return [Figure.of("import", "", "import dynguard", "s over starting", extra, torch_imported=torch_too)]


def machine(threads: int) -> dict[str, Any]:
    """What a record of these figures must say about where they come from."""
    packages = ("dynguard", "torch", "numpy", "pluggy")
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    model = next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
    return {
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python", *sys.argv]),
        "processor": model,
        "cores": os.cpu_count(),
        "threads": threads,
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in packages},
    }


def table(figures: Sequence[Figure]) -> Table:
    shown = Table("part", "model", "what", title="What dynguard costs", box=SIMPLE)
    shown.add_column("median", justify="right")
    shown.add_column("quartiles", justify="right")
    shown.add_column("unit")
    shown.add_column("notes")
    last = ""
    for f in figures:
        if last and f.part != last:
            shown.add_section()
        last = f.part
        notes = ", ".join(f"{name} {value:.4g}" for name, value in f.notes.items() if value or name != "interventions")
        shown.add_row(f.part, f.model, f.what, f"{f.median:.3g}", f"{f.low:.3g} .. {f.high:.3g}", f.unit, notes)
    return shown


def measure(arguments: argparse.Namespace, effort: Effort) -> list[Figure]:
    chosen = [WORKLOADS[name] for name in arguments.models]
    by_model = {"guard": measure_guard, "step": measure_step, "reads": measure_reads}
    once = {"dispatch": measure_dispatch, "import": measure_import}
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as scratch:
        for part in [part for part in PARTS if part in arguments.only]:
            for workload in chosen if part in by_model else [None]:
                # No live display: its thread would take turns with what is timed.
                print(f"measuring {part} {workload.name if workload else ''}", file=sys.stderr)
                torch.manual_seed(arguments.seed)
                random.seed(arguments.seed)
                folder = Path(tempfile.mkdtemp(prefix=part, dir=scratch))
                with quiet():
                    figures += by_model[part](workload, effort, folder) if workload else once[part](effort, folder)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to measure")
    parser.add_argument("--models", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=Effort.rounds)
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-peers", action="store_true", help="leave stabilityguard out (nothing is installed)")
    parser.add_argument("--quick", action="store_true", help="only show that it runs; the figures mean nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures with machine and versions")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    effort = QUICK if arguments.quick else Effort(rounds=arguments.rounds)
    effort = Effort(**{**asdict(effort), "peers": not arguments.no_peers})
    console = Console()
    console = Console(width=max(console.width, 140))  # figures are not to be folded
    figures = measure(arguments, effort)
    console.print(table(figures))
    if arguments.quick:
        console.print("A quick run: it shows that the benchmark works; the figures mean nothing.")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        record = {"machine": machine(arguments.threads), "figures": [asdict(figure) for figure in figures]}
        arguments.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        console.print(f"written to {arguments.json}")


if __name__ == "__main__":
    main()
