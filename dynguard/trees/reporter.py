"""What the three callbacks share: events are made and handed on; a failure of dynguard's own ends no training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dynguard.events import TreeEvent
from dynguard.trees.table import UnreadableError

Emit = Callable[[TreeEvent], bool]
Failed = Callable[[str, Exception], None]


@dataclass(frozen=True, slots=True)
class Reporter:
    """Makes events and hands them on.

    Attributes:
        emit: takes an event and says whether to stop.
        failed: takes what was done and the exception, where reading trees fails; None lets it through.
    """

    emit: Emit
    failed: Failed | None = None

    def __call__(self, make: Callable[[], TreeEvent]) -> bool:
        """Hand on the event that ``make`` gives; True asks to stop.

        Raises:
            UnreadableError: trees of a kind that dynguard does not read: the user is told at the first round.
        """
        try:
            event = make()
        except UnreadableError:
            raise
        except Exception as error:
            if self.failed is None:
                raise
            self.failed("reading the trees of a round", error)
            return False
        return bool(self.emit(event))
