"""Closing a manager that its user forgot, at interpreter exit."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable
from typing import Any


def close_at_exit(closable: Any) -> Callable[[], None]:
    """Arrange for ``closable.close()`` at interpreter exit, without keeping it alive; returns what cancels that."""
    reference = weakref.ref(closable)

    def goodbye() -> None:
        alive = reference()
        if alive is not None:
            alive.close()

    atexit.register(goodbye)
    return lambda: atexit.unregister(goodbye)
