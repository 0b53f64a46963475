"""Repairs under planted spikes: a small language model's held-out loss with and without them, arm by arm.

    python benchmarks/repair.py --out runs.jsonl                  # whatever is missing in runs.jsonl; resumable
    python benchmarks/repair.py --out runs.jsonl --arms spam clip --lrs 1 2 --seeds 0 1
    python benchmarks/repair.py --table runs.jsonl

Every arm trains the same model on the same batches under the same plan of spikes: two steps in a hundred after the
warm-up have all gradients, or one block's, multiplied by 50 to 1000, or a batch of noise. What is fixed beforehand: the
plan, the schedule (linear warm-up, cosine), and spam's interval and warm-up at a fifth of the paper's (100 and 30 for
500 and 150), as a run has 400 steps. A run that ends worse than guessing counts as guessing (ln 128).
"""

from __future__ import annotations

import argparse
import itertools
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import paired
from benchmarks.language import UNIFORM, LanguageModel, batches, corrupted, held_out_loss, loss_of
from dynguard import FlowManager

STEPS, WARMUP, BATCH = 400, 40, 16
BASE_LR = 2e-3
LRS, SEEDS = (1.0, 2.0, 4.0), (0, 1, 2, 3, 4)
RATE = 0.02
BASELINE = "clip"


def spam(**options: Any) -> list[Any]:
    from dynguard_plugins.stability.spam import Spam

    return [Spam(**({"interval": 100, "warmup": 30, "cooldown": 30} | options))]


def helene() -> list[Any]:
    from dynguard_plugins.stability.helene import Helene

    return [Helene()]


# The plugins of each arm; None trains without a manager.
ARMS: dict[str, Callable[[], Sequence[Any]] | None] = {
    "adamw": None,
    "clip": None,  # torch's clip_grad_norm_ at 1.0
    "spam": spam,
    "spam_clip": lambda: spam(interval=None),
    "helene": helene,
    "guard": lambda: ["default", "-console", "-history"],
    # not tried by default
    "spam_adaclip": lambda: spam(clip="adaclip"),
    "adaclip": lambda: spam(clip="adaclip", interval=None),
}
TRIED = ("adamw", "clip", "spam", "spam_clip", "helene", "guard")


@dataclass(frozen=True)
class Spike:
    """What happens at one step."""

    kind: str  # "all", "block" or "batch"
    factor: float = 1.0
    block: int = 0


def plan(seed: int) -> dict[int, Spike]:
    """The spikes of a run by step: the same for all arms."""
    rng = np.random.default_rng([seed, 20])
    spikes = {}
    for step in range(WARMUP, STEPS):
        strikes, kind = rng.random() < RATE, ("all", "block", "batch")[rng.integers(3)]
        factor, block = float(np.exp(rng.uniform(math.log(50), math.log(1000)))), int(rng.integers(2))
        if strikes:
            spikes[step] = Spike(kind, factor, block)
    return spikes


