"""``stray_step``: an optimizer that is stepped again on gradients that it has used already."""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from dynguard import Evidence, Finding, Prescription

if TYPE_CHECKING:
    from dynguard.events import GradientEvent

TIMES = 2  # a single one may be a slip at a resume ...
WITHIN = 20  # ... so many events have to hold several


class Stray:
    """Watches one gradient of a source by identity and version: backward and zero_grad change one of them.

    In a replayed CUDA graph neither changes, so the norms of all gradients have to be the same numbers too.
    """

    def __init__(self) -> None:
        self.count = 0
        self.told = False
        self.suspect = False
        self._index = 0
        self._version = -1
        self._witness: Any = None
        self._norms: Any = None
        self._hits: deque[int] = deque(maxlen=TIMES)

    def before(self, event: GradientEvent) -> None:
        """Note whether the witness is untouched since the last step; no device is read."""
        gradients = event.gradients
        gradient = gradients[self._index] if self._index < len(gradients) else None
        if gradient is None:
            self._index = next((i for i, g in enumerate(gradients) if g is not None), 0)
            gradient = gradients[self._index] if self._index < len(gradients) else None
        version = getattr(gradient, "_version", None)
        if gradient is None or version is None:
            self._witness, self.suspect = None, False
            return
        same = self._witness is not None and self._witness() is gradient
        self.suspect = same and version == self._version and event.rejected is not True
        self._version = version
        if not same:
            self._witness = weakref.ref(gradient)

    def see(self, step: int, norms: Any, suspect: bool) -> Finding | None:
        """Take in the (n,) norms of a step on the host."""
        before, self._norms = self._norms, norms
        if not suspect or before is None or not np.any(norms) or not np.array_equal(before, norms):
            return None
        self.count += 1
        self._hits.append(step)
        if self.told or len(self._hits) < TIMES or self._hits[-1] - self._hits[0] > WITHIN:
            return None
        self.told = True
        return _finding(step, self.count)


def _finding(step: int, count: int) -> Finding:
    return Finding(
        kind="stray_step",
        step=step,
        premise="optimizer.step() was called again on the same gradients, without backward() or zero_grad() between",
        implies="every batch is applied twice, momentum and second moments count it twice, and the second update also "
        "passes by clipping, unscaling and GradScaler's own skips",
        expected_effect="with one step per backward the updates have the size that the learning rate says",
        evidence=(Evidence(name="repeated_steps", value=count),),
        prescriptions=(
            Prescription(
                parameter="optimizer.step()", current="twice per backward", proposed="once per backward",
                why="remove the extra call; under GradScaler only scaler.step(optimizer) is called",
                undo="call it again",
            ),
        ),
    )  # fmt: skip
