"""The auto-fix of oscillating embedding rows on MovieLens-100K: ranking of held-out films with and without it.

    python benchmarks/movielens.py --tune tuning.jsonl     # learning rate, decay, epochs: plain arm, validation only
    python benchmarks/movielens.py --out runs.jsonl        # whatever is missing in runs.jsonl; resumable
    python benchmarks/movielens.py --table runs.jsonl

Matrix factorisation, 32 wide, by BPR (one sampled negative a positive) or pointwise (cross-entropy, four); every
rating counts as a positive. Leave-one-out by time: a user's last film is the test, the last but one the validation
(equal times in the file's order); NDCG@10 and HR@10 rank all films that the user had not rated before. Test figures
are made once, at the end of each run.

Conditions: ``clean``; ``items``: items are drawn at random until theirs are 5 % of the training interactions, and each
of these comes in every epoch with both labels: pointwise as (u, i, 1) and (u, i, 0), by BPR as (u, i > j) and
(u, j > i) with the same sampled j; ``spread``: likewise, for 5 % of all interactions drawn at random.

Arms: ``plain``; ``again``, plain with other batches and negatives from the same start (A/A); ``autofix``, the default;
``always``, without its sleeping gate; ``early``, a look every 50 steps and no gate. These are all that were tried.

The data come out of the wheel of recbole 1.2.1 (GroupLens' terms: not passed on), by pip into --data if not there.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.paired import Comparison, carry_out, compare, false_gains, holm, lines
from benchmarks.peers import FOLDER
from dynguard import FlowManager
from dynguard_plugins.embeddings.rows import Rows

WHEEL, INSIDE = "recbole-1.2.1-py3-none-any.whl", "recbole/dataset_example/ml-100k/ml-100k.inter"
WIDTH, TOP, SHARE, NEGATIVES = 32, 10, 0.05, 4
BATCH = {"bpr": 1024, "pointwise": 4096}
CONDITIONS = ("clean", "items", "spread")
SEEDS, TUNING_SEEDS = tuple(range(20)), (100, 101, 102)
RATES, DECAYS, LONGEST = (0.001, 0.003, 0.01, 0.03), (0.0, 1e-5, 1e-4), 40
METRICS, UNHARMED = ("ndcg", "hr"), "(plain, nothing planted)"

# The plugins of each arm; None trains without a manager.
ARMS: dict[str, Callable[[], Rows] | None] = {
    "plain": None,
    "again": None,
    "autofix": lambda: Rows(autofix=True),
    "always": lambda: Rows(autofix=True, room=0.0),
    "early": lambda: Rows(autofix=True, room=0.0, every=50),
}


@dataclass(frozen=True)
class Setting:
    """What is tuned."""

    lr: float
    decay: float
    epochs: int


# By loss and optimizer: what --tune found best for the plain arm.
SETTINGS = {
    ("bpr", "adam"): Setting(0.01, 1e-5, 25),
    ("pointwise", "adam"): Setting(0.01, 1e-5, 24),
    ("bpr", "sparseadam"): Setting(0.01, 0.0, 27),
    ("pointwise", "sparseadam"): Setting(0.003, 0.0, 24),
}


@dataclass(frozen=True)
class Films:
    """(n,) users and items of the training set, (U, I) whether rated there, (U,) items held out."""

    users: torch.Tensor
    items: torch.Tensor
    seen: torch.Tensor
    valid: torch.Tensor
    test: torch.Tensor


def films(folder: Path) -> Films:
    """MovieLens-100K, split; the wheel is fetched if it is not in ``folder``."""
    if not (folder / WHEEL).exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
        done = subprocess.run([*command, "recbole==1.2.1"], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"MovieLens-100K can't be had: {done.stderr.strip()}")
    with zipfile.ZipFile(folder / WHEEL) as wheel:
        text = wheel.read(INSIDE).decode("utf-8")
    return split(np.loadtxt(io.StringIO(text), skiprows=1))


def split(ratings: np.ndarray[Any, Any]) -> Films:
    """Leave one out by time; ``ratings`` has columns user, item, rating, time."""
    users = np.unique(ratings[:, 0], return_inverse=True)[1]
    items = np.unique(ratings[:, 1], return_inverse=True)[1]
    order = np.lexsort((ratings[:, 3], users))  # stable
    users, items = users[order], items[order]
    last = np.flatnonzero(np.append(users[1:] != users[:-1], True))
    kept = np.ones(len(users), dtype=bool)
    kept[last] = kept[last - 1] = False
    seen = torch.zeros(users.max() + 1, items.max() + 1, dtype=torch.bool)
    seen[users[kept], items[kept]] = True
    user, item, valid, test = map(torch.from_numpy, (users[kept], items[kept], items[last - 1], items[last]))
    return Films(user, item, seen, valid, test)


def planted(data: Films, condition: str, seed: int) -> torch.Tensor:
    """(n,) which training interactions come with both labels."""
    rng = np.random.default_rng([seed, 5])
    bad = np.zeros(len(data.items), dtype=bool)
    if condition == "spread":
        bad[rng.choice(len(bad), round(SHARE * len(bad)), replace=False)] = True
    elif condition == "items":
        counts = np.bincount(data.items.numpy(), minlength=data.seen.shape[1])
        drawn = rng.permutation(np.flatnonzero(counts))
        enough = int(np.searchsorted(counts[drawn].cumsum(), SHARE * len(bad))) + 1
        bad = np.isin(data.items.numpy(), drawn[:enough])
    return torch.from_numpy(bad)


# --- training --------------------------------------------------------------------------------------------------------


class Factors(nn.Module):
    """Inner products of users and items."""

    def __init__(self, users: int, items: int, sparse: bool) -> None:
        super().__init__()
        self.user = nn.Embedding(users, WIDTH, sparse=sparse)
        self.item = nn.Embedding(items, WIDTH, sparse=sparse)
        for table in (self.user, self.item):
            nn.init.normal_(table.weight, std=0.1)


Batches = Iterator[tuple[torch.Tensor, ...]]


def bpr_epoch(data: Films, bad: torch.Tensor, generator: torch.Generator) -> Batches:
    """(b,) users, (b, 2) the item preferred and the other one, in shuffled batches."""
    other = negatives(data.seen, data.users, 1, generator)[:, 0]
    pairs = torch.stack([data.items, other], 1)
    users, pairs = torch.cat([data.users, data.users[bad]]), torch.cat([pairs, pairs[bad].flip(1)])
    return shuffled(BATCH["bpr"], generator, users, pairs)


def pointwise_epoch(data: Films, bad: torch.Tensor, generator: torch.Generator) -> Batches:
    """(b,) users, items and labels of 0 and 1, in shuffled batches."""
    other = negatives(data.seen, data.users, NEGATIVES, generator).flatten()
    users = torch.cat([data.users, data.users.repeat_interleave(NEGATIVES), data.users[bad]])
    items = torch.cat([data.items, other, data.items[bad]])
    labels = torch.zeros(len(users))
    labels[: len(data.users)] = 1.0
    return shuffled(BATCH["pointwise"], generator, users, items, labels)


def negatives(seen: torch.Tensor, users: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    """(n, count) items drawn uniformly from those that the user has not rated."""
    items = torch.randint(seen.shape[1], (len(users), count), generator=generator)
    while (again := seen[users[:, None], items]).any():
        items[again] = torch.randint(seen.shape[1], (int(again.sum()),), generator=generator)
    return items


def shuffled(batch: int, generator: torch.Generator, *columns: torch.Tensor) -> Batches:
    for rows in torch.randperm(len(columns[0]), generator=generator).split(batch):  # type: ignore[no-untyped-call] # torch leaves it untyped
        yield tuple(column[rows] for column in columns)


def loss_of(model: Factors, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """BPR's loss of a batch of two columns, cross-entropy of one with labels."""
    if len(batch) == 2:
        users, pairs = batch
        scores = (model.user(users)[:, None] * model.item(pairs)).sum(2)
        return F.softplus(scores[:, 1] - scores[:, 0]).mean()
    users, items, labels = batch
    return F.binary_cross_entropy_with_logits((model.user(users) * model.item(items)).sum(1), labels)


