"""How long each layer's gradient has been present but exactly zero, and how surprising that is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

SURPRISE = 1e-8  # chance of so long a row of zeros if the layer were used as often as before
KNOWN = 5  # steps with a gradient before a row of zeros can surprise
NEVER = 2**40  # not due any more


class Layers:
    """Rows of exactly zero gradients, layer by layer.

    Steps at which all gradients are zero say nothing of a layer (a hinge loss that is met) and are left out. A layer
    that is used now and then (a head per task, an expert) has rows of zeros too: a row is told only when it is far
    longer than its own frequency of use explains.

    Args:
        zero_steps: the shortest row that is looked into.
        dead_steps: the row after which a layer that stands still is dead; twice that for one that never had a gradient.
    """

    FIELDS = ("row", "alive", "zero", "due")

    def __init__(self, zero_steps: int, dead_steps: int) -> None:
        self.zero_steps, self.dead_steps = zero_steps, dead_steps
        self.full = 0  # steps at which every layer had a gradient, which need no count of their own
        self.active = False  # a row of zeros is running
        self.absent = False  # some norm was zero at the last step
        for name in self.FIELDS:
            setattr(self, name, np.zeros(0, np.int64))

    row: npt.NDArray[np.int64]
    alive: npt.NDArray[np.int64]
    zero: npt.NDArray[np.int64]
    due: npt.NDArray[np.int64]

    def see(self, norms: Any, have: Sequence[Any], count: int) -> bool:
        """Take in the norms of a step on the host; True when some row is due for a look.

        Args:
            norms: (n,) gradient norms.
            have: n entries, None where there is no gradient; or none at all if that is not known.
            count: how many norms are not zero.
        """
        size = len(norms)
        if len(self.row) != size:
            self._grow(size)
        self.absent = count < size
        if count == size:
            self.full += 1
            if self.active:
                self._end(self.row > 0)
                self.active = False
            return False
        if count == 0:
            return False
        used = norms != 0
        here = [i for i in np.flatnonzero(~used).tolist() if have[i] is not None] if have else []
        self.alive += used
        if not here and not self.active:
            return False
        mark = np.zeros(size, bool)
        mark[here] = True
        self._end((self.row > 0) & ~mark)
        self.row += mark
        self.active = bool(here)
        return self.active and bool((self.row >= self.due).any())

    def suspects(self) -> list[int]:
        """Layers whose row of zeros is due and can't be explained by how they are used."""
        often = self.alive + self.full
        odd = (often >= KNOWN) & (_chance(often, self.zero, self.row) < SURPRISE)
        only = (self.zero == 0) & (self.row >= 2 * self.dead_steps)  # never, or not since the first steps
        return [int(i) for i in np.flatnonzero((self.row >= self.due) & (odd | only))]

    def used(self, layer: int) -> int:
        """Steps at which the layer had a gradient that was not zero."""
        return int(self.alive[layer] + self.full)

    def chance(self, layer: int) -> float:
        """Probability of the layer's present row of zeros, if it were used as often as before."""
        return float(_chance(self.used(layer), self.zero[layer], self.row[layer]))

    def _end(self, ended: npt.NDArray[np.bool_]) -> None:
        if ended.any():
            self.zero[ended] += self.row[ended]
            self.row[ended] = 0
            self.due[ended & (self.due < NEVER)] = self.zero_steps

    def _grow(self, size: int) -> None:
        """Room for layers that joined; those were not there before."""
        more = max(size - len(self.row), 0)
        for name, fill in zip(self.FIELDS, (0, -self.full, 0, self.zero_steps), strict=True):
            have = getattr(self, name)[:size]
            setattr(self, name, np.concatenate((have, np.full(more, fill, np.int64))))

    def state_dict(self) -> dict[str, Any]:
        """All counts."""
        counts = {name: getattr(self, name).copy() for name in self.FIELDS}
        return {**counts, "full": self.full, "active": self.active, "absent": self.absent}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up ``state_dict()``."""
        for name in self.FIELDS:
            setattr(self, name, np.array(state[name], np.int64))
        self.full, self.active, self.absent = state["full"], state["active"], state["absent"]


def _chance(often: Any, zero: Any, row: Any) -> Any:
    """Probability of ``row`` zeros to come, after ``often`` steps with a gradient and ``zero`` without.

    Predictive probability of a beta-binomial model with Jeffreys' prior (Gelman et al., "Bayesian Data Analysis",
    section 2.4): it allows for how little is known about the frequency of use.
    """
    from scipy.special import betaln  # type: ignore[import-untyped]  # scipy ships no types

    return np.exp(betaln(often + 0.5, zero + row + 0.5) - betaln(often + 0.5, zero + 0.5))
