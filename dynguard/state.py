"""The state of a watch, for checkpoints: a resumed run is judged as one that never stopped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dynguard.bus import Bus
from dynguard.errors import SetupError
from dynguard.judge import Judge

if TYPE_CHECKING:
    from dynguard.torch.source import Source

VERSION = 1
ARRAY = "numpy array"  # key of an array that was made plain


def save(sources: Sequence[Source], judge: Judge, bus: Bus) -> dict[str, Any]:
    """Steps, rows of held-back steps and the plugins' own states."""
    plugins: dict[str, Any] = {}
    for name, plugin in bus.plugins:
        if hasattr(plugin, "state_dict"):
            for saved in bus.guard(name, "state_dict", lambda p=plugin: [p.state_dict()]):  # type: ignore[misc]
                plugins[name] = _plain(saved)
    rows = {
        source.name: {
            "step": source.step,
            "consecutive": judge.arbiter(source.name).consecutive,
            "cooling": judge.arbiter(source.name).cooling,
            "rejected": bool(source.rejected),
        }
        for source in sources
    }
    return {"version": VERSION, "steps": judge.steps, "sources": rows, "plugins": plugins}


def _plain(value: Any) -> Any:
    """numpy arrays and scalars as numbers and lists: what torch.load takes with weights_only=True."""
    if isinstance(value, np.ndarray):
        return {ARRAY: value.tolist(), "dtype": str(value.dtype)}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(item) for item in value)
    return value


def _arrays(value: Any) -> Any:
    """What _plain() made plain, as it was."""
    if isinstance(value, Mapping):
        if ARRAY in value:
            return np.array(value[ARRAY], dtype=value["dtype"])
        return {key: _arrays(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_arrays(item) for item in value)
    return value


def load(saved: Mapping[str, Any], sources: Sequence[Source], judge: Judge, bus: Bus) -> None:
    """Take up what save() gave."""
    if not isinstance(saved, Mapping) or saved.get("version") != VERSION:
        raise SetupError(f"not the state of a FlowManager of version {VERSION}: {str(saved)[:80]}")
    judge.steps = saved["steps"]
    for source in sources:
        row = saved["sources"].get(source.name)
        if row is not None:
            source.step, source.rejected = row["step"], row["rejected"]
            arbiter = judge.arbiter(source.name)
            arbiter.consecutive, arbiter.cooling = row["consecutive"], row["cooling"]
    for name, plugin in bus.plugins:
        if name in saved["plugins"] and hasattr(plugin, "load_state_dict"):
            own = _arrays(saved["plugins"][name])
            bus.guard(name, "load_state_dict", lambda p=plugin, s=own: [p.load_state_dict(s)])  # type: ignore[misc]
