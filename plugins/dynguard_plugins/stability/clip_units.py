"""AGC, the one rule of ``clip`` that looks at weights: the norms of single units against those of their gradients."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dynguard.arrays import local
from dynguard_plugins.stability.clip_numbers import choose, is_tensor, usable
from dynguard_plugins.stability.clip_scaling import entries

if TYPE_CHECKING:
    from dynguard.events import GradientEvent


@dataclass(slots=True)
class Part:
    """One gradient by units.

    Attributes:
        entries: what is to be multiplied.
        norms, weights: (k,) norms of the units of gradient and weights.
        shape: shape in which the k factors multiply the entries.
        rows: (nnz,) which unit each row of a sparse gradient's entries belongs to, or None.
    """

    entries: Any
    norms: Any
    weights: Any
    shape: Sequence[int]
    rows: Any = None


class UnitWise:
    """The gradient of each unit is held below ``ratio`` times the norm of the unit's weights.

    Brock et al. 2021, "High-performance large-scale image recognition without normalization" (arXiv 2102.06171),
    equation 3: G_i <- ratio max(|W_i|, eps) / |G_i| G_i where |G_i| / max(|W_i|, eps) > ratio. A unit is a row of a
    matrix, an output channel of a convolution, a row of an embedding table; biases, gains and scalars are one each.

    Args:
        ratio: the paper's lambda.
        eps: smallest norm of weights that counts, so that what starts at zero can move.
        exclude: patterns of parameter names that are left alone; None means the last layer, as in the paper.
    """

    def __init__(self, *, ratio: float, eps: float, exclude: tuple[str, ...] | None) -> None:
        self.ratio, self.eps, self.exclude = ratio, eps, exclude
        self._names: tuple[str, ...] | None = None
        self._chosen: list[int] = []

    def clip(self, event: GradientEvent) -> Any:
        """Scale the gradients; returns the smallest factor, 0-d, on the host or the device."""
        groups: dict[Any, list[Part]] = {}
        for i in self._which(event):
            gradient = event.gradients[i]
            if gradient is None or 0 in gradient.shape:
                continue
            part = measure(gradient, event.parameters[i])
            if 0 not in part.norms.shape:
                groups.setdefault(getattr(part.norms, "device", None), []).append(part)
        least = [self._scale(parts, event.scale) for parts in groups.values()]
        if len(least) < 2 or not any(is_tensor(value) for value in least):
            return min(least, default=1.0)
        import torch

        device = next(value.device for value in least if is_tensor(value))
        return torch.stack([torch.as_tensor(value, dtype=torch.float32, device=device) for value in least]).amin()

    def _which(self, event: GradientEvent) -> list[int]:
        """Indices of the parameters that are clipped."""
        if self._names is not event.names:
            self._names = event.names
            last = last_layer(event.names, event.parameters) if self.exclude is None else ()
            patterns = self.exclude or ()
            self._chosen = [
                i
                for i, name in enumerate(event.names)
                if name not in last and not any(fnmatch.fnmatchcase(name, p) for p in patterns)
            ]
        return self._chosen

    def _scale(self, parts: Sequence[Part], scale: Any) -> Any:
        """Scale gradients of one device; all their units are compared at once. Returns the smallest factor."""
        norms, weights = _joined([p.norms for p in parts]), _joined([p.weights for p in parts])
        if scale is not None:
            norms = norms / (scale.to(norms.device) if is_tensor(norms) and is_tensor(scale) else local(scale))
        limit = self.ratio * weights.clip(min=self.eps)
        factors = choose(usable(norms) & (norms > limit), limit / norms, 1.0)
        ends = np.cumsum([len(part.norms) for part in parts]).tolist()
        starts = [0, *ends[:-1]]
        on_host = not is_tensor(factors)
        lowest = np.minimum.reduceat(factors, starts) if on_host else None
        for i, part in enumerate(parts):
            if lowest is None or lowest[i] < 1:
                _multiply(part, factors[starts[i] : ends[i]])
        return factors.min()


def measure(gradient: Any, weight: Any) -> Part:
    """The units of one gradient and their norms; what a row of a table got from several lookups is one gradient."""
    if isinstance(gradient, np.ndarray):
        units, shape = _units(gradient)
        return Part(gradient, _array_norms(gradient, units), _array_norms(weight, units), shape)
    import torch

    weight = weight.detach()
    if gradient.layout is torch.strided:
        units, shape = _units(gradient)
        return Part(gradient, _norms(gradient, units), _norms(weight, units), shape)
    own = entries(gradient)
    if gradient.layout is not torch.sparse_coo:
        return Part(own, _norms(own, 1), _norms(weight, 1), [1])
    summed = gradient.coalesce()
    values = summed.values()
    if gradient.sparse_dim() != 1 or gradient.ndim == 1:
        return Part(own, _norms(values, 1), _norms(weight, 1), [1] * own.ndim)
    ids = summed.indices()[0]
    rows = torch.searchsorted(ids, gradient._indices()[0])
    shape = [-1, *[1] * (own.ndim - 1)]
    return Part(own, _norms(values, len(ids)), _norms(weight.index_select(0, ids), len(ids)), shape, rows)


def last_layer(names: Sequence[str], parameters: Sequence[Any]) -> tuple[str, ...]:
    """Names of the parameters of the module that holds the last matrix: the classifier, in a model written in order."""
    for name, parameter in zip(reversed(names), reversed(parameters), strict=True):
        if parameter.ndim >= 2:
            module, dot, _ = name.rpartition(".")
            return tuple(n for n in names if n.rpartition(".")[0] == module) if dot else (name,)
    return ()


def _joined(arrays: Sequence[Any]) -> Any:
    if not is_tensor(arrays[0]):
        return np.concatenate(arrays)
    import torch

    return local(torch.cat(list(arrays)))


def _units(array: Any) -> tuple[int, list[int]]:
    """How many units, and the shape in which their factors multiply; a single one where only one dimension is long."""
    single = sum(length > 1 for length in array.shape) <= 1
    return (1, [1] * array.ndim) if single else (array.shape[0], [array.shape[0], *[1] * (array.ndim - 1)])


def _norms(tensor: Any, units: int) -> Any:
    """(units,) L2 norms in float32 or wider; whole where the tensor is sharded."""
    import torch

    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    wide = torch.float64 if real.dtype == torch.float64 else torch.float32
    within = None if units == 1 else tuple(range(1, real.ndim))
    norms = torch.linalg.vector_norm(real, dim=within, dtype=wide)
    return (norms.full_tensor() if hasattr(norms, "full_tensor") else norms).reshape(units)


def _array_norms(array: Any, units: int) -> Any:
    return np.sqrt(np.square(array.astype(np.float64)).reshape(units, -1).sum(axis=1))


def _multiply(part: Part, factor: Any) -> None:
    """Multiply the entries in place by the factors of their units."""
    own = part.entries
    if isinstance(own, np.ndarray):
        own *= factor.reshape(part.shape).astype(own.dtype)
        return
    import torch

    # float32 for half precision too: the product is rounded, the factor is not
    wide = torch.float64 if own.dtype in (torch.float64, torch.complex128) else torch.float32
    factor = torch.as_tensor(factor, dtype=wide, device=part.norms.device)
    if part.rows is not None:
        factor = factor.index_select(0, part.rows)
    factor = factor.reshape(part.shape)
    if hasattr(own, "device_mesh"):
        from torch.distributed.tensor import DTensor, Replicate

        factor = DTensor.from_local(factor, own.device_mesh, [Replicate()] * own.device_mesh.ndim, run_check=False)
    own.mul_(factor)
