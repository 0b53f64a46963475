"""A small language model on text that every Python has: the sources of its own standard library, byte by byte."""

from __future__ import annotations

import functools
import math
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 128  # ASCII; files with anything else are left out
CONTEXT = 64
HELD_OUT = 40  # files that no run trains on
UNIFORM = math.log(VOCABULARY)


@functools.cache
def corpus() -> tuple[Tensor, Tensor]:
    """(training, held-out) text as int64 codes; the files are split by a fixed shuffle."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in folder.glob("*.py") if p.stat().st_size > 2000)
    random.Random(0).shuffle(files)
    texts = [data for p in files if max(data := p.read_bytes()) < VOCABULARY]
    parts = [torch.frombuffer(bytearray(b"".join(t)), dtype=torch.uint8).long() for t in _split(texts)]
    return parts[0], parts[1]


def _split(texts: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    return texts[HELD_OUT:], texts[:HELD_OUT]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, length, width))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class LanguageModel(nn.Module):
    """Causal transformer, pre-norm: (n, length) codes -> (n, length, VOCABULARY) logits."""

    def __init__(self, width: int = 64, heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        for table in (self.token, self.place):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, codes: Tensor) -> Tensor:
        x = self.token(codes) + self.place.weight[: codes.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross-entropy of the next code, in nats."""
    codes, targets = batch
    return F.cross_entropy(model(codes).flatten(0, 1), targets.flatten())


def batches(seed: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless random windows of the training text."""
    text, _ = corpus()
    g = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - CONTEXT - 1, (size,), generator=g)
        rows = text[starts[:, None] + torch.arange(CONTEXT + 1)]
        yield rows[:, :-1], rows[:, 1:]


def corrupted(g: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
    """A batch as a broken loader gives it: random codes, four of them repeated over the whole row."""
    rows = torch.randint(VOCABULARY, (size, 4), generator=g).repeat(1, CONTEXT // 4 + 1)[:, : CONTEXT + 1]
    return rows[:, :-1], rows[:, 1:]


@torch.no_grad()
def held_out_loss(model: nn.Module, rows: int = 512) -> float:
    """Loss on fixed windows of files that no run trains on."""
    _, text = corpus()
    starts = torch.linspace(0, len(text) - CONTEXT - 2, rows).long()
    windows = text[starts[:, None] + torch.arange(CONTEXT + 1)]
    return float(loss_of(model, (windows[:, :-1], windows[:, 1:])))
