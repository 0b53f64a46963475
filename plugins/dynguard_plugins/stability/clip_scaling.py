"""In-place scaling of gradients of any layout, dtype and device, for ``clip``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dynguard_plugins.stability.clip_numbers import is_tensor


def scale(gradients: Sequence[Any], factor: Any) -> None:
    """Multiply gradients in place.

    Args:
        gradients: n tensors (sparse, complex, distributed, on several devices) or numpy arrays; None is left out.
        factor: 0-d for all, or (n,). On the host, what would be multiplied by 1 is left alone; a tensor isn't read, so
            everything is multiplied.
    """
    if is_tensor(factor):
        _by_tensor(gradients, factor)
    elif np.ndim(factor) == 0:
        if factor < 1:
            _by_number([g for g in gradients if g is not None], float(factor))
    else:
        chosen = [i for i in np.flatnonzero(factor < 1).tolist() if gradients[i] is not None]
        _by_number([gradients[i] for i in chosen], factor[chosen].tolist())


def entries(gradient: Any) -> Any:
    """The tensor that holds the entries: the values of a sparse gradient, the shard of a distributed one."""
    import torch

    if hasattr(gradient, "to_local"):
        gradient = gradient.to_local()
    if gradient.layout is torch.strided:
        return gradient
    return gradient._values() if gradient.layout is torch.sparse_coo else gradient.values()


def _by_number(gradients: list[Any], factor: float | list[float]) -> None:
    """By one number, or by one for each."""
    if gradients and isinstance(gradients[0], np.ndarray):
        each = factor if isinstance(factor, list) else [factor] * len(gradients)
        for gradient, number in zip(gradients, each, strict=True):
            gradient *= number
    elif gradients:
        import torch

        plain, strided = torch.Tensor, torch.strided
        tensors = [g if type(g) is plain and g.layout is strided else entries(g) for g in gradients]
        torch._foreach_mul_(tensors, factor)


def _by_tensor(gradients: Sequence[Any], factor: Any) -> None:
    """By a 0-d or (n,) tensor, in groups that torch can fuse."""
    import torch

    groups: dict[tuple[Any, Any], tuple[list[Any], list[int]]] = {}
    for i, gradient in enumerate(gradients):
        if gradient is not None:
            tensor = entries(gradient)
            tensors, positions = groups.setdefault((tensor.device, tensor.dtype), ([], []))
            tensors.append(tensor)
            positions.append(i)
    for (device, _), (tensors, positions) in groups.items():
        here = factor.to(device, non_blocking=True)
        if factor.ndim == 0:
            torch._foreach_mul_(tensors, here)
        else:
            each = here.unbind()
            torch._foreach_mul_(tensors, [each[i] for i in positions])
