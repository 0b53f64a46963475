"""What is alive around a parameter: its optimizers, their schedulers and GradScalers.

Plugins are shown events, never the objects of the training loop. Where a number looks wrong, these objects tell whether
it was meant so; they are then found in the garbage collector's list, which takes tens of milliseconds. So this is for
suspicions only, and whoever asks counts how often.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Live:
    """The optimizers that hold a parameter, the schedulers of those, and the GradScalers that are stepping them."""

    optimizers: list[Any] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    scalers: list[Any] = field(default_factory=list)


def around(parameter: Any) -> Live:
    """Look for the optimizers, schedulers and scalers of ``parameter``; nothing where torch is not in use."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(parameter, torch.Tensor):
        return Live()
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    live = Live()
    # type() and not isinstance(): the latter asks an object's __class__, which lazy proxies answer by importing.
    for thing in gc.get_objects():
        kind = type(thing)
        if issubclass(kind, Optimizer):
            live.optimizers += [thing] * _holds(thing, parameter)
        elif issubclass(kind, LRScheduler):
            live.schedulers += [thing] * _holds(getattr(thing, "optimizer", None), parameter)
        elif issubclass(kind, torch.amp.GradScaler):
            live.scalers.append(thing)
    mine = {id(optimizer) for optimizer in live.optimizers}
    live.scalers = [scaler for scaler in live.scalers if mine & set(_stepping(scaler))]
    return live


def _holds(optimizer: Any, parameter: Any) -> bool:
    return any(held is parameter for group in _groups(optimizer) for held in group.get("params", ()))


def _groups(optimizer: Any) -> Iterator[dict[str, Any]]:
    """The parameter groups of an optimizer that is ready; none of one half-made."""
    try:
        yield from optimizer.param_groups
    except AttributeError:
        return


def _stepping(scaler: Any) -> dict[int, Any]:
    """State by ``id(optimizer)`` of those that are stepped: kept from ``scaler.unscale_`` or ``step`` to ``update``."""
    states = getattr(scaler, "_per_optimizer_states", {})
    return {key: state for key, state in states.items() if state.get("found_inf_per_device")}
