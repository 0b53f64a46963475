"""What the row ledger costs, and how many planted contradictory rows are found, beside releases of gradtracer.

    python benchmarks/embeddings.py cost [--rows 10000 100000 1000000 10000000] [--rounds 15] [--json FILE]
    python benchmarks/embeddings.py truth [--optimizers adam sgd ...] [--batches 32 256 2048] [--seeds 0 1]

Both take [--peers 0.6.0 0.9.0] (none if nothing follows it) and [--json FILE].

- ``cost``: seconds of a whole training step over the plain one, interleaved in one process, for a sparse table of width
  64 and 4,096 Zipf ids a step (the same ids for every size), and bytes kept beside the table per row.
- ``truth``: matrix factorisation, 10,000 items of which 1 % are contradictory: the same pair comes with both labels
  equally often. 5 % of all other labels are noise, items are drawn by Zipf's law. Precision and recall are over
  items looked up at least 20 times. Gini and entropy are those of the true look-ups, as each tool has them.

With ``--json`` every result is written as it comes, and what the file holds already is not measured again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.peers import gradtracer
from benchmarks.timing import interleave, quiet, ratios
from dynguard import FlowManager
from dynguard_plugins.embeddings.measures import entropy, gini
from dynguard_plugins.embeddings.rows import Rows

PEERS = ("0.6.0", "0.9.0")
WIDTH, IDS, ZIPF = 64, 4096, 10_000
WARM = 700  # steps after which most looked-up rows are known, and are measured at one visit in eight
USERS, ITEMS, LATENT, LOOKUPS = 2000, 10_000, 8, 400_000
# Learning rate by optimizer; those of SGD are for a summed loss, so that the way per look-up is that of any batch size.
RATES = {"adam": 0.01, "sparseadam": 0.01, "sgd": 0.1, "momentum": 0.01, "adagrad": 0.2}


def tracker_of(version: str) -> Any:
    """The embedding tracker of one release of gradtracer; RuntimeError without it."""
    return gradtracer(version, "analyzers.embedding").EmbeddingTracker


class Results:
    """Results by key, kept in a file so that a run can be taken up where it ended."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.found: dict[str, Any] = json.loads(path.read_text()) if path is not None and path.exists() else {}

    def once(self, key: str, work: Callable[[], dict[str, Any]]) -> None:
        if key not in self.found:
            self.found[key] = work()
            if self.path is not None:
                self.path.write_text(json.dumps(self.found, indent=1))
        print(f"{key:44s}", "  ".join(f"{name} {show(value)}" for name, value in self.found[key].items()), flush=True)


def show(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# --- cost ------------------------------------------------------------------------------------------------------------


class Sparse:
    """A sparse table with a small tower over it, and whatever watches it."""

    def __init__(self, rows: int, optimizer: str) -> None:
        torch.manual_seed(0)
        self.table = nn.Embedding(rows, WIDTH, sparse=True)
        self.head = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 1))
        self.model = nn.Sequential(self.table, self.head)
        make = {"sparseadam": torch.optim.SparseAdam, "sgd": torch.optim.SGD}[optimizer]
        self.optimizers = [make(self.table.parameters(), lr=1e-3), torch.optim.Adam(self.head.parameters())]
        self.ids = list(zipf_ids(32))
        self.at = 0
        self.after: Callable[[], Any] = lambda: None

    def step(self) -> None:
        ids = self.ids[self.at % len(self.ids)]
        self.at += 1
        F.softplus(self.model(ids)).mean().backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.after()


def zipf_ids(count: int) -> Iterator[torch.Tensor]:
    generator = np.random.default_rng(0)
    p, order = 1 / np.arange(1, ZIPF + 1), generator.permutation(ZIPF)
    for _ in range(count):
        yield torch.from_numpy(order[generator.choice(ZIPF, IDS, p=p / p.sum())])


def cost(rows: int, optimizer: str, rounds: int, versions: list[str], folder: Path) -> dict[str, Any]:
    contenders = {name: Sparse(rows, optimizer) for name in ("plain", "bare", "rows")}
    watch = Rows()

    class Looks:
        """The source alone: a plugin that does nothing with what it is shown."""

        def on_embeddings(self, event: Any) -> None:
            pass

    from dynguard import hookimpl

    Looks.on_embeddings = hookimpl(Looks.on_embeddings)  # type: ignore[method-assign]  # a class made here
    flows = [
        FlowManager(contenders[name].model, contenders[name].optimizers, plugins=[plugin], run_dir=folder / name)
        for name, plugin in (("bare", Looks()), ("rows", watch))
    ]
    trackers = {}
    for version in versions:
        contenders[version] = peer = Sparse(rows, optimizer)
        trackers[version] = tracker = tracker_of(version)(peer.table)
        peer.after = tracker.step
    calls = 20 if rows <= 100_000 or not versions else 2
    with quiet():
        for one in contenders.values():
            for _ in range(3 if one in [contenders.get(v) for v in versions] else WARM):
                one.step()
        seconds = interleave({name: one.step for name, one in contenders.items()}, rounds, calls)
    for flow in flows:
        flow.close()
    result: dict[str, Any] = {"plain ms": float(np.median(seconds["plain"])) * 1e3}
    for name in list(contenders)[1:]:
        result[f"{name}/plain"] = float(np.median(ratios(seconds, name, "plain")))
    result["rows ms"] = float(np.median(seconds["rows"])) * 1e3
    result["rows bytes/row"] = watch.ledger("0.weight", "optimizer0").bytes / rows
    for version, tracker in trackers.items():
        held = [value for value in vars(tracker).values() if isinstance(value, np.ndarray)]
        result[f"{version} bytes/row"] = sum(value.nbytes for value in held) / rows
    return result


