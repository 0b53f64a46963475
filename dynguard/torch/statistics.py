"""Statistics of all gradients of a step, each read once, on its own device, in float32 or wider."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from dynguard.torch.distributed import is_sharded, layout, sharded_norms

NARROW = (torch.float16, torch.bfloat16, torch.float32)


def dense(gradient: Tensor) -> Tensor:
    """A real, strided tensor with the same L2 norm and extremes as ``gradient``, sharing its memory where it can.

    A sparse gradient is coalesced first: an uncoalesced one holds a row's duplicates apart, whose sum is the gradient.
    """
    gradient = gradient.detach()
    if gradient.layout is not torch.strided:
        gradient = gradient.coalesce().values() if gradient.layout is torch.sparse_coo else gradient.values()
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which statistics of a gradient of ``dtype`` are kept: an fp16 norm overflows at finite entries."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def norms(gradients: Sequence[Tensor | None], *, plain: bool = False) -> Tensor:
    """L2 norm of every gradient, shape (n,); 0 where there is none.

    float32, or float64 if any gradient is double. On the device of the first gradient, all others being brought
    there without a host read. Gradients may be sparse, complex, of any dtype and on several devices; ``plain`` says
    that the parameters are real, at most float32 and on one device, which is tried first.
    """
    if plain:
        try:
            return torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32))  # type: ignore[arg-type]
        except (RuntimeError, TypeError, NotImplementedError):
            pass  # a missing or sparse gradient: the careful way below takes any
    return _norms_of_any(gradients)


def _norms_of_any(gradients: Sequence[Tensor | None]) -> Tensor:
    if any(is_sharded(g) for g in gradients):
        return _norms_over_ranks(gradients)
    reals = [None if g is None else dense(g) for g in gradients]
    present = [g for g in reals if g is not None]
    if not present:
        return torch.zeros(len(gradients))
    device = present[0].device
    dtype = torch.float64 if any(g.dtype == torch.float64 for g in present) else torch.float32
    out = [torch.zeros((), device=device, dtype=dtype)] * len(gradients)
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, g in enumerate(reals):
        if g is not None and g.numel():
            groups.setdefault((g.device, g.dtype), []).append(i)
    for (_, kind), members in groups.items():
        values = _group_norms([reals[i] for i in members], kind)  # type: ignore[misc]
        for i, value in zip(members, values, strict=True):
            out[i] = value.to(device=device, dtype=dtype, non_blocking=True)
    return torch.stack(out)


def _norms_over_ranks(gradients: Sequence[Tensor | None]) -> Tensor:
    """Norms where some gradients are shards of a tensor on several ranks: the norms of the whole tensors."""
    shards: dict[Any, list[int]] = {}
    for i, g in enumerate(gradients):
        if g is not None and is_sharded(g):
            shards.setdefault(layout(g), []).append(i)
    mine = {i for members in shards.values() for i in members}
    norms = _norms_of_any([None if i in mine else g for i, g in enumerate(gradients)])
    for members in shards.values():
        values = sharded_norms([gradients[i] for i in members])  # type: ignore[misc]
        norms = norms.to(values.device, torch.promote_types(norms.dtype, values.dtype))
        norms[torch.tensor(members, device=values.device)] = values.to(norms.dtype)
    return norms


def _group_norms(gradients: list[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
    """Norms of tensors of one dtype and device; doubles are scaled first, as the square of 1e200 overflows."""
    if dtype != torch.float64:
        return torch._foreach_norm(gradients, 2, dtype=torch.float32)
    return [scaled_norm(g) for g in gradients]


def scaled_norm(values: Tensor) -> Tensor:
    """L2 norm in float64 that overflows only where the norm itself does, 0-d."""
    wide_values = values.to(torch.float64)
    largest = torch.linalg.vector_norm(wide_values, float("inf"))
    unit = torch.where((largest > 0) & largest.isfinite(), largest, torch.ones_like(largest))
    norm: Tensor = unit * torch.linalg.vector_norm(wide_values / unit)
    return norm


class Statistics:
    """Lazy statistics of one step's gradients: each is computed on first use and shared by all plugins.

    Args:
        gradients: one per parameter as they came, None where there is none.
        plain: whether the parameters are real, at most float32 and on one device.
        scale: 0-d tensor by which the gradients are still multiplied (fused optimizers under GradScaler), or None.
        moments: asked for the second moments (Adam's v, bias-corrected) by parameter, None where there is none.
        previous: the gradients of the step before, None where there was none.
        remember: told to keep these gradients for the next step, once someone asks for the cosine.
    """

    def __init__(
        self,
        gradients: Sequence[Tensor | None],
        *,
        plain: bool = False,
        scale: Tensor | None = None,
        moments: Callable[[], Sequence[Tensor | None]] | None = None,
        previous: Sequence[Tensor | None] = (),
        remember: Callable[[Sequence[Tensor | None]], None] | None = None,
    ) -> None:
        self.gradients = gradients
        self._plain = plain
        self._scale = scale
        self._moments = moments
        self._previous = previous
        self._remember = remember

    @cached_property
    def _plain_norms(self) -> Tensor | None:
        """All norms at once, which works for dense gradients only, and is how to know that all are."""
        try:
            return torch.stack(torch._foreach_norm(self.gradients, 2, dtype=torch.float32)) if self._plain else None  # type: ignore[arg-type]
        except (RuntimeError, TypeError, NotImplementedError):
            return None

    @cached_property
    def sparse(self) -> tuple[int, ...]:
        """Indices of the sparse gradients."""
        if self._plain_norms is not None:
            return ()
        return tuple(i for i, g in enumerate(self.gradients) if g is not None and g.layout is torch.sparse_coo)

    @cached_property
    def summed(self) -> Sequence[Tensor | None]:
        """The gradients, sparse ones coalesced: sorting a large one is most of what it costs, so it is done once."""
        if not self.sparse:
            return self.gradients
        summed = list(self.gradients)
        for i in self.sparse:
            summed[i] = cast(Tensor, summed[i]).coalesce()
        return summed

    @cached_property
    def norms(self) -> Tensor:
        """L2 norm of every gradient, shape (n,)."""
        values = norms(self.summed) if self._plain_norms is None else self._plain_norms
        return values if self._scale is None else values / self._scale.to(values.device)

    @cached_property
    def global_norm(self) -> Tensor:
        """L2 norm of all gradients together, 0-d."""
        norms = self.norms
        return torch.linalg.vector_norm(norms) if norms.dtype == torch.float32 else scaled_norm(norms)

    @cached_property
    def max_abs(self) -> Tensor:
        """Largest absolute entry of every gradient, shape (n,)."""
        like = self.norms
        rows = []
        for gradient in self.summed:
            real = None if gradient is None else dense(gradient)
            rows.append(
                like.new_zeros(())
                if real is None or not real.numel()
                else torch.linalg.vector_norm(real, float("inf"), dtype=wide(real.dtype)).to(like)
            )
        values = torch.stack(rows) if rows else like
        return values if self._scale is None else values / self._scale.to(values.device)

    @cached_property
    def rms_ratio(self) -> Tensor:
        """RMS of g / sqrt(v) by parameter, shape (n,); NaN without a second moment or if sparse."""
        variances = self._moments() if self._moments is not None else [None] * len(self.gradients)
        tiny = torch.finfo(torch.float32).tiny
        ratios: list[Tensor | None] = []
        counts = []
        for gradient, variance in zip(self.gradients, variances, strict=True):
            known = gradient is not None and variance is not None and gradient.layout is torch.strided
            if not known:
                ratios.append(None)
                counts.append(math.nan)
                continue
            assert gradient is not None
            assert variance is not None
            size = gradient.detach().abs() if gradient.is_complex() else gradient.detach()
            wider = size.to(wide(size.dtype))
            ratios.append(wider / variance.clamp_min(tiny).sqrt())
            counts.append(math.sqrt(gradient.numel()) if gradient.numel() else math.nan)
        values = norms(ratios) if any(r is not None for r in ratios) else self.norms * 0
        values = values / torch.tensor(counts, dtype=values.dtype).to(values.device, non_blocking=True)
        return values if self._scale is None else values / self._scale.to(values.device)

    @cached_property
    def cosine(self) -> Tensor:
        """Cosine of every gradient to that of the last step, shape (n,); NaN where there is no last one.

        Asking keeps a copy of the gradients for the next step.
        """
        like = self.norms
        previous = self._previous or [None] * len(self.gradients)
        rows = []
        for i, gradient in enumerate(self.gradients):
            last = previous[i] if i < len(previous) else None
            if gradient is None or last is None or gradient.layout is not torch.strided or is_sharded(gradient):
                rows.append(like.new_full((), math.nan))
                continue
            now, then = (dense(t).flatten().to(wide(t.dtype)) for t in (gradient, last))
            rows.append(torch.nn.functional.cosine_similarity(now, then, dim=0).to(like))
        if self._remember is not None:
            self._remember(self.gradients)
        return torch.stack(rows) if rows else like
