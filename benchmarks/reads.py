"""Counts host reads: every place where Python waits for a tensor's value."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dynguard.arrays import as_on_device

# What Python calls on a tensor to get its value; on an accelerator each waits for the device.
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
)
# Operators whose result depends on values (a scalar, or a shape), so that the host must wait.
OPERATORS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal")


class HostReads(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch leaves it untyped
    """While active, counts reads by name.

    A read that goes through several of the counted places counts once, and so does a copy to the host however often
    that copy is looked at. ``counts`` is for the thread that entered, ``elsewhere`` for all others.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch leaves it untyped
        self.counts: Counter[str] = Counter()
        self.elsewhere: Counter[str] = Counter()
        self._owner = threading.get_ident()
        self._inside = threading.local()
        self._home: dict[int, Tensor] = {}  # copies on the host by address of their memory; held, so none is reused

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in OPERATORS or (name in ("index", "index_put_") and _by_mask(args)) or _to_host(name, args, kwargs):
            self._note(name, args[0])
        return func(*args, **(kwargs or {}))

    @contextmanager
    def counting(self) -> Iterator[HostReads]:
        """Count in this block: operators by dispatch, methods by standing in for them."""
        before = {name: vars(Tensor).get(name) for name in METHODS}
        for name in METHODS:
            setattr(Tensor, name, self._counted(name, getattr(Tensor, name)))
        try:
            with as_on_device(), self:
                yield self
        finally:
            for name, method in before.items():
                if method is None:
                    delattr(Tensor, name)
                else:
                    setattr(Tensor, name, method)

    def _note(self, name: str, tensor: Tensor) -> None:
        if getattr(self._inside, "depth", 0) or tensor.untyped_storage().data_ptr() in self._home:
            return
        (self.counts if threading.get_ident() == self._owner else self.elsewhere)[name] += 1

    def _counted(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self._note(name, tensor)
            self._inside.depth = getattr(self._inside, "depth", 0) + 1
            try:
                result = method(tensor, *args, **kwargs)
                if name == "cpu":
                    # On a CPU, cpu() gives the tensor itself; stand for the copy that it is elsewhere.
                    result = result.clone() if result is tensor else result
                    self._home[result.untyped_storage().data_ptr()] = result
                return result
            finally:
                self._inside.depth -= 1

        return counted


def _by_mask(args: tuple[Any, ...]) -> bool:
    indices = args[1] if len(args) > 1 else ()
    return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices or ())


def _to_host(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> bool:
    """Whether a copy goes from a device to the host."""
    if name == "copy_":
        return bool(args[0].device.type == "cpu" != args[1].device.type)
    if name == "_to_copy":
        target = (kwargs or {}).get("device")
        return target is not None and bool(torch.device(target).type == "cpu" != args[0].device.type)
    return False
