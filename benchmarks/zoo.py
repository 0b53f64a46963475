"""Healthy training runs of many kinds, for measuring false alarms, and the ground into which faults are planted.

Each kind is a plain loop's parts: models, optimizers, batches, loss functions and learning-rate schedule, all from one
seed. ``KINDS`` names them; ``make(kind, seed)`` builds one.
"""
# ruff: noqa: E501 - a run is read best with each part on its line

from __future__ import annotations

import math
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = Any


@dataclass
class Run:
    """One run: ``phases(batch)`` yields (optimizer name, loss) in the order of the updates of a step."""

    kind: str
    seed: int
    steps: int
    models: dict[str, nn.Module]
    optimizers: dict[str, torch.optim.Optimizer]
    batch: Callable[[int], Batch]
    phases: Callable[[Batch], Iterator[tuple[str, Tensor]]]
    schedule: Callable[[int], float]
    spoil: dict[str, Callable[[Batch], Batch]] = field(default_factory=dict)  # kind of bad batch -> how it comes about

    def set_rate(self, step: int) -> None:
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                group.setdefault("base_lr", group["lr"])
                group["lr"] = group["base_lr"] * self.schedule(step)


def constant(_: int) -> float:
    return 1.0


def warmup_cosine(total: int, warm: int) -> Callable[[int], float]:
    def rate(step: int) -> float:
        if step < warm:
            return (step + 1) / warm
        return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(total - warm, 1)))

    return rate


def restarts(period: int) -> Callable[[int], float]:
    return lambda step: 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step % period) / period))


def step_decay(every: int, factor: float) -> Callable[[int], float]:
    return lambda step: factor ** (step // every)


def single(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: Callable[[nn.Module, Batch], Tensor]
) -> dict[str, Any]:
    def phases(batch: Batch) -> Iterator[tuple[str, Tensor]]:
        yield "", loss_fn(model, batch)

    return {"models": {"": model}, "optimizers": {"": optimizer}, "phases": phases}


def mlp(seed: int, g: torch.Generator) -> Run:
    sizes = (8, 64, 512)
    size = sizes[seed % 3]
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))
    teacher = nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 5))

    def batch(_: int) -> Batch:
        x = torch.randn(size, 20, generator=g)
        with torch.no_grad():
            y = (teacher(x) * 3 + 0.3 * torch.randn(size, 5, generator=g)).argmax(1)
        return x, y

    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    return Run("mlp", seed, 1500, batch=batch, schedule=warmup_cosine(1500, 100),
               **single(model, optimizer, lambda m, b: F.cross_entropy(m(b[0]), b[1])))  # fmt: skip


def regression(seed: int, g: torch.Generator) -> Run:
    size = (16, 128)[seed % 2]
    model = nn.Sequential(nn.Linear(10, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 1))
    w = torch.randn(10, 1, generator=g)

    def batch(_: int) -> Batch:
        x = torch.randn(size, 10, generator=g)
        return x, torch.sin(x @ w) + 0.1 * torch.randn(size, 1, generator=g)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return Run("regression", seed, 1500, batch=batch, schedule=restarts(300),
               **single(model, optimizer, lambda m, b: F.mse_loss(m(b[0]), b[1])))  # fmt: skip


def cnn(seed: int, g: torch.Generator) -> Run:
    """A conv net with BatchNorm on a small fixed data set that it nearly interpolates: heavy-tailed norms."""
    data = torch.randn(10, 1, 12, 12, generator=g)
    y = torch.randint(0, 10, (512,), generator=g)
    x = data[y] + 0.9 * torch.randn(512, 1, 12, 12, generator=g)
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(12, 24, 3), nn.BatchNorm2d(24), nn.ReLU(), nn.Flatten(), nn.Linear(24 * 9, 10),
    )  # fmt: skip

    def batch(_: int) -> Batch:
        i = torch.randint(0, 512, (32,), generator=g)
        return x[i] + 0.3 * torch.randn(32, 1, 12, 12, generator=g), y[i]

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    return Run("cnn", seed, 1500, batch=batch, schedule=step_decay(600, 0.3),
               **single(model, optimizer, lambda m, b: F.cross_entropy(m(b[0]), b[1])))  # fmt: skip


@lru_cache(maxsize=1)
def text() -> Tensor:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:60]
    raw = "".join(f.read_text(errors="ignore") for f in files)[:400_000]
    return torch.tensor([min(ord(c), 127) for c in raw])


