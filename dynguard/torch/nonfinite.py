"""Non-finite entries in whatever a batch or a module's arguments are made of: where they are and how many.

Reads the device, so it is for steps that fired only.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

log = logging.getLogger("dynguard")

SHOWN = 10  # rows and columns that are listed
LEAVES = (Tensor, np.ndarray, np.inexact, float, complex)


def walk(value: Any, path: str = "batch", *, limit: int = 100_000) -> Iterator[tuple[str, Any]]:
    """(path as the user would write it, leaf) of every tensor, array and float inside ``value``, each object once.

    Iterators are not consumed; modules and functions are not entered.
    """
    seen: dict[int, Any] = {}
    waiting = [(path, value)]
    while waiting and len(seen) < limit:
        place, item = waiting.pop()
        if id(item) in seen:
            continue
        seen[id(item)] = item
        if isinstance(item, LEAVES):
            yield place, item
            continue
        try:
            waiting += reversed(list(_children(place, item)))
        except Exception as error:  # noqa: BLE001 - the user's own container; the others are still looked at
            log.debug("can't look into %s for non-finite entries: %r", place, error)


def _children(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (str, bytes, Iterator)) or callable(value):
        return
    if callable(getattr(value, "to_numpy", None)) and value.to_numpy().dtype.kind in "fc":
        yield path, value.to_numpy()
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from ((f"{path}.{name}", item) for name, item in zip(value._fields, value, strict=True))
    elif isinstance(value, (list, tuple, deque)):
        yield from ((f"{path}[{i}]", item) for i, item in enumerate(value))
    elif callable(getattr(value, "keys", None)) and hasattr(value, "__getitem__"):
        yield from ((f"{path}[{key!r}]", value[key]) for key in value.keys())  # noqa: SIM118 - may be no Mapping
    elif dataclasses.is_dataclass(value):
        yield from ((f"{path}.{f.name}", getattr(value, f.name, None)) for f in dataclasses.fields(value))
    else:
        yield from ((f"{path}.{name}", item) for name, item in getattr(value, "__dict__", {}).items())


def holds_iterator(value: Any) -> bool:
    """Whether ``value`` is or holds an iterator, which can't be read a second time."""
    return isinstance(value, Iterator) or (
        isinstance(value, (list, tuple)) and any(isinstance(item, Iterator) for item in value)
    )


def dense(leaf: Any) -> Tensor | None:
    """A leaf's entries as a floating or complex tensor (of a sparse one those stored); None where there are none."""
    try:
        values = _plain(leaf.detach() if isinstance(leaf, Tensor) else _from_numpy(np.asarray(leaf)))
    except (TypeError, ValueError, RuntimeError) as error:
        log.debug("can't read a %s for non-finite entries: %r", type(leaf).__name__, error)
        return None
    return values if values is not None and values.numel() else None


def _from_numpy(array: Any) -> Tensor:
    if array.dtype.kind not in "fc":
        return torch.empty(0)
    narrow = np.float32 if array.dtype.itemsize <= 4 else np.float64
    with np.errstate(all="ignore"):
        return torch.from_numpy(array.astype(np.complex128 if array.dtype.kind == "c" else narrow))


def _plain(values: Tensor) -> Tensor | None:
    if values.is_meta or not (values.is_floating_point() or values.is_complex()):
        return None
    if values.layout is torch.sparse_coo:
        values = values._values()
    elif values.is_nested or values.layout is not torch.strided:
        values = values.values()
    return values.float() if values.dtype.itemsize == 1 else values  # an 8-bit float has no isfinite


def is_finite(values: Tensor) -> bool:
    """Whether every entry is finite, without a temporary of the tensor's size. Reads the host.

    What can't be read (a tensor inside ``torch.vmap``) is taken to be finite.
    """
    real = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
    try:
        if real.is_cpu:  # where the infinity norm is fifty times slower
            return math.isfinite(float(torch.stack(torch.aminmax(real)).abs().max()))
        return math.isfinite(float(torch.linalg.vector_norm(real, float("inf"))))
    except RuntimeError as error:
        log.debug("can't look for non-finite entries: %r", error)
        return True


def is_mask(values: Tensor) -> bool:
    """Whether a tensor is an additive mask: zeros and minus infinities, some of each or zeros alone."""
    if not values.ndim or values.is_complex():
        return False
    zero = values == 0
    return bool((zero | values.isneginf()).all() & zero.any())


def kinds(values: Iterable[Any]) -> tuple[bool, bool]:
    """(any NaN, any infinity) among tensors and floats; whatever else there is counts as neither."""
    nan = inf = False
    for value in values:
        if isinstance(value, float):
            nan, inf = nan or math.isnan(value), inf or math.isinf(value)
        entries = dense(value) if isinstance(value, Tensor) else None
        if entries is not None and not is_finite(entries):
            nan, inf = nan or bool(entries.isnan().any()), inf or bool(entries.isinf().any())
    return nan, inf


def _listed(hit: Tensor) -> str:
    return ", ".join(str(i) for i in hit.nonzero()[:SHOWN, 0].tolist())


def count(values: Tensor) -> dict[str, Any]:
    """How many entries are NaN or infinite, and in which rows (first axis) and columns (last axis): 10 of each."""
    bad = ~torch.isfinite(values)
    numbers: dict[str, Any] = {
        "nan_entries": int(values.isnan().sum()), "inf_entries": int(values.isinf().sum()),
        "entries": values.numel(), "dtype": str(values.dtype).removeprefix("torch."),
    }  # fmt: skip
    if bad.ndim:
        rows = bad.flatten(1).any(1) if bad.ndim > 1 else bad
        numbers |= {"rows": _listed(rows), "rows_hit": int(rows.sum())}
    if bad.ndim > 1:
        columns = bad.flatten(0, -2).any(0)
        numbers |= {"columns": _listed(columns), "columns_hit": int(columns.sum())}
    return numbers