EPOCHS = {"bpr": bpr_epoch, "pointwise": pointwise_epoch}


def optimizer_of(name: str, model: nn.Module, setting: Setting) -> torch.optim.Optimizer:
    if name == "sparseadam":
        return torch.optim.SparseAdam(model.parameters(), lr=setting.lr)
    return torch.optim.Adam(model.parameters(), lr=setting.lr, weight_decay=setting.decay)


@dataclass(frozen=True)
class Run:
    """One training run."""

    loss: str
    optimizer: str
    condition: str
    arm: str
    seed: int


def train(
    data: Films, run: Run, setting: Setting, curve: list[float] | None = None
) -> tuple[Factors, FlowManager | None]:
    """The trained model, and its manager, closed, if it had one; validation NDCG@10 by epoch goes to ``curve``."""
    torch.manual_seed(run.seed)
    users, items = data.seen.shape
    model = Factors(users, items, sparse=run.optimizer == "sparseadam")
    optimizer = optimizer_of(run.optimizer, model, setting)
    generator = torch.Generator().manual_seed(run.seed + (10_000 if run.arm == "again" else 1000))
    bad, make, flow = planted(data, run.condition, run.seed), ARMS[run.arm], None
    with tempfile.TemporaryDirectory() as folder:
        if make is not None:
            flow = FlowManager(model, optimizer, plugins=[make()], run_dir=Path(folder) / "run")
        for _ in range(setting.epochs):
            for batch in EPOCHS[run.loss](data, bad, generator):
                loss = loss_of(model, batch)
                if flow is not None:
                    flow.observe(loss=loss)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
                optimizer.step()
            if curve is not None:
                curve.append(ranking(model, data, test=False)["ndcg"])
        if flow is not None:
            flow.close()
    return model, flow


