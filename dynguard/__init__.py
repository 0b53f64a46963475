"""dynguard: watches training, says what goes wrong and why, and repairs it before the damage is in the weights."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynguard.actions import Action as Action
    from dynguard.actions import Intervention as Intervention
    from dynguard.errors import DynguardError as DynguardError
    from dynguard.errors import GradientSpikeError as GradientSpikeError
    from dynguard.errors import TrainingStopped as TrainingStopped
    from dynguard.findings import Evidence as Evidence
    from dynguard.findings import Figure as Figure
    from dynguard.findings import Finding as Finding
    from dynguard.findings import Metrics as Metrics
    from dynguard.findings import Prescription as Prescription
    from dynguard.findings import Section as Section
    from dynguard.findings import Severity as Severity
    from dynguard.findings import Table as Table
    from dynguard.flow import FlowManager as FlowManager
    from dynguard.hookspecs import hookimpl as hookimpl
    from dynguard.options import validated as validated
    from dynguard.signals import Signal as Signal

__version__ = "0.1.0"

# Resolved on first use, so that `import dynguard` costs next to nothing.
_WHERE = {
    "Action": "actions",
    "Intervention": "actions",
    "DynguardError": "errors",
    "GradientSpikeError": "errors",
    "TrainingStopped": "errors",
    "Evidence": "findings",
    "Figure": "findings",
    "Finding": "findings",
    "Metrics": "findings",
    "Prescription": "findings",
    "Section": "findings",
    "Severity": "findings",
    "Table": "findings",
    "FlowManager": "flow",
    "hookimpl": "hookspecs",
    "validated": "options",
    "Signal": "signals",
}
__all__ = ["__version__", *_WHERE]  # noqa: PLE0604 - the names above


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'dynguard' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"dynguard.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
