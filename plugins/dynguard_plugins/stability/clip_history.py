"""The newest norms of a run and their quantiles, for ``clip``: in host memory, or on a device without a read."""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dynguard_plugins.stability.clip_numbers import usable


@dataclass(slots=True)
class Saved:
    """A history that isn't placed yet."""

    kept: Sequence[float]

    def values(self) -> list[float]:
        """All that is kept, oldest first."""
        return list(self.kept)


class HostHistory:
    """The newest ``length`` numbers, kept in order of size too: a quantile costs next to nothing."""

    def __init__(self, length: int, values: Sequence[float] = ()) -> None:
        self._length = length
        self._newest = deque(value for value in values[-length:] if value < math.inf)
        self._sorted = sorted(self._newest)

    def quantile(self, extra: Any, share: float) -> float:
        """The quantile of the history and ``extra``, linear between two numbers; infinite if ``extra`` is unusable."""
        if not usable(extra):
            return math.inf
        where = bisect.bisect_left(self._sorted, extra)
        position = len(self._sorted) * share
        low = int(position)
        lower, upper = (self._with(extra, where, min(k, len(self._sorted))) for k in (low, low + 1))
        return lower + (position - low) * (upper - lower)

    def _with(self, extra: float, where: int, k: int) -> float:
        return extra if k == where else self._sorted[k - (k > where)]

    def add(self, value: Any, good: Any) -> None:
        """Keep ``value`` where ``good``, letting go of the oldest."""
        if not good:
            return
        value = float(value)
        bisect.insort(self._sorted, value)
        self._newest.append(value)
        if len(self._newest) > self._length:
            oldest = self._newest.popleft()
            del self._sorted[bisect.bisect_left(self._sorted, oldest)]

    def values(self) -> list[float]:
        """All that is kept, oldest first."""
        return list(self._newest)


class DeviceHistory:
    """The same on a device, without reading it: a ring of ``length`` slots, infinite where nothing usable came."""

    def __init__(self, length: int, values: Sequence[float], like: Any) -> None:
        self._ring = like.new_full((length,), math.inf)
        kept = values[-length:]
        if kept:
            self._ring[: len(kept)] = like.new_tensor(kept)
        self._written = len(kept)

    def quantile(self, extra: Any, share: float) -> Any:
        """0-d: the quantile of the history and ``extra``; infinite where ``extra`` is unusable."""
        import torch

        have = self._ring[: min(self._written, len(self._ring))]
        known = usable(extra)
        ordered = torch.cat((have, torch.where(known, extra, math.inf).reshape(1))).sort().values
        position = ((ordered < math.inf).sum() - 1).clamp(min=0) * share
        low = position.floor().long()
        # index_select: a subscript by a 0-d tensor would read it
        pair = ordered.index_select(0, torch.stack((low, low + 1)).clamp(max=len(ordered) - 1))
        between = position - low
        upper = torch.where(between > 0, pair[1], pair[0])  # infinite beyond the last number
        return torch.where(known, pair[0] + between * (upper - pair[0]), math.inf)

    def add(self, value: Any, good: Any) -> None:
        """Keep ``value`` where ``good``, letting go of the oldest."""
        import torch

        self._ring[self._written % len(self._ring)] = torch.where(good, value, math.inf)
        self._written += 1

    def values(self) -> list[float]:
        """The slots, oldest first; reads the device."""
        ring: list[float] = self._ring.tolist()
        turn = self._written % len(ring)
        return ring[turn:] + ring[:turn] if self._written > len(ring) else ring[: self._written]
