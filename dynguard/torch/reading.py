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


def to_host(packed: Tensor) -> npt.NDArray[Any]:
    """The one place where a clean step reads the device."""
    return packed.cpu().numpy()


@dataclass(slots=True)
class _Pack:
    """Tensors to read together, and where each lies in the result."""

    parts: list[Tensor] = field(default_factory=list)
    length: int = 0

    def add(self, value: Tensor) -> slice:
        value = value.reshape(1) if value.ndim == 0 else value
        self.parts.append(value)
        start, self.length = self.length, self.length + value.shape[0]
        return slice(start, self.length)

    def read(self, device: torch.device) -> npt.NDArray[Any]:
        parts = self.parts
        if any(p.device != device for p in parts):
            parts = [p.to(device, non_blocking=True) for p in parts]
        return to_host(torch.cat(parts))


Failed = Callable[[str, Exception], object]
_Spot = slice | npt.NDArray[Any]  # where a value will be read, or the value
_Placed = tuple[str, Signal, _Spot, _Spot]


def _place(value: Any, pack: _Pack, what: str) -> _Spot:
    """Where a score or flag will be read, or its value if it is on the host already; TypeError for what is neither."""
    if isinstance(value, Tensor):
        if value.ndim > 1 or value.is_complex():
            raise TypeError(
                f"Signal.{what} has 0 or 1 dimensions and is real; got {value.dtype} of {tuple(value.shape)}"
            )
        return pack.add(value)
    if isinstance(value, (bool, int, float, np.bool_, np.number)):
        return np.asarray([value])
    if isinstance(value, np.ndarray) and value.ndim <= 1 and value.dtype.kind in "biuf":
        return value.reshape(1) if value.ndim == 0 else value
    raise TypeError(f"Signal.{what} must be a number or a tensor of 0 or 1 dimensions; got {type(value).__name__}")


def _readable(name: str, signal: Signal, event: GradientEvent, failed: Failed) -> bool:
    """Whether one answer alone can be read; if not, that is its plugin's failure."""
    pack = _Pack()
    _place(signal.score, pack, "score")
    _place(signal.fired, pack, "fired")
    try:
        if pack.parts:
            pack.read(event.norms.device)
    except (RuntimeError, NotImplementedError) as error:
        failed(name, TypeError(f"Signal can't be read: {error}"))
        return False
    return True


def read(answers: Sequence[tuple[str, Any]], event: GradientEvent, failed: Failed) -> Reading:
    """Read a step's answers, loss and norms at once, and hand detectors their scores back.

    Args:
        answers: (plugin, Signal) of all detectors; anything else than a Signal is that plugin's failure.
        event: the event they answered to.
        failed: told (plugin, exception) of an answer that can't be read.
    """
    pack = _Pack()
    norms = pack.add(event.norms)
    wanted: dict[str, Any] = {"gradient_norm": event.global_norm}
    if event.loss is not None:
        wanted["loss"] = event.loss
    if len(event.learning_rates):
        wanted["lr"] = event.learning_rates[0]
    scalars = {key: _place(value, pack, key) for key, value in wanted.items()}
    placed = _place_all(answers, pack, failed)
    try:
        host = pack.read(event.norms.device)
    except (RuntimeError, NotImplementedError):
        good = [(n, s) for n, s, *_ in placed if _readable(n, s, event, failed)]
        if len(good) == len(placed):
            raise
        return read(good, event, failed)

    values = {key: float(host[place][0] if isinstance(place, slice) else place[0]) for key, place in scalars.items()}
    fired = _fired(placed, host, values, failed)
    return Reading(fired, values, host[norms])


def any_fired(answers: Sequence[tuple[str, Any]], like: Tensor, failed: Failed) -> list[Answer]:
    """The answers of which some entry is true, with one host read for all; for hooks whose numbers are not recorded."""
    pack = _Pack()
    placed = _place_all(answers, pack, failed)
    host = pack.read(like.device) if pack.parts else np.zeros(0)
    return _fired(placed, host, {}, failed)


def _place_all(answers: Sequence[tuple[str, Any]], pack: _Pack, failed: Failed) -> list[_Placed]:
    placed: list[_Placed] = []
    for name, signal in answers:
        try:
            if not isinstance(signal, Signal):
                raise TypeError(f"a detector returns a Signal or None; got {type(signal).__name__}")
            placed.append((name, signal, _place(signal.score, pack, "score"), _place(signal.fired, pack, "fired")))
        except TypeError as error:
            failed(name, error)
    return placed


def _fired(placed: Sequence[_Placed], host: npt.NDArray[Any], values: dict[str, float], failed: Failed) -> list[Answer]:
    """Hand every detector its scores, note the largest in ``values``, and give back the answers that fired."""
    fired: list[Answer] = []
    for name, signal, score, flag in placed:
        scores = host[score] if isinstance(score, slice) else score
        hits = host[flag] if isinstance(flag, slice) else flag
        if len(scores):
            values[name] = float(scores.max())
        if signal.learn is not None:
            try:
                signal.learn(scores.tolist())
            except Exception as error:  # noqa: BLE001 - the plugin's failure, not the run's
                failed(name, error)
        if np.count_nonzero(hits == 1):  # NaN is not a verdict
            fired.append((name, signal))
    return fired
