"""Small arrays on the CPU: the same memory as numpy, where operations on them are several times faster.

A detector that does arithmetic on a few hundred numbers per step may take ``local(event.norms)``: a numpy view where
the tensor lies in host memory already (no wait, no copy), the tensor itself where it lies on a device. Written for both
(`numpy` and `torch` share most names), it never reads a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_views = True


def local(array: Any) -> Any:
    """A numpy view that shares memory with a strided CPU tensor; whatever else is given comes back as it is."""
    if not _views or not getattr(array, "is_cpu", False):
        return array
    try:
        return array.numpy()
    except (RuntimeError, TypeError):  # it requires grad, or is sparse, or of a dtype that numpy lacks
        return array


@contextmanager
def as_on_device() -> Iterator[None]:
    """Within this block CPU tensors are treated as if they lay on a device, so that reads of them can be counted."""
    global _views  # noqa: PLW0603 - a switch for tests and measurements
    before, _views = _views, False
    try:
        yield
    finally:
        _views = before