@torch.no_grad()
def ranking(model: Factors, data: Films, test: bool) -> dict[str, float]:
    """NDCG@10 and HR@10 over all items the user has not rated before; an item that ties is behind."""
    scores = model.user.weight @ model.item.weight.T
    target, everyone = data.test if test else data.valid, torch.arange(len(scores))
    own = scores[everyone, target, None]
    scores[data.seen] = -torch.inf
    if test:
        scores[everyone, data.valid] = -torch.inf
    rank = torch.where(own.isfinite()[:, 0], (scores >= own).sum(1), scores.shape[1]).double()
    found = rank <= TOP
    return {"ndcg": float((found / (rank + 1).log2()).mean()), "hr": float(found.double().mean())}


def held_back(flow: FlowManager, data: Films, bad: torch.Tensor) -> dict[str, int]:
    """How often the auto-fix changed what it does; item rows it ever held back, those of them all planted, at last."""
    told = [f for f in flow.findings if f.kind == "rows_held_back"]
    items = [set(f.rows) for f in told if f.subject == "item.weight"]
    ever, wrong = set[int]().union(*items), set(data.items[bad].tolist()) - set(data.items[~bad].tolist())
    return {
        "changes": len(told), "held": len(ever), "held planted": len(ever & wrong), "planted items": len(wrong),
        "held at last": len(items[-1]) if items else 0,
    }  # fmt: skip


def figures(data: Films, run: Run, setting: Setting) -> dict[str, Any]:
    start = time.perf_counter()
    model, flow = train(data, run, setting)
    seconds = round(time.perf_counter() - start, 2)
    valid = {f"valid {name}": value for name, value in ranking(model, data, test=False).items()}
    told = held_back(flow, data, planted(data, run.condition, run.seed)) if flow is not None else {}
    return vars(run) | vars(setting) | ranking(model, data, test=True) | valid | told | {"seconds": seconds}


# --- tuning ----------------------------------------------------------------------------------------------------------


def tune(data: Films, path: Path, losses: Sequence[str], optimizers: Sequence[str], epochs: int) -> None:
    """Validation NDCG@10 after every epoch of every setting, for the plain arm on clean data; then the best."""
    done = {(*(row[k] for k in ("loss", "optimizer", "lr", "decay", "seed")),): row["valid"] for row in lines(path)}
    for loss, optimizer, lr, seed in itertools.product(losses, optimizers, RATES, TUNING_SEEDS):
        for decay in DECAYS if optimizer == "adam" else (0.0,):  # SparseAdam has none
            if (loss, optimizer, lr, decay, seed) in done:
                continue
            valid: list[float] = []
            run, setting = Run(loss, optimizer, "clean", "plain", seed), Setting(lr, decay, epochs)
            train(data, run, setting, valid)
            row = vars(run) | vars(setting) | {"valid": valid}
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            done[loss, optimizer, lr, decay, seed] = valid
    for key in sorted({key[:4] for key in done}):
        mean = np.mean([curve for k, curve in done.items() if k[:4] == key], axis=0)
        print(*key, f"NDCG@10 {mean.max():.4f} after epoch {mean.argmax() + 1}")


# --- the comparison --------------------------------------------------------------------------------------------------


def read(path: Path) -> dict[Run, dict[str, Any]]:
    """The runs of a file that were made with the present settings."""
    runs = {}
    for row in lines(path):
        setting = SETTINGS.get((row["loss"], row["optimizer"]))
        if setting is not None and all(row[name] == value for name, value in vars(setting).items()):
            runs[Run(**{name: row[name] for name in Run.__dataclass_fields__})] = row
    return runs


