"""The models that costs are measured on, with batches of a size at which a step is what a step usually is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor]


class GPT(nn.Module):
    """A pre-norm transformer over characters: tokens (b, t) of int64 -> logits (b, t, vocabulary)."""

    def __init__(self, *, layers: int, width: int, heads: int, vocabulary: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        block = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x, mask=self.mask, is_causal=True)))
        return logits


@dataclass(frozen=True)
class Workload:
    """A model, its batches (drawn once, then taken in turn) and its loss."""

    name: str
    build: Callable[[], nn.Module]
    draw: Callable[[], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]

    def batches(self, count: int = 16) -> Iterator[Batch]:
        return cycle([self.draw() for _ in range(count)])


def _layers(depth: int, width: int) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(depth):
        linear = nn.Linear(width, width)
        nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")  # torch's default starves 100 layers of gradient
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _conv() -> nn.Module:
    blocks: list[nn.Module] = []
    for i, o in ((3, 32), (32, 64), (64, 128)):
        blocks += [nn.Conv2d(i, o, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU()]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def _regression(width: int, size: int) -> Callable[[], Batch]:
    return lambda: (torch.randn(size, width), torch.randn(size, width))


def _images(size: int) -> Callable[[], Batch]:
    return lambda: (torch.randn(size, 3, 32, 32), torch.randint(10, (size,)))


def _text(size: int, context: int, vocabulary: int) -> Callable[[], Batch]:
    def draw() -> Batch:
        tokens = torch.randint(vocabulary, (size, context + 1))
        return tokens[:, :-1], tokens[:, 1:]

    return draw


def _squared(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def _entropy(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


WORKLOADS = {
    w.name: w
    for w in (
        Workload("mlp", lambda: _layers(4, 1024), _regression(1024, 64), _squared),
        Workload(
            "gpt",
            lambda: GPT(layers=6, width=384, heads=6, vocabulary=256, context=64),
            _text(4, 64, 256),
            _entropy,
        ),
        Workload("narrow", lambda: _layers(100, 64), _regression(64, 32), _squared),
        Workload("conv", _conv, _images(32), _entropy),
    )
}
