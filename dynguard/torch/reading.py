"""The one host read of a step: what fired, the scores, the loss and the norms, packed into one small array."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dynguard.events import GradientEvent
from dynguard.signals import Signal

Answer = tuple[str, Signal]


@dataclass(slots=True)
class Reading:
    """What the host learns of a step.

    Attributes:
        fired: the answers of which some entry was true.
        values: scalars by name, for the sinks: loss, gradient_norm, lr and each detector's 0-d score.
        norms: (n,) gradient norms.
    """

    fired: list[Answer]
    values: dict[str, float]
    norms: npt.NDArray[Any] = field(default_factory=lambda: np.zeros(0, np.float32))


def flag(value: Any) -> Tensor | bool:
    """``Signal.fired`` as a 1-d tensor, or as a bool where it is on the host already; TypeError for anything else."""
    if isinstance(value, Tensor):
        if value.ndim > 1 or value.is_complex():
            raise TypeError(f"Signal.fired must be a bool of 0 or 1 dimensions; got {value.dtype} of shape {tuple(value.shape)}")
        return value.reshape(1) if value.ndim == 0 else value
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, np.ndarray) and value.ndim <= 1 and value.dtype == bool:
        return bool(value.any())
    raise TypeError(f"Signal.fired must be a bool, or a bool tensor of 0 or 1 dimensions; got {type(value).__name__}")


def to_host(packed: Tensor) -> npt.NDArray[Any]:
    """The one place where a clean step reads the device."""
    return packed.cpu().numpy()


def read(answers: Sequence[tuple[str, Any]], event: GradientEvent, failed: Callable[[str, Exception], None]) -> Reading:
    """Read a step's answers, loss and norms at once.

    Args:
        answers: (plugin, Signal) of all detectors; anything else than a Signal is that plugin's failure.
        event: the event they answered to.
        failed: told (plugin, exception) of an answer that can't be read.
    """
    norms = event.norms
    parts: list[Tensor] = [norms, event.global_norm.reshape(1)]
    spans: list[tuple[str, Signal, int]] = []  # answer and how many entries its flag takes
    sure: list[Answer] = []
    names: list[str] = ["gradient_norm"]
    values: dict[str, float] = {}
    for key, value in (("loss", event.loss), ("lr", event.learning_rates[0] if len(event.learning_rates) else None)):
        if isinstance(value, Tensor):
            parts.append(value.reshape(1))
            names.append(key)
        elif value is not None:
            values[key] = float(value)
    for name, signal in answers:
        try:
            _pack_score(name, signal, parts, names, values)
        except (TypeError, AttributeError, RuntimeError, ValueError) as error:
            failed(name, error if isinstance(error, TypeError) else TypeError(f"Signal.score: {error}"))
    for name, signal in answers:
        if not isinstance(signal, Signal):
            continue  # told above
        try:
            value = flag(signal.fired)
        except TypeError as error:
            failed(name, error)
            continue
        if isinstance(value, Tensor):
            if value.numel():
                parts.append(value)
                spans.append((name, signal, value.numel()))
        elif value:
            sure.append((name, signal))
    host = _gather(parts, norms)
    count = norms.shape[0]
    values.update(zip(names, host[count : count + len(names)].tolist(), strict=True))
    at = count + len(names)
    fired = sure
    for name, signal, length in spans:
        part = host[at : at + length]
        at += length
        if np.count_nonzero(part == 1):  # NaN is not a verdict
            fired.append((name, signal))
    return Reading(fired, values, host[:count])


def _pack_score(name: str, signal: Any, parts: list[Tensor], names: list[str], values: dict[str, float]) -> None:
    if not isinstance(signal, Signal):
        raise TypeError(f"a detector returns a Signal or None; got {type(signal).__name__}")
    score = signal.score
    if isinstance(score, Tensor):
        if score.ndim == 0:
            parts.append(score.reshape(1))
            names.append(name)
    elif isinstance(score, (int, float, np.floating, np.integer)):
        values[name] = float(score)


def _gather(parts: list[Tensor], like: Tensor) -> npt.NDArray[Any]:
    device = like.device
    if any(p.device != device for p in parts):
        parts = [p.to(device, non_blocking=True) for p in parts]
    return to_host(torch.cat(parts))


def any_fired(
    answers: Sequence[tuple[str, Any]], like: Tensor, failed: Callable[[str, Exception], None]
) -> list[Answer]:
    """The answers of which some entry is true, with one host read for all; for hooks whose numbers are not recorded."""
    parts: list[Tensor] = []
    unsure: list[Answer] = []
    fired: list[Answer] = []
    for name, signal in answers:
        try:
            if not isinstance(signal, Signal):
                raise TypeError(f"a detector returns a Signal or None; got {type(signal).__name__}")
            value = flag(signal.fired)
        except TypeError as error:
            failed(name, error)
            continue
        if isinstance(value, Tensor):
            parts.append((value == 1).any().reshape(1))
            unsure.append((name, signal))
        elif value:
            fired.append((name, signal))
    if parts:
        fired += [answer for answer, hit in zip(unsure, _gather(parts, like).tolist(), strict=True) if hit]
    return fired
