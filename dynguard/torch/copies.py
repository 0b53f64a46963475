"""Copies of many tensors at once, of those inside nested containers too, and which of them are finite.

What ``buffers``, ``recovery`` and ``snapshots`` are made of. Nothing here reads a device.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from dynguard.torch import names as naming
from dynguard.torch.statistics import dense

Path: TypeAlias = tuple[Hashable, ...]
NARROWEST = 1  # bytes per entry of float8, which has no arithmetic


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; any other tensor as it is."""
    shard = getattr(tensor, "_local_tensor", None)
    return shard if isinstance(shard, Tensor) else tensor


def has_values(tensor: Tensor) -> bool:
    """Whether the tensor is neither on ``meta`` nor of a lazy module that has not seen its first batch."""
    return not is_lazy(tensor) and not naming.is_meta(tensor)


def nbytes(tensor: Tensor) -> int:
    """Bytes of the values on this rank."""
    values = dense(local(tensor))
    return values.numel() * values.element_size()


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor], *, non_blocking: bool = False) -> None:
    """``targets[i] <- sources[i]``, in one fused call on the CPU and for each pair of devices and dtypes elsewhere."""
    groups: dict[Hashable, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        cpu = target.is_cpu and source.is_cpu
        kind = () if cpu else (target.device, target.dtype, source.device, source.dtype)
        group = groups.setdefault(kind, ([], []))
        group[0].append(target)
        group[1].append(source)
    for into, out in groups.values():
        try:
            torch._foreach_copy_(into, out, non_blocking=non_blocking)
        except (RuntimeError, TypeError):  # subclasses and layouts that know no fused copy
            for target, source in zip(into, out, strict=True):
                target.copy_(source, non_blocking=non_blocking)


# -- which tensors are finite


def is_floating(tensor: Tensor) -> bool:
    """Whether entries can be NaN or infinite."""
    return tensor.is_floating_point() or tensor.is_complex()


def look(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Which floating tensors hold a NaN, and which hold an infinity where they hold no NaN.

    Two bool tensors of shape (n,) on the device of the first tensor, made without a host read. Extremes are taken, not
    norms: the norm of finite float32 entries overflows from 1.8e19 on.
    """
    if not tensors:
        return torch.zeros(0, dtype=torch.bool), torch.zeros(0, dtype=torch.bool)
    groups: dict[Hashable, list[int]] = {}
    values = [_with_arithmetic(dense(local(tensor))) for tensor in tensors]
    for i, value in enumerate(values):
        groups.setdefault((value.device, value.dtype, value.ndim == 0, value.numel() == 0), []).append(i)
    device = values[0].device
    nan: list[Tensor] = [torch.zeros(())] * len(values)
    inf = list(nan)
    for members in groups.values():
        largest = _extremes([values[i] for i in members])
        for out, flags in ((nan, largest.isnan()), (inf, largest.isinf())):
            for i, flag in zip(members, flags.to(device, non_blocking=True).unbind(), strict=True):
                out[i] = flag
    return torch.stack(nan), torch.stack(inf)


def _with_arithmetic(values: Tensor) -> Tensor:
    return values.float() if values.element_size() == NARROWEST else values


def _extremes(values: Sequence[Tensor]) -> Tensor:
    """Largest absolute entry, shape (n,), of tensors of one device and dtype; NaN where there is one."""
    if values[0].ndim == 0:
        return torch.stack(list(values))
    if not values[0].numel():
        return values[0].new_zeros(len(values))
    if values[0].is_cpu:  # where the infinity norm is fifty times slower
        ends = [torch.stack(torch.aminmax(value)) for value in values]
        return torch.stack(ends).abs().amax(1)
    return torch.stack(torch._foreach_norm(list(values), math.inf))


# -- containers with tensors in them


@dataclass(frozen=True, slots=True)
class Leaf:
    """Stands for a tensor in a frozen container.

    Attributes:
        path: under which the tensor's copy is found.
        device: where the tensor was.
        rewrap: makes a DTensor of the shard, or None.
    """

    path: Path
    device: torch.device
    rewrap: Callable[[Tensor], Tensor] | None = None


class Leaves:
    """The tensors of frozen containers: each once, however many names it has.

    Attributes:
        tensors: by path.
        nan: paths of plain numbers that are NaN.
    """

    def __init__(self) -> None:
        self.tensors: dict[Path, Tensor] = {}
        self.nan: list[Path] = []
        self._by_id: dict[int, Leaf] = {}

    def freeze(self, value: Any, path: Path) -> Any:
        """A copy of nested containers in which a Leaf stands for every tensor."""
        if isinstance(value, Tensor):
            return self.add(value, path)
        if isinstance(value, float) and math.isnan(value):
            self.nan.append(path)
        return rebuild(value, lambda key, item: self.freeze(item, (*path, key)))

    def add(self, tensor: Tensor, path: Path) -> Leaf:
        """The leaf of a tensor: that of its first name where it was added before."""
        leaf = self._by_id.get(id(tensor))
        if leaf is None:
            leaf = self._by_id[id(tensor)] = Leaf(path, local(tensor).device, _rewrap(tensor))
            self.tensors[path] = tensor
        return leaf

    def find(self, tensor: Tensor | None) -> Leaf | None:
        """The leaf of a tensor that was added."""
        return self._by_id.get(id(tensor))

    @property
    def nbytes(self) -> int:
        """Bytes that copies of all tensors take."""
        return sum(nbytes(tensor) for tensor in self.tensors.values())


def _rewrap(tensor: Tensor) -> Callable[[Tensor], Tensor] | None:
    if local(tensor) is tensor:
        return None
    from torch.distributed.tensor import DTensor

    assert isinstance(tensor, DTensor)
    mesh, placements, shape, stride = tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()
    return lambda shard: DTensor.from_local(shard, mesh, placements, run_check=False, shape=shape, stride=stride)


def rebuild(value: Any, change: Callable[[Hashable, Any], Any]) -> Any:
    """A container of the same type with ``change(key, item)`` for every item; arrays copied, all else as it is."""
    if isinstance(value, dict):
        new = copy.copy(value)  # Counter, OrderedDict and defaultdict stay what they are
        for key, item in value.items():
            new[key] = change(key, item)
        return new
    if isinstance(value, (list, tuple, deque)):
        items = [change(i, item) for i, item in enumerate(value)]
        if isinstance(value, deque):
            return deque(items, value.maxlen)
        if isinstance(value, tuple):
            return value._make(items) if hasattr(value, "_make") else tuple(items)
        return items
    return copy.copy(value) if isinstance(value, (set, np.ndarray)) else value


class Thaw:
    """Puts copies back: in place wherever a fitting tensor is there, so that references to it stay good.

    Writes go past the version counter: backward through a graph that is still pending must not die of a rollback.
    ``finish()`` does the copying into tensors in place.
    """

    def __init__(self, memory: Mapping[Path, Tensor]) -> None:
        self._memory = memory
        self._claimed: dict[int, tuple[Tensor, Tensor, Path]] = {}
        self._fresh: dict[Path, Tensor] = {}

    def write(self, target: Tensor, leaf: Leaf) -> bool:
        """Have the leaf's copy written into ``target``, converted if need be; False where it doesn't fit."""
        shard = local(target)
        overlaps = 0 in shard.stride() if shard.layout is torch.strided else False
        if shard.shape != self._memory[leaf.path].shape or (overlaps and shard.numel() > 1):
            return False
        # Two leaves that were apart and have one tensor now can't both be written into it.
        return self._claimed.setdefault(id(target), (target, shard, leaf.path))[2] == leaf.path

    def fresh(self, leaf: Leaf) -> Tensor:
        """A new tensor on the device that the leaf was on, the same one each time."""
        if leaf.path not in self._fresh:
            made = self._memory[leaf.path].to(leaf.device, copy=True)
            self._fresh[leaf.path] = made if leaf.rewrap is None else leaf.rewrap(made)
        return self._fresh[leaf.path]

    def value(self, frozen: Any, current: Any = None) -> Any:
        """What was frozen, made of ``current`` as far as that fits; entries that were not there then are dropped."""
        if isinstance(frozen, Leaf):
            return self._tensor(frozen, current)
        if isinstance(frozen, dict) and type(current) is type(frozen):
            for key in [key for key in current if key not in frozen]:
                del current[key]
            current.update({key: self.value(item, current.get(key)) for key, item in frozen.items()})
            return current
        if isinstance(frozen, list) and isinstance(current, list):
            padded = [*current, *[None] * len(frozen)]
            current[:] = [self.value(item, padded[i]) for i, item in enumerate(frozen)]
            return current
        return rebuild(frozen, lambda _, item: self.value(item))

    def _tensor(self, leaf: Leaf, current: Any) -> Tensor:
        same = isinstance(current, Tensor) and (local(current).dtype, local(current).device) == (
            self._memory[leaf.path].dtype,
            leaf.device,
        )
        return current if same and self.write(current, leaf) else self.fresh(leaf)

    def finish(self) -> None:
        """Copy, and wait for devices, as the copies' memory may be used again soon."""
        claimed = self._claimed.values()
        copy_all([shard.data for _, shard, _ in claimed], [self._memory[path] for *_, path in claimed])
        for device in {shard.device for _, shard, _ in claimed if shard.is_cuda}:
            torch.cuda.synchronize(device)
