"""Large batches on a click-through task: CowClip and the scaling rules, beside the small batch they start from.

    python benchmarks/ctr.py --tune tuning.jsonl     # learning rate and L2 at the base batch, validation only
    python benchmarks/ctr.py --out runs.jsonl        # whatever is missing in runs.jsonl; resumable
    python benchmarks/ctr.py --table runs.jsonl

Planted rather than real data: what CowClip is about are ids of fields with many categories, seen a few times or
thousands of times, and no data set of that kind is at hand (Adult income has 42 countries at most). Ten fields of 10 to
20,000 ids drawn by Zipf's law and four numbers; the logit is a sum of effects of the ids, of inner products of hidden
factors of pairs of fields and of a curve of the numbers; a quarter are clicks. ``best`` in the table is the planted
logit's own. 2^18 examples to train on, 2^15 each to validate and to test; a run's seed draws them all.

The model is DeepFM (first order, factorisation machine, two hidden layers; embeddings 10 wide, all fields in one
table) under Adam, dense gradients, L2 on the embeddings only, a constant rate; every run, of whatever arm, is scored
after the epoch that was best on the validation set. Scaling to n times the base batch, by Zheng et al. 2022 (arXiv
2204.06240): ``linear``: all rates x n; ``sqrt``: all rates and L2 x sqrt(n); ``rule``: the
embeddings' rate as it was, L2 x n, the dense layers' x sqrt(n) with a warm-up of an epoch. On top of ``rule``:
``cowclip``, r = 1, zeta = 1e-5 on the mean loss, as in the authors' code; ``cowclip_sum``, the same thresholds for a
summed loss, that is r and zeta over the batch size; ``cowclip_10``, ten times those. These are all that were tried. All
arms start from the larger embeddings (0.01) that the rule asks for. At 64x the embeddings' rate times the number of
steps is at most 0.64, about twice that of the authors' runs on Criteo at 128x.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.paired import Comparison, carry_out, compare, holm, lines
from dynguard import FlowManager
from dynguard_plugins.embeddings.cowclip import CowClip

# --- the task --------------------------------------------------------------------------------------------------------

FIELDS, NUMBERS, FACTORS, WIDTH = 10, 4, 4, 10
SIZES = np.geomspace(10, 20_000, FIELDS).astype(int)
STARTS = np.concatenate([[0], np.cumsum(SIZES)[:-1]])
ZIPF, CLICKS, TRAIN, HELD = 1.05, 0.25, 2**18, 2**15
BASE, TIMES = 64, (16, 64)
SEEDS, TUNING_SEEDS = tuple(range(5)), (100, 101)
RATES, DECAYS = (0.0003, 0.001, 0.003), (1e-6, 1e-5, 1e-4, 1e-3)
EPOCHS = (5, 10)  # at most: of the base batch, which gains next to nothing after the third, and of larger ones
# Thresholds of CowClip over those of a summed loss; None for its own defaults.
CLIPS = {"cowclip": None, "cowclip_10": 10.0, "cowclip_sum": 1.0}
SCALINGS = ("linear", "sqrt", "rule", *CLIPS)
METRICS = {"auc": 1, "log-loss": -1}


@dataclass(frozen=True)
class Clicks:
    """(n, 10) ids in one table, (n, 4) numbers, (n,) clicks, (n,) planted logits."""

    ids: torch.Tensor
    numbers: torch.Tensor
    clicks: torch.Tensor
    logits: torch.Tensor

    def part(self, rows: torch.Tensor | slice) -> Clicks:
        return Clicks(self.ids[rows], self.numbers[rows], self.clicks[rows], self.logits[rows])


def draw(seed: int, count: int = TRAIN + 2 * HELD) -> Clicks:
    """Planted clicks."""
    from scipy import optimize, special  # type: ignore[import-untyped] # scipy ships no types

    rng = np.random.default_rng([seed, 7])
    ids = np.stack([rng.permutation(size)[zipf(rng, size, count)] for size in SIZES], 1) + STARTS
    numbers = rng.normal(size=(count, NUMBERS))
    effect = rng.normal(size=SIZES.sum()) * 0.35
    hidden = rng.normal(size=(SIZES.sum(), FACTORS)) * 0.4
    logits = effect[ids].sum(1) + np.sin(2 * numbers).sum(1) * 0.3
    for one, other in itertools.combinations(range(FIELDS), 2):
        if rng.random() < 0.4:
            logits += (hidden[ids[:, one]] * hidden[ids[:, other]]).sum(1)
    logits += optimize.brentq(lambda b: special.expit(logits + b).mean() - CLICKS, -20, 20)
    clicks = rng.random(count) < special.expit(logits)
    shown = [torch.from_numpy(a) for a in (ids, numbers.astype(np.float32), clicks.astype(np.float32), logits)]
    return Clicks(*shown)


def zipf(rng: np.random.Generator, size: int, count: int) -> np.ndarray[Any, Any]:
    p = np.arange(1, size + 1) ** -ZIPF
    return rng.choice(size, count, p=p / p.sum())


class DeepFM(nn.Module):
    """Guo et al. 2017, arXiv 1703.04247: first order, factorisation machine and a small deep part."""

    def __init__(self) -> None:
        super().__init__()
        rows = int(SIZES.sum())
        self.first, self.embedding = nn.Embedding(rows, 1), nn.Embedding(rows, WIDTH)
        for table in (self.first, self.embedding):
            nn.init.normal_(table.weight, std=0.01)
        self.numbers = nn.Linear(NUMBERS, 1)
        self.deep = nn.Sequential(
            nn.Linear(FIELDS * WIDTH + NUMBERS, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
        )  # fmt: skip

    def forward(self, ids: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """(b,) logits."""
        rows = self.embedding(ids)
        pairs = (rows.sum(1).square() - rows.square().sum(1)).sum(1) / 2
        deep = self.deep(torch.cat([rows.flatten(1), numbers], 1)).squeeze(1)
        total: torch.Tensor = self.first(ids).sum((1, 2)) + self.numbers(numbers).squeeze(1) + pairs + deep
        return total


@dataclass(frozen=True)
class Setting:
    """What is tuned, at the base batch."""

    lr: float
    decay: float


# What --tune found best.
SETTING = Setting(0.001, 1e-4)


@dataclass(frozen=True)
class Run:
    """One training run; the base batch is ("base", 1)."""

    arm: str
    times: int
    seed: int


def optimizer_of(model: DeepFM, run: Run, setting: Setting) -> torch.optim.Adam:
    """Adam of two groups, the tables and all else, scaled as the arm says."""
    n = run.times
    tables, decay, dense = {
        "linear": (n, 1.0, n), "sqrt": (math.sqrt(n), math.sqrt(n), math.sqrt(n))
    }.get(run.arm, (1.0, n, math.sqrt(n)))  # fmt: skip
    embeddings = [model.first.weight, model.embedding.weight]
    rest = [*model.numbers.parameters(), *model.deep.parameters()]
    groups: list[dict[str, Any]] = [
        {"params": embeddings, "lr": setting.lr * tables, "weight_decay": setting.decay * decay},
        {"params": rest, "lr": setting.lr * dense, "weight_decay": 0.0},
    ]
    return torch.optim.Adam(groups, fused=True)


def train(data: Clicks, run: Run, setting: Setting) -> Iterator[tuple[DeepFM, FlowManager | None]]:
    """The model and its manager, if any, after every epoch."""
    torch.manual_seed(run.seed)
    model, batch = DeepFM(), BASE * run.times
    optimizer = optimizer_of(model, run, setting)
    rate, step = optimizer.param_groups[1]["lr"], 0
    warmup = len(data.clicks) // batch if run.arm in ("rule", *CLIPS) else 1
    generator = torch.Generator().manual_seed(run.seed + 1000)
    with tempfile.TemporaryDirectory() as folder:
        flow = None
        if run.arm in CLIPS:
            r = (CLIPS[run.arm] or batch) / batch
            flow = FlowManager(model, optimizer, plugins=[CowClip(r=r, zeta=1e-5 * r)], run_dir=Path(folder) / "run")
        for _ in range(EPOCHS[run.times > 1]):
            for rows in torch.randperm(len(data.clicks), generator=generator).split(batch):  # type: ignore[no-untyped-call] # torch leaves it untyped
                step += 1
                optimizer.param_groups[1]["lr"] = rate * min(1.0, step / warmup)
                loss = F.binary_cross_entropy_with_logits(model(data.ids[rows], data.numbers[rows]), data.clicks[rows])
                if flow is not None:
                    flow.observe(loss=loss)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
                optimizer.step()
            yield model, flow
        if flow is not None:
            flow.close()


@torch.no_grad()
def scored(model: DeepFM | None, data: Clicks) -> dict[str, float]:
    """AUC and log-loss, of the planted logits without a model."""
    from scipy import stats

    logits = data.logits if model is None else model(data.ids, data.numbers).double()
    ones, zeros = logits[data.clicks > 0].numpy(), logits[data.clicks == 0].numpy()
    auc = stats.mannwhitneyu(ones, zeros).statistic / (len(ones) * len(zeros))
    loss = float(F.binary_cross_entropy_with_logits(logits, data.clicks.double()))
    return {"auc": float(auc), "log-loss": loss}


def figures(run: Run, setting: Setting) -> dict[str, Any]:
    """Test figures after the epoch whose log-loss on the validation set is least."""
    data, start, least, found = draw(run.seed), time.perf_counter(), math.inf, dict[str, float]()
    valid, test = data.part(slice(TRAIN, TRAIN + HELD)), data.part(slice(TRAIN + HELD, None))
    if run.arm == "best":
        return vars(run) | vars(setting) | scored(None, test) | {"seconds": 0.0}
    for epoch, (model, flow) in enumerate(train(data.part(slice(TRAIN)), run, setting), 1):
        loss = scored(model, valid)["log-loss"]
        if loss < least:
            least, found = loss, scored(model, test) | {"epoch": epoch} | clipped_share(flow)
    return vars(run) | vars(setting) | found | {"seconds": round(time.perf_counter() - start, 1)}


def clipped_share(flow: FlowManager | None) -> dict[str, float]:
    """Of the rows looked up so far."""
    sections = [s for s in flow.summarize() if s.title == "CowClip"] if flow is not None else []
    counts = [dict(zip(t.columns, row, strict=True)) for s in sections for t in s.tables for row in t.rows]
    looked, clipped = (np.sum([c[name] for c in counts]) for name in ("rows looked up", "clipped"))
    return {"clipped": float(clipped / looked)} if counts else {}


def tune(path: Path) -> None:
    """Validation figures after each epoch at the base batch; the means by setting."""
    done = {(row["lr"], row["decay"], row["seed"]): row["valid"] for row in lines(path)}
    for lr, decay, seed in itertools.product(RATES, DECAYS, TUNING_SEEDS):
        if (lr, decay, seed) not in done:
            data = draw(seed)
            held = data.part(slice(TRAIN, TRAIN + HELD))
            epochs = train(data.part(slice(TRAIN)), Run("base", 1, seed), Setting(lr, decay))
            done[lr, decay, seed] = [scored(model, held) for model, _ in epochs]
            row = {"lr": lr, "decay": decay, "seed": seed, "valid": done[lr, decay, seed]}
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    for lr, decay in itertools.product(RATES, DECAYS):
        for epoch in range(EPOCHS[0]):
            mean = [np.mean([v[epoch][m] for k, v in done.items() if k[:2] == (lr, decay)]) for m in METRICS]
            print(f"lr {lr:g} decay {decay:g} epoch {epoch + 1}: AUC {mean[0]:.4f}, log-loss {mean[1]:.4f}")


# --- the comparison --------------------------------------------------------------------------------------------------


def read(path: Path) -> dict[Run, dict[str, Any]]:
    """The runs of a file that were made with the present setting."""
    return {
        Run(row["arm"], row["times"], row["seed"]): row
        for row in lines(path)
        if all(row[name] == value for name, value in vars(SETTING).items())
    }


def sweep(path: Path, wanted: Iterable[Run]) -> None:
    """Run what the file does not hold, one line each."""
    have = read(path)
    carry_out(path, [run for run in wanted if run not in have], lambda run: figures(run, SETTING))


def arms() -> Iterator[tuple[str, int]]:
    """All of them with their multiples of the base batch."""
    yield from (("best", 1), ("base", 1))
    yield from ((arm, n) for n, arm in itertools.product(TIMES, SCALINGS))


def table(runs: Mapping[Run, dict[str, Any]]) -> str:
    """Markdown."""
    tried: list[tuple[str, Comparison]] = []
    for metric, (arm, n) in itertools.product(METRICS, list(arms())[2:]):
        for base in (("base", 1), ("rule", n))[: 1 + (arm in CLIPS)]:
            own, other = by_seed(runs, arm, n, metric), by_seed(runs, *base, metric)
            both = sorted(own.keys() & other.keys())
            if len(both) > 2:
                found = compare([own[s] for s in both], [other[s] for s in both], METRICS[metric])
                tried.append((f"| {n}x | {arm} | {base[0]} | {metric} | ", found))
    holm([found for _, found in tried])
    out = ["| batch | arm | beside | metric | " + " | ".join(Comparison.COLUMNS) + " |"]
    out.append("|---" * (4 + len(Comparison.COLUMNS)) + "|")
    out += [start + " | ".join(found.cells()) + " |" for start, found in tried]
    return "\n".join([*out, "", *_means(runs)])


def by_seed(runs: Mapping[Run, dict[str, Any]], arm: str, times: int, metric: str) -> dict[int, float]:
    return {run.seed: row[metric] for run, row in runs.items() if (run.arm, run.times) == (arm, times)}


def _means(runs: Mapping[Run, dict[str, Any]]) -> Iterator[str]:
    names = (*METRICS, "epoch", "clipped", "seconds")
    yield "| batch | arm | runs | " + " | ".join(names) + " |"
    yield "|---" * (3 + len(names)) + "|"
    for arm, n in arms():
        rows = [row for run, row in runs.items() if (run.arm, run.times) == (arm, n)]
        if rows:
            means = [f"{np.mean([row[name] for row in rows]):.4g}" if name in rows[0] else "" for name in names]
            yield f"| {n}x | {arm} | {len(rows)} | " + " | ".join(means) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", type=Path, help="JSON-lines file of the tuning; what is in it is not run again")
    parser.add_argument("--out", type=Path, help="JSON-lines file; what is in it is not run again")
    parser.add_argument("--table", type=Path, help="print the tables of such a file")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    torch.set_num_threads(1)
    options = parser.parse_args()
    if options.table is not None:
        print(table(read(options.table)))
    elif options.tune is not None:
        tune(options.tune)
    elif options.out is not None:
        sweep(options.out, [Run(arm, n, seed) for seed in options.seeds for arm, n in arms()])
    else:
        parser.error("say --tune, --out or --table")


if __name__ == "__main__":
    main()
