"""What a rollback saves, what snapshots cost, and how the spike detector scales with the number of layers.

    python benchmarks/recovery.py [--seeds 0 1 2 3 4] [--quick]

- ``rollback``: a small GPT on text trains with and without a weight that turns NaN on the way; final held-out losses.
- ``snapshot``: whole steps of a 6-layer d=384 GPT with snapshots every 50 steps over those with none, interleaved.
- ``layers``: seconds of ``spike`` on one event of 10,000 layers, one thread.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from copy import deepcopy
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional as F

from benchmarks import zoo
from benchmarks.overhead import Trainer
from benchmarks.workloads import WORKLOADS
from dynguard import FlowManager
from dynguard.testing import gradient_event
from dynguard_plugins.stability.spike import Spike


def final_loss(seed: int, *, harmed: bool, steps: int) -> tuple[float, list[str]]:
    """Held-out loss after training, and what the guard did."""
    run = zoo.make("gpt", seed)
    model, optimizer = run.models[""], run.optimizers[""]
    flow = FlowManager(model, optimizer, plugins=["spike", "health"], close_timeout=1.0)
    for step in range(steps):
        run.set_rate(step)
        if harmed and step == steps * 2 // 5 + 7:
            with torch.no_grad():
                next(p for n, p in model.named_parameters() if n == "blocks.0.up.weight")[3, 3] = float("nan")
        for _, loss in run.phases(run.batch(step)):
            flow.observe(loss=loss)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
            optimizer.step()
    flow.close()
    held_out = [run.batch(10_000 + i) for i in range(20)]
    with torch.no_grad():
        losses = [float(F.cross_entropy(model(b[:, :-1]).flatten(0, 1), b[:, 1:].flatten())) for b in held_out]
    return statistics.fmean(losses), [f"{i.action} at {i.step}" for i in flow.interventions]


def rollback(console: Console, seeds: list[int], steps: int) -> None:
    table = Table(title=f"rollback: GPT, {steps} steps, a NaN weight at step {steps * 2 // 5 + 7}")
    for column in ("seed", "unharmed", "rolled back", "ratio", "interventions"):
        table.add_column(column)
    ratios = []
    for seed in seeds:
        clean, _ = final_loss(seed, harmed=False, steps=steps)
        harmed, deeds = final_loss(seed, harmed=True, steps=steps)
        ratios.append(harmed / clean)
        table.add_row(str(seed), f"{clean:.4f}", f"{harmed:.4f}", f"{harmed / clean:.4f}", ", ".join(deeds))
    table.add_row("mean", "", "", f"{statistics.fmean(ratios):.4f}", f"{min(ratios):.4f} .. {max(ratios):.4f}")
    console.print(table)


def snapshot(console: Console, rounds: int) -> None:
    workload = WORKLOADS["gpt"]
    model = workload.build()
    with tempfile.TemporaryDirectory() as folder:
        trainers = {
            every: Trainer(workload, deepcopy(model)).guard(Path(folder) / str(every), snapshot_every=every)
            for every in (0, 50)
        }
        for trainer in trainers.values():
            for _ in range(60):
                trainer.step()
        shares = []
        for _ in range(rounds):
            seconds = {}
            for every, trainer in trainers.items():
                start = time.perf_counter()
                for _ in range(50):  # a whole period: exactly one snapshot is in it
                    trainer.step()
                seconds[every] = time.perf_counter() - start
            shares.append(seconds[50] / seconds[0])
        for trainer in trainers.values():
            trainer.close()
    low, middle, high = statistics.quantiles(shares, n=4) if len(shares) > 1 else shares * 3
    console.print(f"snapshot: step with one every 50 over step with none: {middle:.4f} ({low:.4f} .. {high:.4f})")


def layers(console: Console, count: int = 10_000) -> None:
    spike = Spike()
    times = []
    event = gradient_event(norms={str(i): 1.0 for i in range(count)})
    for step in range(600):
        event.step = step
        torch.as_tensor(event.statistics.norms).copy_(torch.rand(count) + 0.5)  # in place
        start = time.perf_counter()
        signal = spike.on_gradients(event)
        if signal.learn is not None:
            signal.learn([float(v) for v in signal.score])
        times.append(time.perf_counter() - start)
    last = times[-100:]
    console.print(
        f"layers: {count} layers: {1e3 * statistics.median(last):.2f} ms a step, at most {1e3 * max(last):.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="only show that it runs; the figures mean nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=140)
    layers(console, 100 if options.quick else 10_000)
    rollback(console, options.seeds[:1] if options.quick else options.seeds, 100 if options.quick else 800)
    snapshot(console, 1 if options.quick else options.rounds)


if __name__ == "__main__":
    main()
