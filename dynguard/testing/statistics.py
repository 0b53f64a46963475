"""Gradient statistics of fake events, for numpy arrays and, where they are given, torch tensors."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np


def is_tensor(value: object) -> TypeGuard[Any]:
    """Whether ``value`` is a torch tensor; never imports torch, as whoever has a tensor has done so."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def scalar(value: Any) -> Any:
    """A 0-d array of float32 or wider from a number; a tensor is detached and widened, and stays where it is."""
    if value is None:
        return None
    if is_tensor(value):
        detached = value.detach()
        return detached if detached.element_size() >= 4 else detached.float()
    array = np.asarray(value)
    return array if array.dtype == np.float64 and isinstance(value, np.ndarray) else array.astype(np.float32)


def _entries(gradient: Any) -> Any:
    """The entries of a gradient as one flat array of float32 or wider (complex ones by modulus, sparse ones summed)."""
    if is_tensor(gradient):
        dense = gradient.detach()
        dense = dense.coalesce().values() if dense.is_sparse else dense
        flat = dense.abs() if dense.is_complex() else dense
        return flat.reshape(-1) if flat.element_size() >= 4 else flat.reshape(-1).float()
    array = np.asarray(gradient).reshape(-1)
    return np.abs(array) if np.iscomplexobj(array) else array.astype(np.float64)


def norm(gradient: Any) -> Any:
    """L2 norm, 0-d; 0 for None and for no entries."""
    if gradient is None:
        return np.float64(0.0)
    entries = _entries(gradient)
    if is_tensor(entries):
        return entries.norm()
    with np.errstate(all="ignore"):
        return np.sqrt(np.sum(np.square(entries)))


def _largest(gradient: Any) -> Any:
    if gradient is None:
        return np.float64(0.0)
    entries = _entries(gradient)
    if is_tensor(entries):
        return entries.abs().amax() if entries.numel() else entries.sum()
    return np.abs(entries).max(initial=0.0)


def _rms_ratio(gradient: Any, moment: Any) -> Any:
    if gradient is None or moment is None:
        return np.float64(np.nan)
    g, v = _entries(gradient), _entries(moment)
    with np.errstate(all="ignore"):
        return (g * g / v).mean() ** 0.5


def _cosine(gradient: Any, before: Any) -> Any:
    if gradient is None or before is None:
        return np.float64(np.nan)
    g, b = _entries(gradient), _entries(before)
    with np.errstate(all="ignore"):
        return (g * b).sum() / (norm(g) * norm(b))


def stack(values: Sequence[Any], like: Sequence[Any] = ()) -> Any:
    """0-d values -> a float32 vector: a tensor where one of them or of ``like`` is a tensor, else a numpy array."""
    example = next((value for value in (*values, *like) if is_tensor(value)), None)
    if example is None:
        with np.errstate(over="ignore"):
            return np.array(values, dtype=np.float64).astype(np.float32)
    import torch

    device = example.device
    return torch.stack([torch.as_tensor(v).to(device=device, dtype=torch.float32) for v in values])


@dataclass(slots=True)
class FakeStatistics:
    """The numbers of a fake GradientEvent, computed once; satisfies ``events.GradientStatistics``.

    Attributes:
        norms, max_abs, rms_ratio, cosine: float32, shape (n,).
        global_norm: float32, 0-d.
    """

    norms: Any
    global_norm: Any
    max_abs: Any
    rms_ratio: Any
    cosine: Any

    @classmethod
    def of(
        cls,
        gradients: Sequence[Any],
        moments: Sequence[Any] | None = None,
        before: Sequence[Any] | None = None,
        parameters: Sequence[Any] = (),
    ) -> FakeStatistics:
        """From n gradients, and for the last two numbers n second moments and the n gradients of the step before.

        The numbers are tensors where any gradient, or any of ``parameters``, is a tensor.
        """
        nothing = [None] * len(gradients)
        like = [*gradients, *parameters]
        norms = stack([norm(g) for g in gradients], like)
        return cls(
            norms=norms,
            global_norm=scalar(norm(norms)),
            max_abs=stack([_largest(g) for g in gradients], like),
            rms_ratio=stack([_rms_ratio(g, v) for g, v in zip(gradients, moments or nothing, strict=True)], like),
            cosine=stack([_cosine(g, b) for g, b in zip(gradients, before or nothing, strict=True)], like),
        )
