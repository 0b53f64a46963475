"""Deferred reads: a bad update is dropped on the device, and the host hears of it a step later.

torch's fused optimizers leave weights and state alone when ``found_inf`` is non-zero: the path that GradScaler uses.
The verdict of the device is put there, the numbers are copied to the host without waiting, and looked at when they have
come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dynguard.events import GradientEvent
from dynguard.torch.reading import Packed, Reading, pack

if TYPE_CHECKING:
    from dynguard.torch.source import Source
    from dynguard.torch.watch import Watch

MOST = 8  # steps that may be under way before the host waits for the oldest


@dataclass(slots=True)
class Sent:
    """A step's numbers on their way to the host."""

    event: GradientEvent
    packed: Packed
    host: Tensor
    ready: Any
    anywhere: slice
    failed: Callable[[str, Exception], object]

    def has_come(self) -> bool:
        """Whether the copy is complete; never waits."""
        return self.ready is None or bool(self.ready.query())


@dataclass(slots=True)
class Late:
    """A step whose numbers have come: what fired, and whether the device dropped its update."""

    event: GradientEvent
    reading: Reading
    dropped: bool


def exchange(
    source: Source,
    answers: Sequence[tuple[str, Any]],
    event: GradientEvent,
    failed: Callable[[str, Exception], object],
    watch: Watch,
) -> list[Late]:
    """Send this step's numbers off, let the device decide about its update, and give back the steps that have come."""
    late = collect(source)
    packed = pack(answers, event, failed)
    drop = packed.any_dropped(event.norms)
    if watch.ranks is not None:
        drop = watch.ranks.any(drop)
    if watch.settings.mode == "observe":
        drop = torch.zeros_like(drop)
    source.drop_on_device(drop)
    if watch.keeper is not None:
        watch.keeper.buffers.restore_where(drop.bool())
    anywhere = packed.pack.add(drop)
    host, ready = _send(packed.pack.join(event.norms.device))
    # The gradients will be gone when the numbers come: what is told then rests on the numbers alone.
    kept = GradientEvent(
        step=event.step, source=event.source, names=event.names, statistics=event.statistics, loss=event.loss,
        losses=event.losses, batches=event.batches, learning_rates=list(event.learning_rates), tables=event.tables,
        adaptive=event.adaptive,
    )  # fmt: skip
    source.sent.append(Sent(kept, packed, host, ready, anywhere, failed))
    return late


def collect(source: Source, *, wait: bool = False) -> list[Late]:
    """The steps whose numbers have come, oldest first; with ``wait`` all of them."""
    sent: deque[Sent] = source.sent
    late = []
    while sent and (wait or len(sent) > MOST or sent[0].has_come()):
        first = sent.popleft()
        if first.ready is not None:
            first.ready.synchronize()
        reading = first.packed.unpack(first.host.numpy(), first.failed, first.anywhere)
        late.append(Late(first.event, reading, reading.fired_elsewhere))
    return late


def _send(values: Tensor) -> tuple[Tensor, Any]:
    """A copy to the host that is not waited for, and the event that says when it is there (None: at once)."""
    if values.is_cuda:
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        ready: Any = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch leaves it untyped
        ready.record()
        return host, ready
    host = torch.empty(values.shape, dtype=values.dtype)
    host.copy_(values, non_blocking=True)
    return host, None