def sweep(data: Films, path: Path, wanted: Iterable[Run]) -> None:
    """Run what the file does not hold, one line each."""
    have = read(path)
    missing = [run for run in wanted if run not in have]
    carry_out(path, missing, lambda run: figures(data, run, SETTINGS[run.loss, run.optimizer]))


Group = tuple[str, str, str]


def by_seed(runs: Mapping[Run, dict[str, Any]], group: Group, arm: str, metric: str) -> dict[int, float]:
    loss, optimizer, condition = group
    return {r.seed: row[metric] for r, row in runs.items() if r == Run(loss, optimizer, condition, arm, r.seed)}


def table(runs: Mapping[Run, dict[str, Any]]) -> str:
    """Markdown."""
    groups = sorted({(r.loss, r.optimizer, r.condition) for r in runs})
    tried: list[tuple[Group, str, str, Comparison]] = []
    for group, arm, metric in itertools.product(groups, [*ARMS, UNHARMED][1:], METRICS):
        base, own = by_seed(runs, group, "plain", metric), by_seed(runs, group, arm, metric)
        if arm == UNHARMED and group[2] != "clean":  # what there is to win
            own = by_seed(runs, (*group[:2], "clean"), "plain", metric)
        both = sorted(base.keys() & own.keys())
        if len(both) > 2:
            tried.append((group, arm, metric, compare([own[s] for s in both], [base[s] for s in both])))
    holm([c for _, arm, _, c in tried if arm not in ("again", UNHARMED)])
    out = ["| loss, optimizer, condition | arm | metric | " + " | ".join(Comparison.COLUMNS) + " |"]
    out.append("|---" * (3 + len(Comparison.COLUMNS)) + "|")
    out += [f"| {', '.join(g)} | {arm} | {m} | " + " | ".join(c.cells()) + " |" for g, arm, m, c in tried]
    return "\n".join([*out, "", *_alike(runs, groups), "", *_held(runs, groups)])


def _alike(runs: Mapping[Run, dict[str, Any]], groups: Sequence[Group]) -> Iterator[str]:
    """The A/A pair: how often it seems to gain."""
    yield "| A/A pair | metric | seeds | seeming gains at p < .05 of 10 random pairs, either way round |"
    yield "|---|---|---|---|"
    for group, metric in itertools.product(groups, METRICS):
        base, own = by_seed(runs, group, "plain", metric), by_seed(runs, group, "again", metric)
        both = sorted(base.keys() & own.keys())
        if len(both) >= 10:
            share = false_gains([own[s] - base[s] for s in both])
            yield f"| {', '.join(group)} | {metric} | {len(both)} | {share:.1%} |"


def _held(runs: Mapping[Run, dict[str, Any]], groups: Sequence[Group]) -> Iterator[str]:
    """What the repair did."""
    names = ("changes", "held", "held planted", "planted items", "held at last", "seconds")
    yield "| loss, optimizer, condition | arm | " + " | ".join(names) + " |"
    yield "|---" * (2 + len(names)) + "|"
    for group, arm in itertools.product(groups, ARMS):
        rows = [row for run, row in runs.items() if (run.loss, run.optimizer, run.condition, run.arm) == (*group, arm)]
        if rows:
            means = [f"{np.mean([row[n] for row in rows]):.3g}" if n in rows[0] else "" for n in names]
            yield f"| {', '.join(group)} | {arm} | " + " | ".join(means) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", type=Path, help="JSON-lines file of the tuning; what is in it is not run again")
    parser.add_argument("--out", type=Path, help="JSON-lines file; what is in it is not run again")
    parser.add_argument("--table", type=Path, help="print the tables of such a file")
    parser.add_argument("--data", type=Path, default=FOLDER, help="folder of the wheel")
    parser.add_argument("--losses", nargs="+", choices=tuple(BATCH), default=tuple(BATCH))
    parser.add_argument("--optimizers", nargs="+", choices=("adam", "sparseadam"), default=("adam",))
    parser.add_argument("--conditions", nargs="+", choices=CONDITIONS, default=CONDITIONS)
    parser.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=tuple(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--epochs", type=int, default=LONGEST, help="of the tuning")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.table is not None:
        print(table(read(options.table)))
    elif options.tune is not None:
        tune(films(options.data), options.tune, options.losses, options.optimizers, options.epochs)
    elif options.out is not None:
        keys = itertools.product(options.seeds, options.optimizers, options.losses, options.conditions, options.arms)
        sweep(films(options.data), options.out, [Run(lo, o, c, arm, seed) for seed, o, lo, c, arm in keys])
    else:
        parser.error("say --tune, --out or --table")


if __name__ == "__main__":
    main()
