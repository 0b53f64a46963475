"""The demo's training: a character GPT on the source text of Python's standard library, with faults at known steps."""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from dynguard.flow import FlowManager

VOCABULARY = 128  # ASCII; every other byte is read as "?"
DEAD_STEPS = 10  # how long a run whose weights are NaN is followed, to show that it stays so


@dataclass(frozen=True, slots=True)
class Size:
    """How large the demo is. The default has about 1M parameters."""

    layers: int = 5
    width: int = 128
    heads: int = 4
    context: int = 64
    batch: int = 16
    steps: int = 400
    learning_rate: float = 1e-3
    text_bytes: int = 3_000_000


QUICK = Size(layers=2, width=32, heads=2, context=32, batch=8, steps=120, learning_rate=3e-3, text_bytes=300_000)


@dataclass(frozen=True, slots=True)
class Fault:
    """One planted fault: its step, what it is in words, and the layer it is in ("" where the whole batch is bad)."""

    kind: str
    step: int
    text: str
    layer: str = ""
    factor: float = 1.0


def faults(size: Size) -> tuple[Fault, ...]:
    """The demo's three faults. The NaN batch comes last, as a run without a guard does not outlive it."""
    layer = f"blocks.{size.layers // 2}.mlp.0"
    return (
        Fault("gradient", size.steps * 45 // 100, f"gradient of {layer} x 1000", layer, 1000.0),
        Fault("scale", size.steps * 60 // 100, "batch with loss weights x 500", factor=500.0),
        Fault("nan", size.steps * 75 // 100, "batch with NaN loss weights", factor=math.nan),
    )


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states (batch, context, width) to the same shape."""
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]  # nn.Module.__call__ is untyped


class CharacterGPT(nn.Module):
    """Predicts the next character of a text."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token numbers (batch, context) to logits (batch, context, vocabulary)."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]  # nn.Module.__call__ is untyped


@dataclass(frozen=True, slots=True)
class Batch:
    """Token numbers (batch, context + 1) and the weight of each sequence in the loss (batch,)."""

    tokens: Tensor
    weights: Tensor


def standard_library_text(limit: int) -> bytes:
    """The first ``limit`` bytes of the standard library's modules, in the order of their names."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    return bytes(text[:limit])


class Data:
    """The same batches for every run of one seed; the last tenth of the text is held out."""

    def __init__(self, size: Size, seed: int, device: str) -> None:
        text = torch.frombuffer(bytearray(standard_library_text(size.text_bytes)), dtype=torch.uint8).long()
        text[text >= VOCABULARY] = ord("?")
        split = len(text) * 9 // 10
        generator = torch.Generator().manual_seed(seed)
        self.windows = text[:split].unfold(0, size.context + 1, 1)
        self.order = torch.randint(len(self.windows), (size.steps, size.batch), generator=generator)
        held_out = text[split:].unfold(0, size.context + 1, size.context)
        self.device = device
        self.held_out = held_out[torch.randint(len(held_out), (8 * size.batch,), generator=generator)].to(device)

    def batch(self, step: int) -> Batch:
        """The batch of a step, all sequences with weight 1."""
        tokens = self.windows[self.order[step]].to(self.device)
        return Batch(tokens, torch.ones(len(tokens), device=self.device))


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Weighted mean cross-entropy in nats per character, 0-d."""
    logits = model(batch.tokens[:, :-1])
    each = F.cross_entropy(logits.flatten(0, 1), batch.tokens[:, 1:].flatten(), reduction="none")
    return (each.view(len(batch.tokens), -1).mean(1) * batch.weights).mean()


@dataclass(slots=True)
class Outcome:
    """What came of a run: training losses by step, held-out loss at the end, step at which it was given up as dead."""

    losses: list[float] = field(default_factory=list)
    held_out: float = math.nan
    dead_since: int | None = None


def train(
    size: Size, *, seed: int, device: str, guard: Callable[[nn.Module, torch.optim.Optimizer], FlowManager] | None,
    advance: Callable[[float], None],
) -> tuple[Outcome, FlowManager | None]:  # fmt: skip
    """Train once over all batches with the planted faults.

    Args:
        size: of the model and the run.
        seed: of the weights and the batches.
        device: where to train.
        guard: makes the guard, or None for a run without one.
        advance: told the loss after each step.

    Returns:
        What came of it, and the closed guard. A run whose weights are NaN is ended ``DEAD_STEPS`` steps later.
    """
    torch.manual_seed(seed)
    model = CharacterGPT(size).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.learning_rate)
    data, outcome = Data(size, seed, device), Outcome()
    watch: AbstractContextManager[FlowManager | None] = guard(model, optimizer) if guard else nullcontext()
    with one_thread(), watch as flow:
        for step in range(size.steps):
            outcome.losses.append(_step(step, model, optimizer, data, faults(size), flow))
            advance(outcome.losses[-1])
            if outcome.dead_since is None and not _finite(model):
                outcome.dead_since = step
            if outcome.dead_since is not None and step >= outcome.dead_since + DEAD_STEPS:
                break
    with torch.no_grad():
        outcome.held_out = float(loss_of(model, Batch(data.held_out, torch.ones(len(data.held_out), device=device))))
    return outcome, flow


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread for torch on the CPU: a model this small gains little from more, and on shared cores loses minutes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _step(
    step: int, model: nn.Module, optimizer: torch.optim.Optimizer, data: Data, planted: tuple[Fault, ...],
    flow: FlowManager | None,
) -> float:  # fmt: skip
    """One ordinary training step, but for the fault that is due; the loss."""
    due = [fault for fault in planted if fault.step == step]
    batch = data.batch(step)
    for fault in due:
        if not fault.layer:
            batch.weights.mul_(fault.factor)
    loss = loss_of(model, batch)
    if flow is not None:
        flow.observe(loss=loss, batch=batch)
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    for fault in due:
        if fault.layer:
            for parameter in model.get_submodule(fault.layer).parameters():
                parameter.grad.mul_(fault.factor)  # type: ignore[union-attr]  # backward has made it
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def _finite(model: nn.Module) -> bool:
    norms = torch._foreach_norm(list(model.parameters()))
    return bool(torch.stack(norms).isfinite().all())