# --- planted truth ---------------------------------------------------------------------------------------------------


def interactions(seed: int) -> tuple[np.ndarray[Any, Any], ...]:
    """(n,) users, items and labels of +1 and -1, shuffled, and (ITEMS,) which items are contradictory."""
    generator = np.random.default_rng(seed)
    p = 1 / np.arange(1, ITEMS + 1)
    items = generator.permutation(ITEMS)[generator.choice(ITEMS, LOOKUPS, p=p / p.sum())]
    users = generator.integers(0, USERS, LOOKUPS)
    taste, kind = generator.normal(size=(USERS, LATENT)), generator.normal(size=(ITEMS, LATENT))
    labels = np.sign((taste[users] * kind[items]).sum(axis=1))
    labels[generator.random(LOOKUPS) < 0.05] *= -1
    bad = np.zeros(ITEMS, dtype=bool)
    bad[generator.choice(ITEMS, ITEMS // 100, replace=False)] = True
    both = bad[items]
    users, items = np.concatenate([users, users[both]]), np.concatenate([items, items[both]])
    labels = np.concatenate([labels, -labels[both]])
    order = generator.permutation(len(labels))
    return users[order], items[order], labels[order], bad


def optimizer_of(name: str, model: nn.Module, batch: int) -> torch.optim.Optimizer:
    rate, p = RATES[name], model.parameters()
    if name in ("sgd", "momentum"):
        return torch.optim.SGD(p, lr=rate * batch, momentum=0.9 if name == "momentum" else 0.0)
    kinds: dict[str, Any] = {
        "adam": torch.optim.Adam, "sparseadam": torch.optim.SparseAdam, "adagrad": torch.optim.Adagrad
    }  # fmt: skip
    made: torch.optim.Optimizer = kinds[name](p, lr=rate)
    return made


def truth(name: str, batch: int, seed: int, epochs: int, version: str | None, folder: Path) -> dict[str, Any]:
    users, items, labels, bad = interactions(seed)
    torch.manual_seed(seed)
    sparse = name == "sparseadam"
    model = nn.ModuleDict({n: nn.Embedding(r, 16, sparse=sparse) for n, r in (("user", USERS), ("item", ITEMS))})
    for table in model.values():
        nn.init.normal_(table.weight, std=0.1)  # type: ignore[arg-type]  # an embedding's weight
    optimizer, watch = optimizer_of(name, model, batch), Rows()
    tracker = tracker_of(version)(model["item"]) if version else None
    flow = None if tracker else FlowManager(model, optimizer, plugins=[watch], run_dir=folder)
    data = torch.from_numpy(users), torch.from_numpy(items), torch.from_numpy(labels).float()
    losses, start = [], time.perf_counter()
    for _ in range(epochs):
        for user, item, label in zip(*(d.split(batch) for d in data), strict=True):  # type: ignore[no-untyped-call] # torch leaves it untyped
            score = (model["user"](user) * model["item"](item)).sum(1)
            loss = F.softplus(-score * label).mean()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
            optimizer.step()
            losses.append(loss.detach())
            if tracker:
                tracker.step()
    if flow is not None:
        flow.close()
    exposed = np.bincount(items, minlength=ITEMS) * epochs
    if tracker:
        found, counted = set(map(int, tracker.zombie_embeddings())), np.asarray(tracker.freqs)
    else:
        told = [f for f in flow.findings if f.kind == "oscillating_rows" and f.subject == "item.weight"] if flow else []
        found, counted = set(told[-1].rows) if told else set(), watch.columns("item.weight").exposures
    able = exposed >= 20
    hits = {row for row in found if able[row]}
    right = sum(bool(bad[row]) for row in hits)
    return {
        "precision": right / len(hits) if hits else 0.0, "recall": right / max(int((bad & able).sum()), 1),
        "planted": int((bad & able).sum()), "found": len(hits), "gini error": abs(gini(counted) - gini(exposed)),
        "entropy error": abs(entropy(counted) - entropy(exposed)),
        "loss": float(torch.stack(losses[-len(losses) // 20 :]).mean()), "seconds": time.perf_counter() - start,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["cost", "truth"])
    parser.add_argument("--rows", nargs="*", type=int, default=[10_000, 100_000, 1_000_000, 10_000_000])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--optimizers", nargs="*", default=None)
    parser.add_argument("--batches", nargs="*", type=int, default=[32, 256, 2048])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--peers", nargs="*", default=list(PEERS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = Results(args.json)
    with tempfile.TemporaryDirectory() as temporary:
        number = iter(range(10**6))
        folder = lambda: Path(temporary) / str(next(number))  # noqa: E731 - a name for each run
        if args.part == "cost":
            for name in args.optimizers or ["sparseadam", "sgd"]:
                for rows in args.rows:
                    peers = args.peers if rows <= 1_000_000 else []  # a step of theirs takes seconds, and 10 GB
                    key = f"cost {name} {rows}"
                    results.once(key, lambda r=rows, n=name, p=peers: cost(r, n, args.rounds, p, folder()))  # type: ignore[misc, no-untyped-call] # as above
            return
        for name in args.optimizers or list(RATES):
            for batch in args.batches:
                for seed in args.seeds:
                    for version in (None, *args.peers):
                        key = f"truth {name} {batch} {seed} {version or 'dynguard'}"
                        work = lambda n=name, b=batch, s=seed, v=version: truth(n, b, s, args.epochs, v, folder())  # type: ignore[no-untyped-call] # torch leaves it untyped  # noqa: E731
                        results.once(key, work)


if __name__ == "__main__":
    main()
