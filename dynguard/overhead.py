"""What dynguard and its plugins cost."""

from __future__ import annotations

from dataclasses import dataclass

from dynguard.bus import Bus
from dynguard.delivery import Delivery


@dataclass(frozen=True, slots=True)
class Overhead:
    """What a plugin has cost: seconds in its hooks (for a sink, of its own worker thread), share of the run, calls."""

    seconds: float
    share: float
    calls: int


def measure(bus: Bus, delivery: Delivery, own: tuple[float, int], elapsed: float) -> dict[str, Overhead]:
    """Cost by plugin, and ``"dynguard"`` for all that the run waited for.

    Args:
        own: seconds and calls of all hooks together.
        elapsed: seconds since the run began.
    """
    cost = {name: (meter.seconds, meter.calls) for name, meter in bus.meters.items()}
    for name, seconds in delivery.seconds.items():
        have = cost.get(name, (0.0, 0))
        cost[name] = (have[0] + seconds, have[1] + delivery.calls.get(name, 0))
    cost["dynguard"] = own
    return {name: Overhead(seconds, seconds / max(elapsed, 1e-9), calls) for name, (seconds, calls) in cost.items()}
