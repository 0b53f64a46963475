"""Signal: what a detector answers on the fast path, with its arrays still on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from dynguard.actions import Action
from dynguard.findings import Finding


@dataclass(slots=True)
class Signal:
    """One detector's answer about one event.

    Attributes:
        score: 0-d or (k,) array, tensor or number, on the device of the event: how far out of line. Its largest entry
            is recorded as a metric of the step under the plugin's name; it decides nothing.
        fired: 0-d or (k,) of bool, on the device. Making it must not read the device (no ``.item()``, ``bool()``,
            ``.tolist()``): the bus packs the ``fired`` of all detectors and reads them together, once a step.
        explain: called with no arguments, only when some entry of ``fired`` was true, on the host, where reading the
            device is allowed. It yields the findings; their actions decide the step.
        action: the farthest action that this signal may ask for. In ``reads="deferred"``, where findings come a step
            late, a fired signal whose ``action`` is SKIP or beyond makes the device drop the update.
        drop: which of ``fired`` make the device drop the update when reads are deferred, if not all do: 0-d or (k,)
            bool on the device. None means all, where ``action`` is SKIP or beyond.
        learn: called with the host's copy of ``score`` (a list of floats) once the step has been read, fired or not:
            how a detector learns thresholds from its scores at no further read.
    """

    score: Any
    fired: Any
    explain: Callable[[], Iterable[Finding]]
    action: Action = Action.WARN
    drop: Any = None
    learn: Callable[[list[float]], None] | None = None