def rate(step: int) -> float:
    """Factor of the learning rate: linear warm-up, then a cosine to a tenth."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    return 0.1 + 0.45 * (1.0 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))


def run(arm: str, lr: float, seed: int, spiked: bool, steps: int = STEPS) -> dict[str, Any]:
    """One training run; what it came to."""
    torch.manual_seed(seed)
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr * BASE_LR, betas=(0.9, 0.999), weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    spikes = plan(seed) if spiked else {}
    noise = torch.Generator().manual_seed(seed + 1000)
    make = ARMS[arm]
    start = time.perf_counter()
    result: dict[str, Any] = {"arm": arm, "lr": lr, "seed": seed, "spiked": spiked, "steps": steps}
    with tempfile.TemporaryDirectory() as folder:
        flow = None
        if make is not None:
            flow = FlowManager(model, optimizer, plugins=list(make()), loss_fn=loss_of, run_dir=Path(folder) / "run")
        for step, batch in zip(range(steps), batches(seed, BATCH), strict=False):
            spike = spikes.get(step)
            if spike is not None and spike.kind == "batch":
                batch = corrupted(noise, BATCH)
            loss = loss_of(model, batch)
            if flow is not None:
                flow.observe(loss=loss, batch=batch)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
            if spike is not None and spike.kind != "batch":
                plant(model, spike)
            if arm == BASELINE:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
        if flow is not None:
            result["interventions"] = len(flow.interventions)
            flow.close()
    return result | {
        "loss": held_out_loss(model), "spikes": sum(s < steps for s in spikes),
        "seconds": round(time.perf_counter() - start, 2),
    }  # fmt: skip


def plant(model: LanguageModel, spike: Spike) -> None:
    """Multiply the gradients, after backward and before anyone looks at them."""
    where = model if spike.kind == "all" else model.blocks[spike.block]
    for parameter in where.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(spike.factor)


Key = tuple[str, float, int, bool]


def read(path: Path) -> dict[Key, dict[str, Any]]:
    """The whole-length runs in a JSON-lines file; a line that was cut off is left out."""
    return {(r["arm"], r["lr"], r["seed"], r["spiked"]): r for r in paired.lines(path) if r["steps"] == STEPS}


def sweep(path: Path, wanted: Iterable[Key], steps: int) -> None:
    """Run what the file does not hold, one line each."""

    def work(key: Key) -> dict[str, Any] | None:
        try:
            return run(*key, steps)
        except ImportError as error:
            print(f"{key[0]}: left out, {error}", flush=True)
            return None

    have = read(path)
    paired.carry_out(path, [key for key in wanted if key not in have], work)


@dataclass
class Line:
    """An arm at one learning rate, and its comparison with the baseline by seed."""

    spiked: bool
    lr: float
    arm: str
    losses: list[float]
    comparison: paired.Comparison | None = None


def lines(runs: dict[Key, dict[str, Any]]) -> Iterator[Line]:
    """Means and paired differences, Holm-corrected over all arms and rates of one condition."""
    for spiked in (True, False):
        found = []
        for lr, arm in itertools.product(sorted({k[1] for k in runs}), [a for a in ARMS if a in {k[0] for k in runs}]):
            own = {k[2]: _bounded(r["loss"]) for k, r in runs.items() if k[:2] == (arm, lr) and k[3] is spiked}
            base = {k[2]: _bounded(r["loss"]) for k, r in runs.items() if k[:2] == (BASELINE, lr) and k[3] is spiked}
            line = Line(spiked, lr, arm, list(own.values()))
            both = sorted(own.keys() & base.keys())
            if arm != BASELINE and len(both) > 1:
                line.comparison = paired.compare([own[s] for s in both], [base[s] for s in both], better=-1)
            if own:
                found.append(line)
        paired.holm([line.comparison for line in found if line.comparison is not None])
        yield from found


def _bounded(loss: float) -> float:
    return min(loss, UNIFORM) if math.isfinite(loss) else UNIFORM


def table(runs: dict[Key, dict[str, Any]]) -> str:
    """Markdown."""
    out = [f"Held-out loss (nats per byte) after {STEPS} steps; difference to `{BASELINE}` paired by seed, 95 % t", ""]
    out[0] += f" interval, p Holm-corrected. Base rate {BASE_LR:g}."
    out += ["| spikes | lr | arm | runs | loss | difference | p |", "|---|---|---|---|---|---|---|"]
    for x in lines(runs):
        found = x.comparison
        way, p = (
            ("", "") if found is None else (f"{found.difference:+.4f} ± {found.half:.4f}", f"{found.corrected:.3g}")
        )
        mean = float(np.mean(x.losses))
        condition = "planted" if x.spiked else "none"
        out.append(f"| {condition} | {x.lr:g}x | {x.arm} | {len(x.losses)} | {mean:.4f} | {way} | {p} |")
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON-lines file; what is in it is not run again")
    parser.add_argument("--table", type=Path, help="print the table of such a file")
    parser.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=TRIED)
    parser.add_argument("--lrs", nargs="+", type=float, default=LRS, help=f"in units of {BASE_LR:g}")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--spikes", choices=("planted", "none", "both"), default="both")
    parser.add_argument("--steps", type=int, default=STEPS, help="fewer to try it out; such runs are not in the table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.table is not None:
        print(table(read(options.table)))
    elif options.out is not None:
        conditions = {"planted": (True,), "none": (False,), "both": (True, False)}[options.spikes]
        keys = itertools.product(options.seeds, options.lrs, conditions, options.arms)
        sweep(options.out, [(arm, lr, seed, spiked) for seed, lr, spiked, arm in keys], options.steps)
    else:
        parser.error("say --out or --table")


if __name__ == "__main__":
    main()
