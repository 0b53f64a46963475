"""How large the updates to come are, from norms that are known anyway and the optimizer's second moments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dynguard.arrays import local
from dynguard_plugins.stability.baseline import namespace

if TYPE_CHECKING:
    from dynguard.events import GradientEvent

AHEAD = (1, 2, 4, 8, 16)  # steps at which a gradient that stays is followed
RESYNC = 50  # steps after which the second moments are read from the optimizer again
TINY = 1e-38


class Updates:
    """Mean second moments by layer, followed from the norms alone.

    Adam's v is linear in g^2, so the mean over a layer's n entries follows |g|^2 / n exactly: no tensor is read but
    every 50 steps, when clipped or dropped gradients may have led it astray. If the present gradient stays, the update
    k steps on has the size (in units of lr, per entry)

        (1 - b1^k) |g| / (sqrt(b2^k v + (1 - b2^k) g^2) / sqrt(1 - b2^(t + k)) + eps),

    which for an up-to-date v is at most 1 and after a quiet stretch up to 3.8 (b1 .9, b2 .999): the instability of
    Adam that Molybog et al. 2023 (arXiv 2304.09871) and OLMo#245 describe.
    """

    def __init__(self) -> None:
        self.mean: Any = None  # (n,) of v as it is stored
        self.steps: Any = None  # (n,) updates that it has had
        self.sizes: Any = None
        self.beta1: Any = None
        self.beta2: Any = None
        self.eps: Any = None
        self.corrected: Any = None
        self.level: Any = None  # log of the usual global norm
        self._since = 0
        self._pending: tuple[Any, Any] | None = None

    def ready(self, event: GradientEvent, norms: Any) -> bool:
        """Whether there are second moments to follow; reads them from the optimizer when due."""
        self._since += 1
        stale = (
            self.mean is None
            or len(self.mean) != len(norms)
            or isinstance(self.mean, np.ndarray) != isinstance(norms, np.ndarray)
        )
        if stale or self._since >= RESYNC:
            self._read(event, norms)
        return self.mean is not None

    def _read(self, event: GradientEvent, norms: Any) -> None:
        import torch

        from dynguard.torch.distributed import is_sharded
        from dynguard.torch.moments import moments

        self._since, self._pending = 0, None
        training = event.training
        assert training is not None
        groups, optimizer = training.optimizer.param_groups, training.optimizer
        sizes, beta1, beta2, eps, corrected = ([0.0] * len(norms) for _ in range(5))
        means: list[Any] = [0.0] * len(norms)
        steps: list[Any] = [0.0] * len(norms)
        known = False
        for i, (p, g) in enumerate(zip(event.parameters, training.groups, strict=True)):
            sizes[i] = float(max(p.numel(), 1))
            kept = moments(optimizer, p, groups[g])
            if (
                kept is None
                or kept.second is None
                or kept.beta2 == 0.0
                or kept.name == "exp_inf"
                or is_sharded(kept.second)
            ):
                continue
            known = True
            means[i] = torch.linalg.vector_norm(kept.second, 1, dtype=torch.float32) / sizes[i]
            steps[i], beta2[i], eps[i] = kept.step, kept.beta2, kept.eps
            corrected[i] = 1.0 if kept.corrected else 0.0
            # without bias correction there is RMSprop's momentum, which is no average
            beta1[i] = kept.beta1 if kept.corrected else 0.0
        if not known:
            self.mean = None
            return
        self.mean, self.steps = _as(means, norms), _as(steps, norms)
        self.sizes, self.beta1, self.beta2 = _as(sizes, norms), _as(beta1, norms), _as(beta2, norms)
        self.eps, self.corrected = _as(eps, norms), _as(corrected, norms)

    def settle(self, event: GradientEvent) -> None:
        """Take in the gradients of the last step, unless that was kept from the optimizer."""
        pending, self._pending = self._pending, None
        if pending is None or event.rejected is True or self.mean is None or len(pending[0]) != len(self.mean):
            return
        square, present = pending
        if event.rejected is not False:
            present = present * (1.0 - local(event.rejected) * 1.0)
        keep = 1.0 - present * (1.0 - self.beta2)
        self.mean = keep * self.mean + present * (1.0 - self.beta2) * square
        self.steps = self.steps + present

    def look(self, event: GradientEvent, norms: Any, total: Any) -> tuple[Any, Any, Any, Any]:
        """(n,) peak of the update if the gradient stays, |g| over sqrt(v), remembered norm over the usual global one;
        0-d rise of the global norm."""
        xp = namespace(norms)
        square = (norms * norms) / self.sizes
        fine = xp.isfinite(square)
        square = xp.where(fine, square, square * 0.0 if xp is not np else np.zeros_like(square))
        present = _as([0.0 if g is None else 1.0 for g in event.gradients], norms)
        self._pending = (square, present * fine)
        correction = self._correction(self.steps)
        ratio = xp.sqrt(square / (self.mean / correction + TINY))
        sizes = [self._size(square, k) for k in AHEAD]
        peak = sizes[0]
        for size in sizes[1:]:
            peak = xp.maximum(peak, size)
        known = (self.beta2 > 0) & (self.steps > 0) & fine & (present > 0)
        zero = ratio * 0.0
        rise = self._rise(xp, total)
        remembered = xp.sqrt(self.mean / correction * self.sizes) / xp.exp(self.level)
        return xp.where(known, peak, zero), xp.where(known, ratio, zero), remembered, rise

    def _size(self, square: Any, k: int) -> Any:
        xp = namespace(square)
        decay = self.beta2**k
        after = decay * self.mean + (1.0 - decay) * square
        share = 1.0 - self.beta1**k
        return share * xp.sqrt(square) / (xp.sqrt(after / self._correction(self.steps + k)) + self.eps + TINY)

    def _correction(self, steps: Any) -> Any:
        xp = namespace(self.beta2)
        raw = 1.0 - self.beta2 ** xp.maximum(steps, steps * 0.0 + 1.0)
        return xp.where(self.corrected > 0, raw, raw * 0.0 + 1.0)

    def _rise(self, xp: Any, total: Any) -> Any:
        """By how much the global norm lies above its usual level (log units); the level is an average over 50 steps."""
        now = xp.log(total + TINY) if xp is not np else np.log(np.float64(total) + TINY)
        if self.level is None:
            self.level = now
        rise = now - self.level
        usable = xp.isfinite(now) & (abs(rise) < 20.0)
        clipped = xp.where(usable, rise, rise * 0.0)
        clipped = xp.clip(clipped, -1.0, 1.0) if xp is np else clipped.clamp(-1.0, 1.0)
        self.level = self.level + clipped / 50.0
        return rise

    def restart(self, indices: Sequence[int]) -> None:
        """The moments of these layers have been reset: so are the numbers here."""
        for i in indices:
            self.mean[i] = 0.0
            self.steps[i] = 0.0
        if self._pending is not None:
            self._pending[1][list(indices)] = 1.0

    def state_dict(self) -> dict[str, Any]:
        """The usual global norm; second moments are read from the optimizer again."""
        return {"level": None if self.level is None or not math.isfinite(float(self.level)) else float(self.level)}

    def load_state_dict(self, state: Any) -> None:
        """Take up ``state_dict()``."""
        self.level = state["level"]


def _as(values: Sequence[Any], like: Any) -> Any:
    """Numbers and 0-d tensors as one array of the kind of ``like``; on a device without a host read."""
    if isinstance(like, np.ndarray):
        return np.array([float(v) for v in values], np.float64)
    import torch

    base = torch.tensor([0.0 if isinstance(v, torch.Tensor) else float(v) for v in values], dtype=torch.float32)
    base = base.to(like.device, non_blocking=True)
    for i, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            base[i] = value.to(base)
    return base


def exact(event: GradientEvent, index: int, ahead: int) -> tuple[float, float, float]:
    """(RMS of the update now, RMS if the gradient stays for ``ahead`` steps, share of entries above 1.5 then).

    Entry by entry, from the optimizer's own state; in units of the learning rate. Reads the device.
    """
    from dynguard.torch.moments import moments

    training = event.training
    gradient = event.gradients[index] if index < len(event.gradients) else None
    if gradient is None or training is None or index >= len(event.parameters):
        return math.nan, math.nan, math.nan
    kept = moments(training.optimizer, event.parameters[index], training.optimizer.param_groups[training.groups[index]])
    if kept is None or kept.second is None or gradient.is_sparse:
        return math.nan, math.nan, math.nan
    g = gradient.detach().double()
    if event.scale is not None:
        g = g / event.scale.to(g.device)
    first = kept.first.double() if kept.first is not None and kept.corrected else g * 0.0
    second = kept.second.double()
    beta1, steps = (kept.beta1 if kept.corrected else 0.0), float(kept.step)

    def update(k: int) -> Any:
        m = beta1**k * first + (1 - beta1**k) * g
        v = kept.beta2**k * second + (1 - kept.beta2**k) * g.square()
        c1, c2 = (1 - beta1 ** (steps + k), 1 - kept.beta2 ** (steps + k)) if kept.corrected else (1.0, 1.0)
        return (m / c1) / ((v / c2).sqrt() + kept.eps + TINY)

    now, then = update(1), update(ahead)
    return (
        float(now.square().mean().sqrt()),
        float(then.square().mean().sqrt()),
        float((then.abs() > 1.5).double().mean()),
    )
