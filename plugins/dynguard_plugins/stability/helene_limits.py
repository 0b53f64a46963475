"""What is usual for gradients in units of curvature, layer by layer, and the clipping by it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dynguard_plugins.stability.helene_curvature import local

if TYPE_CHECKING:
    from dynguard.events import GradientEvent
    from dynguard_plugins.stability.helene_curvature import Curvature

SAMPLE = 256  # entries of a layer that are looked at in a step, others in the next
WEIGHT = 0.1  # of the newest step in a level
RISE = 3.0  # times the level so far that one step counts for at most
NUMBERS = ("level", "counts", "clipped", "seen")


class Limits:
    """Per layer: level, the running RMS of |g| / max(h, floor); and limits, ``multiple`` times that and max(h, floor).

    The level is taken of 256 evenly spaced entries per layer and step, another set in each, whose ratios count for at
    most the limit they were clipped to and together for at most 3 times the level. Steps that are rejected afterwards
    or not finite are left out.

    Args:
        base_clip: limit of |g| / max(h, floor), or None for ``multiple`` times the level.
        multiple: see there.
        warmup: accepted steps with a level before anything is clipped by it.
    """

    def __init__(self, base_clip: float | None, multiple: float, warmup: int) -> None:
        self.base_clip, self.multiple, self.warmup = base_clip, multiple, warmup
        self.level: Any = None  # these four: (n,) on one device
        self.counts: Any = None
        self.clipped: Any = None
        self.seen: Any = None
        self._names: tuple[str, ...] = ()
        self._saved: Mapping[str, Any] | None = None
        self._pending: tuple[int, Any, Any] | None = None
        self._upper: dict[int, Any] = {}
        self._lower: dict[int, Any] = {}
        self._base: Any = None  # (n,) base_clip of each layer that the limits were made with
        self._segments: tuple[Any, ...] | None = None

    def settle(self, event: GradientEvent) -> None:
        """Take in the step before, unless it was rejected."""
        self._prepare(event)
        if self._pending is None:
            return
        step, level, counts = self._pending
        self._pending = None
        rejected: Any = event.rejected if event.step == step + 1 else event.step <= step
        if hasattr(rejected, "logical_not"):
            import torch

            keep = rejected.to(self.level.device)
            self.level = torch.where(keep, self.level, level)
            self.counts = torch.where(keep, self.counts, counts)
        elif not rejected:
            self.level, self.counts = level, counts

    def forget(self) -> None:
        """The step before was undone."""
        self._pending = None

    def base(self) -> Any:
        """(n,) base_clip of each layer by what is known now; inf where nothing is to be clipped."""
        import torch

        if self.base_clip is not None:
            return torch.full_like(self.level, self.base_clip)
        known = (self.counts >= self.warmup) & (self.level > 0)
        return torch.where(known, self.level * self.multiple, torch.full_like(self.level, math.inf))

    def refresh(self, event: GradientEvent, chosen: Sequence[int], curvature: Curvature, floor_ratio: float) -> None:
        """Make the limits anew; no host read."""
        import torch

        self._base = self.base()
        for i in chosen:
            if curvature.means.get(i, 0.0) <= 0.0:
                continue  # it has shown no curvature at all yet
            h, gradient = curvature.values[i], local(event.gradients[i])
            if i not in self._upper or self._upper[i].shape != h.shape or self._upper[i].dtype != gradient.dtype:
                self._upper[i] = torch.empty_like(h, dtype=gradient.dtype)
                self._lower[i] = torch.empty_like(h, dtype=gradient.dtype)
            upper, narrow = self._upper[i], gradient.dtype != h.dtype
            limit = torch.clamp(h, min=floor_ratio * curvature.means[i], out=None if narrow else upper)
            limit.mul_(self._base[i].to(h.device, h.dtype))
            if narrow:  # rounded to 0, it would keep the entry from learning
                upper.copy_(limit.clamp_min_(torch.finfo(gradient.dtype).tiny))
            torch.neg(upper, out=self._lower[i])

    def observe(self, event: GradientEvent, chosen: Sequence[int], curvature: Curvature, floor_ratio: float) -> None:
        """Look at a sample of the ratios, before they are clipped; no host read."""
        import torch

        chosen = [i for i in chosen if i in self._upper and event.gradients[i].numel()]
        if not chosen:
            return
        parts = [self._ratios(event, i, curvature, floor_ratio) for i in chosen]
        ratios = torch.cat([r.to(self.level.device, self.level.dtype, non_blocking=True) for r in parts])
        indices, segments, lengths = self._layout(tuple(chosen), tuple(len(r) for r in parts))
        limits = self._base[indices][segments]
        over = ratios > limits
        square = torch.minimum(ratios, limits).square_()
        zeros = torch.zeros_like(lengths)
        rms = (zeros.index_add(0, segments, square) / lengths).sqrt_()
        self.clipped.index_add_(0, indices, zeros.index_add(0, segments, over.to(zeros.dtype)))
        self.seen.index_add_(0, indices, lengths)
        self._learn(event.step, indices, rms)

    def _learn(self, step: int, indices: Any, rms: Any) -> None:
        import torch

        level, counts = self.level[indices], self.counts[indices]
        weight = (1.0 / (counts + 1.0)).clamp_min_(WEIGHT)
        bounded = torch.where(counts > 0, torch.minimum(rms, RISE * level), rms)
        good = rms.isfinite() & (rms > 0)
        new = torch.where(good, level + weight * (bounded - level), level)
        self._pending = (
            step,
            self.level.index_copy(0, indices, new),
            self.counts.index_copy(0, indices, counts + good.to(counts.dtype)),
        )

    def _ratios(self, event: GradientEvent, index: int, curvature: Curvature, floor_ratio: float) -> Any:
        gradient, h = local(event.gradients[index]).detach(), curvature.values[index]
        if not (gradient.is_contiguous() and h.is_contiguous()):
            gradient, h = gradient.contiguous(), h.contiguous()
        stride = max(1, gradient.numel() // SAMPLE)
        start = event.step % stride
        some = gradient.view(-1)[start::stride][:SAMPLE].to(h.dtype)
        ratio = some.abs_() if some.dtype != gradient.dtype else some.abs()
        ratio = ratio / h.view(-1)[start::stride][:SAMPLE].clamp_min(floor_ratio * curvature.means[index])
        return ratio if event.scale is None else ratio / event.scale.to(ratio.device, ratio.dtype)

    def clip(self, event: GradientEvent, chosen: Sequence[int]) -> None:
        """Bound the gradients by the limits, in place; NaN stays."""
        import torch

        groups: dict[tuple[Any, Any], list[int]] = {}
        for i in chosen:
            if i not in self._upper:
                continue
            gradient, upper, lower = local(event.gradients[i]), self._upper[i], self._lower[i]
            if event.scale is not None:
                factor = event.scale.to(gradient.device, torch.float32)
                upper = (upper.to(torch.float32) * factor).to(gradient.dtype)
                lower = -upper
            elif not gradient.is_cpu:  # few launches count for more than few passes there
                groups.setdefault((upper.device, upper.dtype), []).append(i)
                continue
            torch.clamp(gradient, lower, upper, out=gradient)
        for members in groups.values():
            gradients = [local(event.gradients[i]) for i in members]
            torch._foreach_minimum_(gradients, [self._upper[i] for i in members])
            torch._foreach_maximum_(gradients, [self._lower[i] for i in members])

    def ready(self, chosen: Sequence[int], curvature: Curvature) -> bool:
        """Whether all layers whose curvature is known have limits."""
        return all(i in self._upper for i in chosen if curvature.means.get(i, 0.0) > 0.0)

    def _prepare(self, event: GradientEvent) -> None:
        """The numbers of all layers, on the device of the first; layers may have joined."""
        import torch

        count = len(event.names)
        self._names = event.names
        if self.level is None:
            device = event.parameters[0].device if count else torch.device("cpu")
            saved = self._saved or {}
            for name in NUMBERS:
                values = [saved.get(layer, {}).get(name, 0.0) for layer in event.names]
                setattr(self, name, torch.tensor(values, dtype=torch.float32, device=device))
            self._saved = None
        missing = count - len(self.level)
        if missing > 0:
            for name in NUMBERS:
                old = getattr(self, name)
                setattr(self, name, torch.cat([old, old.new_zeros(missing)]))
            if self._pending is not None:
                step, level, counts = self._pending
                pad = level.new_zeros(missing)
                self._pending = (step, torch.cat([level, pad]), torch.cat([counts, pad]))

    def _layout(self, chosen: tuple[int, ...], lengths: tuple[int, ...]) -> tuple[Any, Any, Any]:
        if self._segments is None or self._segments[0] != (chosen, lengths):
            import torch

            device = self.level.device
            segments = torch.repeat_interleave(torch.arange(len(chosen)), torch.tensor(lengths))
            row = torch.tensor(chosen), segments, torch.tensor(lengths, dtype=torch.float32)
            self._segments = ((chosen, lengths), *(t.to(device) for t in row))
        return self._segments[1], self._segments[2], self._segments[3]

    def state_dict(self) -> dict[str, dict[str, float]]:
        """The numbers of each layer by its name; reads the device."""
        if self.level is None:
            return dict(self._saved or {})
        numbers = [getattr(self, name).tolist() for name in NUMBERS]
        rows = [dict(zip(NUMBERS, values, strict=True)) for values in zip(*numbers, strict=True)]
        return dict(zip(self._names, rows, strict=True))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up ``state_dict()``."""
        self._saved, self.level, self._pending, self._base = dict(state), None, None, None
        self._upper, self._lower = {}, {}
