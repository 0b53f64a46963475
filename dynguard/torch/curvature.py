"""The largest eigenvalue of the loss's Hessian, plain or preconditioned, from a few gradients.

Lanczos iteration (Golub & Van Loan, "Matrix Computations", section 10.1) with full reorthogonalisation on products that
come from finite differences of the gradient (Pearlmutter 1994, "Fast exact multiplication by the Hessian", equation 1)
or from differentiating it once more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from dynguard.torch.probe import Probe, ProbeError
from dynguard.torch.statistics import wide

Method = Literal["finite_difference", "double_backward"]
# Step of the difference in units of the weights' norm: the root of the precision, where rounding (precision / step) and
# truncation (step) meet. Measured at 300 steps of a cross-entropy MLP: 2e-3 was 4 % low, 4e-4 1 %, 1e-4 0.2 %.
STEP = {torch.float64: 1e-7}
NARROW_STEP = 3.5e-4
COARSER = 8.0  # a longer step for losses that are evaluated at half precision (autocast)
HALF = (torch.float16, torch.bfloat16)


@dataclass(slots=True, frozen=True)
class Sharpness:
    """One measurement.

    Attributes:
        value: largest algebraic eigenvalue (negative where the loss curves down everywhere that was looked).
        residual: norm of ``A v - value v`` over ``|value|``, v being the unit vector that was found.
        gradients: gradient evaluations spent.
        vector: (d,) v, to start from the next time.
        method: how the products were made.
        coarse: whether the step of the difference had to be made longer, because of rounding in the loss.
    """

    value: float
    residual: float
    gradients: int
    vector: Tensor
    method: Method
    coarse: bool = False


class Curvature:
    """Products with ``S (H + W) S`` at the present weights, H being the Hessian of a probe's loss.

    Args:
        probe: the loss on a batch.
        scales: squares of the entries of the diagonal S by parameter: a number, a tensor of its shape, or None for 1.
        decay: entries of the diagonal W by parameter (coupled weight decay adds to the Hessian).
        method: ``finite_difference`` costs one gradient per product and one in all; ``double_backward`` about two per
            product, and kernels without a second derivative (fused attention) refuse it.
        step: of the difference in units of the weights' norm; by default the root of their precision.

    Raises:
        ProbeError: there is nothing to move, or weights in half precision, whose rounding drowns a difference.
    """

    def __init__(
        self,
        probe: Probe,
        *,
        scales: Sequence[Any] | None = None,
        decay: Sequence[float] | None = None,
        method: Method = "finite_difference",
        step: float | None = None,
    ) -> None:
        self._probe = probe
        self.method: Method = method
        parameters = probe.parameters
        if not any(p.numel() for p in parameters):
            raise ProbeError("no parameter has any entries")
        if method == "finite_difference" and any(p.dtype in HALF for p in parameters):
            raise ProbeError("weights in half precision can't be moved finely enough for a difference of gradients")
        self._decay = list(decay or [0.0] * len(parameters))
        self._base: list[Tensor] | None = None
        self._dtype = torch.float64 if any(p.dtype == torch.float64 for p in parameters) else torch.float32
        self._device = parameters[0].device
        usual = STEP.get(self._dtype, NARROW_STEP)
        self.step, self.longest = step or usual, usual * COARSER
        self._roots = [_root(s, self._dtype) for s in scales or [None] * len(parameters)]
        self.size = sum(p.numel() for p in parameters)

    def product(self, vector: Tensor) -> Tensor:
        """(d,) the matrix times a (d,) vector."""
        scaled = [v * r for v, r in zip(self._split(vector), self._roots, strict=True)]
        found = self._double(scaled) if self.method == "double_backward" else self._difference(scaled)
        parts = [
            ((h.to(self._dtype) + w * s) * r).flatten().to(self._device)
            for h, s, r, w in zip(found, scaled, self._roots, self._decay, strict=True)
        ]
        return torch.cat(parts)

    def start(self, seed: int = 0) -> Tensor:
        """(d,) a random unit vector, the same for the same seed."""
        random = torch.Generator().manual_seed(seed)
        vector: Tensor = torch.randn(self.size, generator=random, dtype=self._dtype).to(self._device)
        return torch.nn.functional.normalize(vector, dim=0)

    def _split(self, vector: Tensor) -> list[Tensor]:
        parts: Sequence[Tensor] = torch.split(vector, [p.numel() for p in self._probe.parameters])
        return [v.view(p.shape).to(p.device) for v, p in zip(parts, self._probe.parameters, strict=True)]

    def _double(self, vectors: list[Tensor]) -> list[Tensor]:
        return self._probe.products([v.to(p.dtype) for v, p in zip(vectors, self._probe.parameters, strict=True)])

    def _difference(self, vectors: list[Tensor]) -> list[Tensor]:
        if self._base is None:
            self._base = self._probe.gradients()
        length = _norm(vectors)
        if not 0 < length < math.inf:
            raise ProbeError("the direction of the next product is zero or not finite")
        step = self.step * max(1.0, _norm(self._probe.parameters)) / length
        with _moved(self._probe.parameters, vectors, step):
            there = self._probe.gradients()
        return [(a.to(self._dtype) - b.to(self._dtype)) / step for a, b in zip(there, self._base, strict=True)]


def sharpness(
    curvature: Curvature, *, start: Tensor | None = None, products: int = 3, tolerance: float = 0.05, restarts: int = 4
) -> Sharpness:
    """The largest algebraic eigenvalue.

    Args:
        curvature: the matrix.
        start: the vector of an earlier measurement nearby; without one, up to ``restarts`` rounds of at least 8
            products are made until the residual is below ``tolerance``, the last of them with a longer difference
            where those before left more than four times that (rounding in the loss).
        products: products of a warm-started measurement; with finite differences one gradient more is spent.
        tolerance: relative residual that ends a cold measurement.

    Raises:
        ProbeError: a number on the way was not finite, or the loss can't be evaluated.
    """
    spent = curvature._probe.evaluations
    warm = start is not None and start.numel() == curvature.size
    vector = start if warm and start is not None else curvature.start()
    rounds, steps = (1, products) if warm else (restarts, max(products, 8))
    value = residual = math.nan
    coarse = False
    for k in range(rounds):
        if k and k == rounds - 1 and residual > 4 * tolerance and curvature.method == "finite_difference":
            coarse = curvature.step < curvature.longest
            curvature.step = curvature.longest
        value, residual, vector = _lanczos(curvature, vector, min(steps, curvature.size))
        if residual <= tolerance:
            break
    return Sharpness(value, residual, curvature._probe.evaluations - spent, vector, curvature.method, coarse)


def _lanczos(curvature: Curvature, start: Tensor, steps: int) -> tuple[float, float, Tensor]:
    """(Ritz value, relative residual, Ritz vector) of the largest algebraic eigenvalue."""
    basis = [start / start.norm()]
    images: list[Tensor] = []
    for k in range(steps):
        image = curvature.product(basis[k])
        if not bool(torch.isfinite(image).all()):
            raise ProbeError("a product with the Hessian is not finite")
        images.append(image)
        rest = image.clone()
        for _ in range(2):  # twice is enough (Parlett, "The symmetric eigenvalue problem", section 6.9)
            for q in basis:
                rest -= torch.dot(q, rest) * q
        length = rest.norm()
        if k + 1 == steps or float(length) <= 1e-7 * float(image.norm()) + 1e-30:
            break
        basis.append(rest / length)
    q, a = torch.stack(basis[: len(images)]), torch.stack(images)
    small = (q @ a.T).double().cpu()
    values, vectors = torch.linalg.eigh((small + small.T) / 2)
    value, weights = float(values[-1]), vectors[:, -1].to(q)
    vector, image = weights @ q, weights @ a
    off = float((image - value * vector).norm())
    return value, off / abs(value) if value else math.inf if off else 0.0, vector / vector.norm()


@contextmanager
def _moved(parameters: Sequence[Tensor], vectors: Sequence[Tensor], step: float) -> Iterator[None]:
    """The parameters a step away; afterwards what they were, bit for bit."""
    kept = [p.detach().clone() for p in parameters]
    try:
        with torch.no_grad():
            for p, v in zip(parameters, vectors, strict=True):
                p.copy_((p.to(v.dtype) + step * v).to(p.dtype))
        yield
    finally:
        with torch.no_grad():
            for p, k in zip(parameters, kept, strict=True):
                p.copy_(k)


def _norm(tensors: Sequence[Tensor]) -> float:
    return math.hypot(*(float(torch.linalg.vector_norm(t.detach(), dtype=wide(t.dtype))) for t in tensors if t.numel()))


def _root(scale: Any, dtype: torch.dtype) -> Any:
    if scale is None:
        return 1.0
    return scale.sqrt().to(dtype) if isinstance(scale, Tensor) else math.sqrt(scale)
