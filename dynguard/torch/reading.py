"""The one host read of a step: what fired, the scores, the loss and the norms, packed into one small array."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dynguard.actions import Action
from dynguard.events import GradientEvent
from dynguard.signals import Signal
from dynguard.torch.distributed import Ranks

Answer = tuple[str, Signal]


@dataclass(slots=True)
class Reading:
    """What the host learns of a step.

    Attributes:
        fired: the answers of which some entry was true.
        fired_elsewhere: whether something fired on another rank.
        values: scalars by name, for the sinks: loss, gradient_norm, lr and each detector's 0-d score.
        norms: (n,) gradient norms.
    """

    fired: list[Answer]
    values: dict[str, float]
    norms: npt.NDArray[Any] = field(default_factory=lambda: np.zeros(0, np.float32))
    fired_elsewhere: bool = False


def to_host(packed: Tensor) -> npt.NDArray[Any]:
    """The one place where a clean step reads the device."""
    return packed.cpu().numpy()


@dataclass(slots=True)
class _Pack:
    """Tensors to read together, and where each lies in the result."""

    parts: list[Tensor] = field(default_factory=list)
    starts: dict[int, Tensor] = field(default_factory=dict)
    length: int = 0

    def add(self, value: Tensor) -> slice:
        value = value.reshape(1) if value.ndim == 0 else value
        self.parts.append(value)
        start, self.length = self.length, self.length + value.shape[0]
        self.starts[start] = value
        return slice(start, self.length)

    def at(self, spot: slice) -> Tensor:
        """The tensor that was added there."""
        return self.starts[spot.start]

    def join(self, device: torch.device) -> Tensor:
        """All of it as one tensor on ``device``, without a host read."""
        return torch.cat([p if p.device == device else p.to(device, non_blocking=True) for p in self.parts])

    def read(self, device: torch.device) -> npt.NDArray[Any]:
        """All of it on the host: the one read."""
        return to_host(self.join(device))


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


def read(
    answers: Sequence[tuple[str, Any]], event: GradientEvent, failed: Failed, ranks: Ranks | None = None
) -> Reading:
    """Read a step's answers, loss and norms at once, and hand detectors their scores back.

    Args:
        answers: (plugin, Signal) of all detectors; anything else than a Signal is that plugin's failure.
        event: the event they answered to.
        failed: told (plugin, exception) of an answer that can't be read.
        ranks: the other ranks, which learn whether something fired here.
    """
    packed = pack(answers, event, failed)
    anywhere = None
    if ranks is not None:
        anywhere = packed.pack.add(ranks.any(packed.any_fired(event.norms)))
    try:
        host = packed.pack.read(event.norms.device)
    except (RuntimeError, NotImplementedError):
        good = [(n, s) for n, s, *_ in packed.placed if _readable(n, s, event, failed)]
        if len(good) == len(packed.placed):
            raise
        return read(good, event, failed)
    return packed.unpack(host, failed, anywhere)


@dataclass(slots=True)
class Packed:
    """A step's answers, laid out for one read."""

    pack: _Pack
    norms: slice
    scalars: dict[str, _Spot]
    placed: list[_Placed]

    def any_fired(self, like: Tensor) -> Tensor:
        """Whether any answer has fired, (1,) float on the device of ``like``."""
        return self._any([self._tensor(flag, like) for *_, flag in self.placed], like)

    def any_dropped(self, like: Tensor) -> Tensor:
        """Whether any answer asks for the update to be dropped, (1,) float on the device of ``like``."""
        flags = []
        for _, signal, _, flag in self.placed:
            if signal.action >= Action.SKIP:
                drop = flag if signal.drop is None else signal.drop
                flags.append(drop.to(like.device) if isinstance(drop, Tensor) else self._tensor(drop, like))
        return self._any(flags, like)

    def _any(self, tensors: list[Tensor], like: Tensor) -> Tensor:
        flags = [(t == 1).any().reshape(1) for t in tensors]
        return torch.cat(flags).any().reshape(1).float() if flags else like.new_zeros(1)

    def _tensor(self, spot: _Spot, like: Tensor) -> Tensor:
        if isinstance(spot, slice):
            return self.pack.at(spot).to(like.device)
        return torch.as_tensor(spot, device=like.device)

    def unpack(self, host: npt.NDArray[Any], failed: Failed, anywhere: slice | None = None) -> Reading:
        """The reading, from the host's copy of the pack."""
        values = {
            key: float(host[place][0] if isinstance(place, slice) else place[0]) for key, place in self.scalars.items()
        }
        fired = _fired(self.placed, host, values, failed)
        return Reading(fired, values, host[self.norms], anywhere is not None and bool(host[anywhere][0] == 1))


def pack(answers: Sequence[tuple[str, Any]], event: GradientEvent, failed: Failed) -> Packed:
    """Lay out a step's answers, loss and norms for one read."""
    pack = _Pack()
    norms = pack.add(event.norms)
    wanted: dict[str, Any] = {"gradient_norm": event.global_norm}
    if event.loss is not None:
        wanted["loss"] = event.loss
    if len(event.learning_rates):
        wanted["lr"] = event.learning_rates[0]
    if event.overflow is not None:
        wanted["found_inf"] = event.overflow
    scalars = {key: _place(value, pack, key) for key, value in wanted.items()}
    return Packed(pack, norms, scalars, _place_all(answers, pack, failed))


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
