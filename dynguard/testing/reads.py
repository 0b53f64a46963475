"""Counts reads of the device: whatever makes the host wait for an array that is still being computed.

On a GPU each such read stalls training, on a CPU it costs nothing and is easily overlooked; so the check works on the
CPU too, by watching for the calls that read rather than for the wait.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynguard.arrays import as_on_device

# Tensor methods that hand values to the host. Some do so on the CPU without any operator that could be seen.
METHODS = (
    "item",
    "tolist",
    "numpy",
    "cpu",
    "__bool__",
    "__float__",
    "__int__",
    "__index__",
    "__complex__",
    "__array__",
    "to",  # only where it names the host
)
# Operators whose result (a number, or the size of an array) the host must wait for.
OPERATORS = frozenset({
    "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero", "aten::masked_select",
    "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::bincount", "aten::repeat_interleave",
})  # fmt: skip


@dataclass(slots=True)
class DeviceReads:
    """The reads seen so far: ``places`` says which call, in which file and line."""

    places: list[str] = field(default_factory=list)
    thread: int = field(default_factory=threading.get_ident)
    busy: bool = False

    def note(self, what: str) -> None:
        """Record one read, unless it is part of one already recorded or another thread's."""
        if not self.busy and threading.get_ident() == self.thread:
            self.places.append(f"{what} at {_caller()}")

    def __len__(self) -> int:
        return len(self.places)


def _caller() -> str:
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_machinery(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _is_machinery(filename: str) -> bool:
    parts = Path(filename).parts
    return filename == __file__ or "torch" in parts or "numpy" in parts or parts[-1] == "contextlib.py"


@contextlib.contextmanager
def count_reads() -> Iterator[DeviceReads]:
    """Within this block, reads of torch tensors by this thread are counted. Without torch there is nothing to count.

    >>> from dynguard.testing import count_reads, loss_event
    >>> with count_reads() as reads:
    ...     too_high = loss_event(loss=3.0).loss > 2.0
    >>> len(reads)
    0
    """
    reads = DeviceReads()
    if importlib.util.find_spec("torch") is None:
        yield reads
        return
    with as_on_device(), _patched_methods(reads), _watched_operators(reads):
        yield reads


@contextlib.contextmanager
def _patched_methods(reads: DeviceReads) -> Iterator[None]:
    import torch

    own = vars(torch.Tensor)
    before = {name: own.get(name) for name in METHODS}  # None where it is inherited from the C base class
    for name in METHODS:
        setattr(torch.Tensor, name, _noting(reads, name, getattr(torch.Tensor, name)))
    try:
        yield
    finally:
        for name, method in before.items():
            if method is None:
                delattr(torch.Tensor, name)
            else:
                setattr(torch.Tensor, name, method)


def _noting(reads: DeviceReads, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapper(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if name != "to" or _to_host(args, kwargs):
            reads.note(f"Tensor.{name}")
        outer, reads.busy = reads.busy, True
        try:
            return method(tensor, *args, **kwargs)
        finally:
            reads.busy = outer

    return wrapper


def _watched_operators(reads: DeviceReads) -> contextlib.AbstractContextManager[Any]:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if _reads(func._schema.name, args):
                reads.note(func._schema.name)
            return func(*args, **(kwargs or {}))

    return Watch()  # type: ignore[no-untyped-call]  # as above


def _reads(operator: str, args: Sequence[Any]) -> bool:
    """Whether the host must wait: for a number, or to learn how many entries of a mask are true."""
    if operator == "aten::index":
        return _by_mask(args[1])
    if operator in ("aten::index_put", "aten::index_put_"):
        return _by_mask(args[1]) and args[2].numel() != 1  # one value is filled in without counting
    return operator in OPERATORS


def _by_mask(indices: Sequence[Any]) -> bool:
    return any(index is not None and str(index.dtype) in ("torch.bool", "torch.uint8") for index in indices)


def _to_host(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether ``tensor.to(...)`` names the host; a device object may be the tensor's own."""
    return any(isinstance(value, str) and value.startswith("cpu") for value in (*args, *kwargs.values()))
