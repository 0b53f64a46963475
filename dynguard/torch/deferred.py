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
from dynguard.torch.statistics import Statistics

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
    flags: slice  # where it says whether the update was dropped, and whether anything fired on any rank
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
    # Ranks must conclude the same steps at the same time: they wait for the numbers of the step before.
    late = collect(source, wait=watch.ranks is not None)
    packed = pack(answers, event, failed)
    flags = torch.cat((packed.any_dropped(event.norms), packed.any_fired(event.norms)))
    if watch.ranks is not None:
        flags = watch.ranks.any(flags)
    if watch.settings.mode == "observe":
        flags = flags * flags.new_tensor([0.0, 1.0])
    drop = flags[:1]
    source.drop_on_device(drop)
    if watch.keeper is not None:
        watch.keeper.buffers.restore_where(drop.bool())
    spot = packed.pack.add(flags)
    host, ready = _send(packed.pack.join(event.norms.device))
    source.sent.append(Sent(event, packed, host, ready, spot, failed))
    return late


def let_go(event: GradientEvent) -> None:
    """Drop the gradients from an event that waits for its numbers: they must not live a step longer for it.

    What is told about it then rests on the norms alone.
    """
    numbers = Statistics(())
    vars(numbers).update(norms=event.norms, global_norm=event.global_norm)
    event.gradients, event.parameters, event.statistics = (), (), numbers


def collect(source: Source, *, wait: bool = False) -> list[Late]:
    """The steps whose numbers have come, oldest first; with ``wait`` all of them."""
    sent: deque[Sent] = source.sent
    late = []
    while sent and (wait or len(sent) > MOST or sent[0].has_come()):
        first = sent.popleft()
        if first.ready is not None:
            first.ready.synchronize()
        host = first.host.numpy()
        fired = slice(first.flags.start + 1, first.flags.stop)
        reading = first.packed.unpack(host, first.failed, fired)
        late.append(Late(first.event, reading, bool(host[first.flags.start] == 1)))
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
