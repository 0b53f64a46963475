"""Hot hooks, tried on a device that is not the CPU, to see whether they make the host wait for it.

The tensors of these events are on torch's ``meta`` device: they have a shape and a type but no numbers. So no GPU is
needed, a plugin takes the way that it would take on one, and whatever asks for a number shows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dynguard.hookspecs import HOT
from dynguard.signals import Signal
from dynguard.testing.calls import call, hooks_of, problems
from dynguard.testing.reads import count_reads
from dynguard.testing.statistics import is_tensor
from dynguard.testing.trials import Trial, start_of_run, trials

DEVICE = "meta"


def device_violations(make: Callable[[], object]) -> Iterator[str]:
    """Reads of the device by hot hooks, with file and line, and what raises on a device only."""
    plugin_hooks = hooks_of(make())
    series = {hook: ts for hook, ts in trials("torch").items() if hook in plugin_hooks and hook in HOT}
    series.pop("on_trees", None)  # trees are numpy arrays
    plugin = make()
    list(problems(plugin, "on_run_start", run=start_of_run()))  # told already where all hooks are tried
    for hook, ts in series.items():
        yield from _one_hook(plugin, hook, ts)


def _one_hook(plugin: object, hook: str, series: Sequence[Trial]) -> list[str]:
    found: dict[str, None] = {}
    for trial in series:
        places, error = _one_event(plugin, hook, moved(trial.make()))
        for place in places:
            found[f"{hook} reads the device: {place}; answer with arrays, and read in explain()"] = None
        if error is not None:
            if not places:  # else it only shows that there was no number to read
                found[f"{hook} raised {type(error).__name__} off the CPU: {error} (at {trial.label})"] = None
            break
    return list(found)


def _one_event(plugin: object, hook: str, event: Any) -> tuple[list[str], Exception | None]:
    with count_reads() as reads:
        try:
            answer = call(plugin, hook, event=event)
            if isinstance(answer, Signal) and answer.learn is not None:
                answer.learn([0.0] * (answer.score.numel() if is_tensor(answer.score) else 1))
        except Exception as error:  # noqa: BLE001 - a stranger's code; told as a violation
            return reads.places, error
    return reads.places, None


def moved(value: Any) -> Any:
    """A copy of an event with all its tensors on the device, without their numbers."""
    if is_tensor(value):
        import torch

        return torch.empty(tuple(value.shape), dtype=value.dtype, device=DEVICE)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: moved(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **parts)
    if isinstance(value, Mapping):
        return {key: moved(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(moved(item) for item in value)
    return value
