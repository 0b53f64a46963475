"""Places for snapshots in host memory, and the file that holds the newest one."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any

import torch
from torch import Tensor

from dynguard.torch.copies import Path, copy_all, local, nbytes
from dynguard.torch.recovery import TrainingState, payload

log = logging.getLogger("dynguard")
ROOM = 2  # a copy on the device is made where so many times its size is free


class Slot:
    """One place in the ring: copies in host memory, used again by each snapshot that comes here.

    Attributes:
        busy: set while the copies are being written to disk.
    """

    def __init__(self) -> None:
        self.step = -1
        self.state = TrainingState()
        self.memory: dict[Path, Tensor] = {}
        self.busy = False
        self._events: list[Any] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all copies."""
        return sum(nbytes(tensor) for tensor in self.memory.values())

    def fill(self, step: int, state: TrainingState, tensors: Mapping[Path, Tensor], streams: dict[Any, Any]) -> None:
        """Copy the tensors here; for CUDA this only sets the copying going."""
        self.wait()
        self.step, self.state = step, state
        before, self.memory = self.memory, {}
        groups: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
        for path, tensor in tensors.items():
            source = local(tensor).detach()
            self.memory[path] = _memory(before.pop(path, None), source)
            group = groups.setdefault(source.device, ([], []))
            group[0].append(self.memory[path])
            group[1].append(source)
        for device, (targets, sources) in groups.items():
            if device.type == "cuda":
                self._events.append(_bring(targets, sources, device, streams))
            else:
                copy_all(targets, sources)

    def wait(self) -> None:
        """Wait until the copies are all there."""
        for event in self._events:
            event.synchronize()
        self._events = []


def _memory(old: Tensor | None, source: Tensor) -> Tensor:
    """Host memory for a copy of ``source``: the old one where it fits."""
    if old is not None and (old.shape, old.dtype, old.layout) == (source.shape, source.dtype, source.layout):
        return old
    if source.layout is not torch.strided:
        return source.to("cpu", copy=True)
    return torch.empty_like(source, device="cpu", pin_memory=source.is_cuda)


def _bring(targets: list[Tensor], sources: list[Tensor], device: torch.device, streams: dict[Any, Any]) -> Any:
    """Copy from a CUDA device to pinned memory without waiting; returns the event of its end.

    Where there is room, a copy on the device is made first and brought over on a stream of its own while training goes
    on; else the copying takes its turn in the stream of the training. The one or the other, nothing that is trained
    meanwhile gets into it.
    """
    stream = torch.cuda.current_stream(device)
    if torch.cuda.mem_get_info(device)[0] > ROOM * sum(map(nbytes, sources)):
        staged = [torch.empty_like(source) for source in sources]
        copy_all(staged, sources)
        if device not in streams:
            streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch has no types for it
        side = streams[device]
        side.wait_stream(stream)
        for tensor in staged:
            tensor.record_stream(side)
        stream, sources = side, staged
    with torch.cuda.stream(stream):
        copy_all(targets, sources, non_blocking=True)
        return stream.record_event()


class Writer:
    """Writes a snapshot to ``snapshot.pt`` in a thread, whole or not at all.

    Attributes:
        failures: how many could not be written; the first is logged.
    """

    def __init__(self, directory: FilePath) -> None:
        self.path = FilePath(directory) / "snapshot.pt"
        self.failures = 0
        self._thread: threading.Thread | None = None

    def start(self, slot: Slot) -> None:
        """Write this one, unless another is still being written."""
        if self._thread is not None and self._thread.is_alive():
            return
        slot.busy = True
        self._thread = threading.Thread(target=self._write, args=(slot,), name="dynguard-snapshot", daemon=True)
        self._thread.start()

    def close(self, timeout: float) -> None:
        """Wait for what is being written."""
        if self._thread is not None:
            self._thread.join(timeout)

    def _write(self, slot: Slot) -> None:
        temporary = self.path.with_suffix(".tmp")
        try:
            slot.wait()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                torch.save(payload(slot.step, slot.state, slot.memory), file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.path)
        except Exception as error:  # noqa: BLE001 - a full disk, above all, must not end the run
            self.failures += 1
            if self.failures == 1:
                log.warning("the snapshot could not be written to %s: %s: %s", self.path, type(error).__name__, error)
            _remove(temporary)
        finally:
            slot.busy = False


def _remove(file: FilePath) -> None:
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        log.debug("%s stays: %s", file, error)
