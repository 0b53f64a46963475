"""What plugins and presets cost on a whole step: ratios to the plain step, taken in turns.

    python benchmarks/plugins.py [--models gpt mlp] [--plugins default deep rows ...] [--rounds 15]

A contender trains the model under the plugins of its name, as a user would have it, with history and no console. Blocks
are long enough to hold a check every 50 steps; what happens more rarely is in the mean and not in the median.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.timing import interleave, quiet, ratios
from benchmarks.workloads import WORKLOADS, Workload
from dynguard import FlowManager

PLUGINS = ("default", "rows", "popularity", "collapse", "towers", "precursor", "flow", "eos", "deep", "spam", "helene")
WARM = 120  # detectors have calibrated, and the first snapshots are taken


def contender(workload: Workload, plugins: list[str], folder: Path) -> Callable[[], None]:
    """A step of the model under these plugins (none: unwatched)."""
    torch.manual_seed(0)
    model = workload.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batches = workload.batches()
    flow = None
    if plugins:
        flow = FlowManager(model, optimizer, plugins=[*plugins, "-console"], loss_fn=workload.loss, run_dir=folder)

    def step() -> None:
        batch = next(batches)
        loss = workload.loss(model, batch)
        if flow is not None:
            flow.observe(loss=loss, batch=batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=tuple(WORKLOADS), default=("gpt", "mlp"))
    parser.add_argument("--plugins", nargs="+", default=PLUGINS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=50, help="steps in a block")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| model | plugins | step over the plain step: median (quartiles) | mean |\n|---|---|---|---|")
    for model in options.models:
        with tempfile.TemporaryDirectory() as folder, quiet():
            steps = {"plain": contender(WORKLOADS[model], [], Path(folder))}
            for name in options.plugins:
                steps[name] = contender(WORKLOADS[model], [name], Path(folder) / name)
            for step in steps.values():
                for _ in range(WARM):
                    step()
            seconds = interleave(steps, options.rounds, options.calls)
        for name in options.plugins:
            values = ratios(seconds, name, "plain")
            low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
            mean = statistics.fmean(seconds[name]) / statistics.fmean(seconds["plain"])
            print(f"| {model} | {name} | {middle:.3f} ({low:.3f} .. {high:.3f}) | {mean:.3f} |", flush=True)


if __name__ == "__main__":
    main()