class Block(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, 4, d // 4).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.proj(a)
        out: Tensor = x + self.down(F.gelu(self.up(self.ln2(x))))
        return out


class GPT(nn.Module):
    def __init__(self, d: int = 32, layers: int = 2, length: int = 32) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(128, d), nn.Embedding(length, d)
        self.blocks = nn.Sequential(*[Block(d) for _ in range(layers)])
        self.ln, self.head = nn.LayerNorm(d), nn.Linear(d, 128, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids) + self.pos.weight[: ids.shape[1]]
        out: Tensor = self.head(self.ln(self.blocks(x)))
        return out


def gpt(seed: int, g: torch.Generator) -> Run:
    data, model, size = text(), GPT(), (8, 16)[seed % 2]

    def batch(_: int) -> Batch:
        at = torch.randint(0, len(data) - 33, (size,), generator=g)
        return torch.stack([data[i : i + 33] for i in at.tolist()])

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    return Run("gpt", seed, 1000, batch=batch, schedule=warmup_cosine(1000, 50),
               **single(model, optimizer, lambda m, b: F.cross_entropy(m(b[:, :-1]).flatten(0, 1), b[:, 1:].flatten())))  # fmt: skip


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.GRU(6, 24, batch_first=True), nn.Linear(24, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.rnn(x)[0][:, -1])
        return out


def rnn(seed: int, g: torch.Generator) -> Run:
    model, size = Recurrent(), (8, 32)[seed % 2]

    def batch(_: int) -> Batch:
        length = int(torch.randint(5, 16, (1,), generator=g))
        x = torch.randn(size, length, 6, generator=g)
        return x, x[:, :, :1].cumsum(1)[:, -1].tanh()

    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return Run("rnn", seed, 1000, batch=batch, schedule=constant,
               **single(model, optimizer, lambda m, b: F.mse_loss(m(b[0]), b[1])))  # fmt: skip


def gan(seed: int, g: torch.Generator) -> Run:
    gen = nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 2))
    dis = nn.Sequential(nn.Linear(2, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1))
    optimizers: dict[str, torch.optim.Optimizer] = {
        "dis": torch.optim.Adam(dis.parameters(), lr=1e-3, betas=(0.5, 0.99)),
        "gen": torch.optim.Adam(gen.parameters(), lr=1e-3, betas=(0.5, 0.99)),
    }

    def batch(_: int) -> Batch:
        angle = torch.randint(0, 8, (64,), generator=g) * (math.pi / 4)
        real = torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(64, 2, generator=g)
        return real, torch.randn(64, 8, generator=g), torch.randn(64, 8, generator=g)

    def phases(b: Batch) -> Iterator[tuple[str, Tensor]]:
        real, z1, z2 = b
        yield "dis", F.softplus(-dis(real)).mean() + F.softplus(dis(gen(z1).detach())).mean()
        yield "gen", F.softplus(-dis(gen(z2))).mean()

    return Run("gan", seed, 1000, {"gen": gen, "dis": dis}, optimizers, batch, phases, constant)


class Factors(nn.Module):
    def __init__(self, users: int, items: int) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(users, 16), nn.Embedding(items, 16)
        self.user_bias, self.item_bias = nn.Embedding(users, 1), nn.Embedding(items, 1)
        for table in (self.user, self.item, self.user_bias, self.item_bias):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, u: Tensor, i: Tensor) -> Tensor:
        out: Tensor = (self.user(u) * self.item(i)).sum(1) + self.user_bias(u)[:, 0] + self.item_bias(i)[:, 0]
        return out


def factorisation(seed: int, g: torch.Generator) -> Run:
    size = (32, 256, 512)[seed % 3]
    model = Factors(300, 400)
    p = 1.0 / torch.arange(1, 401).float()
    u0, i0 = torch.randn(300, 4, generator=g), torch.randn(400, 4, generator=g)

    def batch(_: int) -> Batch:
        u = torch.randint(0, 300, (size,), generator=g)
        i = torch.multinomial(p, size, replacement=True, generator=g)
        y = ((u0[u] * i0[i]).sum(1) + torch.randn(size, generator=g) > 0).float()
        return u, i, y

    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return Run("factorisation", seed, 1000, batch=batch, schedule=constant,
               **single(model, optimizer, lambda m, b: F.binary_cross_entropy_with_logits(m(b[0], b[1]), b[2])))  # fmt: skip


def tiny_batch(seed: int, g: torch.Generator) -> Run:
    """Batches of 8 with label noise on a classification task that is learnt well: rare hard batches."""
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    w = torch.randn(12, generator=g)

    def batch(_: int) -> Batch:
        x = torch.randn(8, 12, generator=g)
        y = (x @ w > 0).long()
        flip = torch.rand(8, generator=g) < 0.02
        return x, torch.where(flip, 1 - y, y)

    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    return Run("tiny_batch", seed, 1500, batch=batch, schedule=constant,
               **single(model, optimizer, lambda m, b: F.cross_entropy(m(b[0]), b[1])))  # fmt: skip


def scaled_input(b: Batch) -> Batch:
    """A unit error: inputs 30 times too large."""
    return (b[0] * 30, *b[1:])


def shuffled_labels(b: Batch) -> Batch:
    """Labels that belong to other samples."""
    last = b[-1]
    return (*b[:-1], last[torch.randperm(len(last))])


def random_tokens(b: Batch) -> Batch:
    """Garbage in place of text."""
    return torch.randint(0, 128, b.shape)


def scaled_targets(b: Batch) -> Batch:
    """A unit error: targets 30 times too large."""
    return (*b[:-1], b[-1] * 30)


def far_real(b: Batch) -> Batch:
    """Real samples from elsewhere."""
    return (b[0] * 30, *b[1:])


SPOIL: dict[str, dict[str, Callable[[Batch], Batch]]] = {
    "mlp": {"outlier_batch": scaled_input, "label_noise": shuffled_labels},
    "regression": {"outlier_batch": scaled_targets, "label_noise": shuffled_labels},
    "cnn": {"outlier_batch": scaled_input, "label_noise": shuffled_labels},
    "gpt": {"outlier_batch": random_tokens},
    "rnn": {"outlier_batch": scaled_targets, "label_noise": shuffled_labels},
    "gan": {"outlier_batch": far_real},
    "factorisation": {"label_noise": shuffled_labels},
    "tiny_batch": {"outlier_batch": scaled_input, "label_noise": shuffled_labels},
}
KINDS: dict[str, Callable[[int, torch.Generator], Run]] = {
    "mlp": mlp,
    "regression": regression,
    "cnn": cnn,
    "gpt": gpt,
    "rnn": rnn,
    "gan": gan,
    "factorisation": factorisation,
    "tiny_batch": tiny_batch,
}


def make(kind: str, seed: int) -> Run:
    """Build a run; its weights and batches follow from the seed alone."""
    torch.manual_seed(seed)
    run = KINDS[kind](seed, torch.Generator().manual_seed(10_000 + seed))
    run.spoil = SPOIL[kind]
    return run
