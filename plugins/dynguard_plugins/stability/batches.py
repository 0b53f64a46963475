"""Whether a step sees the very data of the step before: then a spike is the dynamics' doing, not the batch's."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

LEAVES = 1000


class SameBatch:
    """Compares the observed batches of successive steps by the identity of their arrays; keeps none of them alive.

    Holding a step back can only help where the next one sees other data. Full-batch training at the edge of stability
    (Cohen et al. 2021, "Gradient descent on neural networks typically occurs at the edge of stability") spikes on the
    same data again and again, and recovers by itself.
    """

    def __init__(self) -> None:
        self._last: list[tuple[weakref.ref[Any], int]] | None = None
        self.row = 0  # steps in a row that saw the data of the step before

    def see(self, batches: Sequence[Any]) -> bool:
        """Whether these are the batches of the last step, untouched since. False where none were observed."""
        leaves = [] if not batches else [leaf for batch in batches for leaf in _arrays(batch, [LEAVES])]
        last, self._last = self._last, None
        if not leaves:
            self.row = 0
            return False
        try:
            self._last = [(weakref.ref(leaf), getattr(leaf, "_version", 0)) for leaf in leaves]
        except (TypeError, RuntimeError):  # can't be referred to weakly; a version that inference mode doesn't count
            self.row = 0
            return False
        same = last is not None and len(last) == len(leaves)
        same = same and all(
            was() is leaf and version == now[1]
            for (was, version), leaf, now in zip(last or (), leaves, self._last, strict=False)
        )
        self.row = self.row + 1 if same else 0
        return same


def _arrays(value: Any, left: list[int]) -> Iterator[Any]:
    """Tensors and arrays in nested lists, tuples and mappings, ``left`` of them at most."""
    if left[0] <= 0:
        return
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        left[0] -= 1
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _arrays(item, left)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _arrays(item, left)
