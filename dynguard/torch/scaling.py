"""Steps that a GradScaler keeps from its optimizer: nobody else sees them, as ``optimizer.step()`` is never called.

``GradScaler.step`` is wrapped on its class while some manager watches, and given back when the last one closes. A step
that it drops still counts as a step of its optimizer, and what its forward has written into buffers is undone if it is
non-finite: an overflow of scaled gradients is the scaler's daily work and no fault, a NaN in BatchNorm is one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.amp import GradScaler

_listeners: list[Callable[[Any, Any], None]] = []
_original: list[Any] = []


def listen(listener: Callable[[Any, Any], None]) -> Callable[[], None]:
    """Call ``listener(scaler, optimizer)`` after every step that a GradScaler was asked for; returns what ends that."""
    if not _listeners:
        _original.append(GradScaler.step)
        GradScaler.step = _wrapped(GradScaler.step)  # type: ignore[method-assign] # undone below
    _listeners.append(listener)

    def stop() -> None:
        if listener in _listeners:
            _listeners.remove(listener)
            if not _listeners:
                GradScaler.step = _original.pop()  # type: ignore[method-assign] # as it was

    return stop


def _wrapped(step: Any) -> Any:
    @functools.wraps(step)
    def watched(self: GradScaler, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        result = step(self, optimizer, *args, **kwargs)
        for listener in tuple(_listeners):
            listener(self, optimizer)
        return result

    return watched
