"""What the three callbacks share: events are made and handed on; a failure of dynguard's own ends no training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from dynguard.events import TreeEvent

Emit = Callable[[TreeEvent], bool]
Failed = Callable[[str, Exception], None]
Metrics = Mapping[str, Mapping[str, float]]

# Most of the cost of reading a round does not depend on how many are read: past the first rounds, where most faults
# show, several are read together (and so are their events up to BATCH - 1 rounds late).
SINGLY, BATCH = 50, 8


def unheard(event: TreeEvent) -> bool:
    """What a callback that was pickled with its estimator reports to: the manager stays in its process."""
    return False


def due(count: int, metrics: Metrics) -> bool:
    """Whether the trees are to be read now: ``count`` rounds of this training are done."""
    if count <= SINGLY or count % BATCH == 0:
        return True
    return not all(math.isfinite(value) for by_name in metrics.values() for value in by_name.values())


@dataclass(frozen=True, slots=True)
class Reporter:
    """Makes events and hands them on.

    Attributes:
        emit: takes an event and says whether to stop.
        failed: takes what was done and the exception, where reading trees fails; None lets it through.
    """

    emit: Emit
    failed: Failed | None = None

    def __call__(self, make: Callable[[], Iterable[TreeEvent]]) -> TreeEvent | None:
        """Hand on the events that ``make`` gives; the first that asks to stop is the last and comes back."""
        try:
            events = list(make())
        except Exception as error:
            if self.failed is None:
                raise
            self.failed("reading the trees of a round", error)
            return None
        return next((event for event in events if self.emit(event)), None)
