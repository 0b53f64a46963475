"""Small functions for numbers that are numpy's in host memory and tensors, never read, on a device; for ``clip``."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def is_tensor(value: object) -> bool:
    """Whether this is a tensor, which must not be read; all else is on the host."""
    return not isinstance(value, (np.ndarray, np.generic, bool, int, float, list, tuple))


def choose(condition: Any, yes: Any, no: Any) -> Any:
    """``where`` for tensors, arrays and plain booleans."""
    if isinstance(condition, (bool, np.bool_)):
        return yes if condition else no
    if isinstance(condition, np.ndarray):
        return np.where(condition, yes, no)
    import torch

    return torch.where(condition, yes, no)


def usable(norm: Any) -> Any:
    """Whether a norm is finite and not zero, entry by entry."""
    return (norm > 0) & (norm < math.inf)


def shrinking(factor: Any, norm: Any) -> Any:
    """``factor`` where it shrinks a usable norm, else 1: never a NaN, never a growth."""
    return choose(usable(norm) & (factor < 1), factor, 1.0)


def placed(value: Any, like: Any) -> Any:
    """``value`` (numbers, array or tensor) where ``like`` is, in float64 on the host."""
    if not is_tensor(like):
        host = value.detach().cpu().numpy() if is_tensor(value) else value
        return np.asarray(host, np.float64)[()]
    import torch

    return torch.as_tensor(value, dtype=like.dtype, device=like.device)


def number(value: Any) -> Any:
    """A plain float or list of floats, for a state dict; reads the device."""
    return value.tolist() if hasattr(value, "tolist") else value
