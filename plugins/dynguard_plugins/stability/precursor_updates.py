"""How large the updates to come are, from norms that are known anyway and the optimizer's second moments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dynguard.arrays import local
from dynguard_plugins.stability.baseline import namespace

if TYPE_CHECKING:
    from dynguard.events import GradientEvent

AHEAD = (1, 8, 16)  # steps at which a gradient that stays is followed
UNCORRECTED_AGE = 100  # updates that a layer must have had under an optimizer without bias correction
RESYNC = 50  # steps after which the second moments are read from the optimizer again
TINY = 1e-38
RAISED = ("exp_avg_sq", "max_exp_avg_sq", "square_avg")
FOLLOWED = RAISED  # running means of squares; Adamax keeps a largest magnitude, Adadelta's steps have their own scale


@dataclass(slots=True)
class Screen:
    """What the norms of one step say: (n,) arrays where the gradients are, and the rise as 0-d.

    Attributes:
        peak: largest size of the updates to come if the gradient stays, in learning rates per entry.
        ratio: |g| over the root of the second moment: StableAdamW's quantity by layer.
        remembered: what the second moment remembers of an entry's gradient, over what is usual for an entry of the
            model.
        present: the same of the present gradient.
        rise: log of the global norm over its usual level.
    """

    peak: Any
    ratio: Any
    remembered: Any
    present: Any
    rise: Any


class Updates:
    """Mean second moments by layer, followed from the norms alone.

    Adam's v is linear in g^2, so the mean over a layer's n entries follows |g|^2 / n exactly: no tensor is read but
    every 50 steps, when clipped or dropped gradients may have led it astray. If the present gradient stays, the update
    k steps on has the size (in units of lr, per entry)

        (1 - b1^k) |g| / (sqrt(b2^k v + (1 - b2^k) g^2) / sqrt(1 - b2^(t + k)) + eps),

    which for an up-to-date v is at most 1 and after a quiet stretch up to 6.4 (b1 .9, b2 .999, t large): the
    instability of Adam that Molybog et al. 2023 (arXiv 2304.09871) and OLMo#245 describe.
    """

    def __init__(self) -> None:
        self.mean: Any = None  # (n,) of v as it is stored
        self.steps: Any = None  # (n,) updates that it has had
        self.sizes: Any = None
        self.entries = 1.0  # of all layers together
        self.beta1: Any = None
        self.beta2: Any = None
        self.eps: Any = None
        self.corrected: Any = None
        self.level: Any = None  # log of the usual global norm
        self._since = 0
        self._ahead: list[tuple[Any, Any]] = []  # by k in AHEAD: beta2 ** k, 1 - beta1 ** k
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
        from dynguard.torch.statistics import wide

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
                or kept.name not in FOLLOWED
                or "acc_delta" in optimizer.state[p]
                or kept.second.is_complex()
                or is_sharded(kept.second)
            ):
                continue
            known = True
            means[i] = torch.linalg.vector_norm(kept.second, 1, dtype=wide(kept.second.dtype)) / sizes[i]
            steps[i], beta2[i], eps[i] = kept.step, kept.beta2, kept.eps
            corrected[i] = 1.0 if kept.corrected else 0.0
            # without bias correction there is RMSprop's momentum, which is no average
            beta1[i] = kept.beta1 if kept.corrected else 0.0
        if not known:
            self.mean = None
            return
        self.entries = max(sum(sizes), 1.0)
        self.mean, self.steps = _as(means, norms), _as(steps, norms)
        self.sizes, self.beta1, self.beta2 = _as(sizes, norms), _as(beta1, norms), _as(beta2, norms)
        self.eps, self.corrected = _as(eps, norms), _as(corrected, norms)
        self._ahead = [(self.beta2**k, 1.0 - self.beta1**k) for k in AHEAD]

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

    def look(self, event: GradientEvent, norms: Any, total: Any) -> Screen:
        """What the norms say about the updates to come; 0 where there is nothing to say."""
        xp = namespace(norms)
        square = (norms * norms) / self.sizes
        fine = xp.isfinite(square)
        square = xp.where(fine, square, xp.zeros_like(square))
        present = _present(event.gradients, norms)
        self._pending = (square, present * fine)
        past = self.beta2 ** xp.maximum(self.steps, self.steps * 0.0 + 1.0)
        usual = self.mean / self._correction(past)
        ratio = xp.sqrt(square / (usual + TINY))
        root = xp.sqrt(square)
        peak = root * 0.0
        for decay, share in self._ahead:
            peak = xp.maximum(peak, self._size(square, root, past, decay, share))
        # without a bias correction the first updates are as large as this by design
        young = (self.corrected == 0) & (self.steps < UNCORRECTED_AGE)
        known = (self.beta2 > 0) & (self.steps > 0) & fine & (present > 0) & ~young
        zero = ratio * 0.0
        rise = self._rise(xp, total)
        entry = xp.exp(self.level) / math.sqrt(self.entries)
        return Screen(
            peak=xp.where(known, peak, zero),
            ratio=xp.where(known, ratio, zero),
            remembered=xp.sqrt(usual) / entry,
            present=root / entry,
            rise=rise,
        )

    def _size(self, square: Any, root: Any, past: Any, decay: Any, share: Any) -> Any:
        xp = namespace(square)
        after = decay * self.mean + (1.0 - decay) * square
        return share * root / (xp.sqrt(after / self._correction(past * decay)) + self.eps + TINY)

    def _correction(self, past: Any) -> Any:
        """1 - beta2 ** t, given the power; 1 where the optimizer corrects nothing."""
        return 1.0 - past * self.corrected

    def _rise(self, xp: Any, total: Any) -> Any:
        """By how much the global norm lies above its usual level (log units); the level is an average over 50 steps."""
        now = xp.log(total + TINY) if xp is not np else np.log(np.float64(total) + TINY)
        if self.level is None:
            self.level = now
        rise = now - self.level
        usable = xp.isfinite(now) & (abs(rise) < 20.0)
        bounded = xp.clip(xp.where(usable, rise, xp.zeros_like(rise)), -1.0, 1.0)
        # a first norm that is NaN is no level yet
        self.level = xp.where(xp.isfinite(self.level), self.level + bounded / 50.0, now)
        return rise

    def forget(self) -> None:
        """A repair has changed the optimizer's moments: read them anew at the next step."""
        self._since = RESYNC

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


def _present(gradients: Sequence[Any], like: Any) -> Any:
    """(n,) 1 where there is a gradient to follow, 0 elsewhere."""
    if all(_followed(g) for g in gradients):
        return np.ones(len(gradients)) if isinstance(like, np.ndarray) else like.new_ones(len(gradients))
    return _as([1.0 if _followed(g) else 0.0 for g in gradients], like)


def _followed(gradient: Any) -> bool:
    """Whether a gradient enters all entries of the second moment: SparseAdam's touch their rows alone."""
    return gradient is not None and not getattr(gradient, "is_sparse", False)


def raise_second(optimizer: Any, parameter: Any, group: Any, square: float) -> None:
    """Lift a second moment to ``square``, the mean square of the present gradient, wherever it lies below.

    It is then as if the layer had had such gradients all along: this update and those to come are of the learning
    rate's size. Momentum and step counter stay.
    """
    import torch

    from dynguard.torch.moments import moments

    kept = moments(optimizer, parameter, group)
    if kept is None or not math.isfinite(square):
        return
    with torch.no_grad():
        for name, value in optimizer.state[parameter].items():
            if name in RAISED and isinstance(value, torch.Tensor):
                least = torch.as_tensor(square * kept.correction2, dtype=value.dtype, device=value.device)
                torch.maximum(value, least, out=value)


def exact(event: GradientEvent, index: int, ahead: int) -> tuple[float, float, float]:
    """(RMS of the update now, RMS if the gradient stays for ``ahead`` steps, share of entries above 1.2 then).

    Entry by entry, from the optimizer's own state, over the entries that have a gradient (the rows of a table that
    were looked up); in units of the learning rate. NaN where the gradient is gone. Reads the device.
    """
    from dynguard.torch.moments import moments

    training = event.training
    gradient = event.gradients[index] if index < len(event.gradients) else None
    if gradient is None or training is None or index >= len(event.parameters):
        return math.nan, math.nan, math.nan
    kept = moments(training.optimizer, event.parameters[index], training.optimizer.param_groups[training.groups[index]])
    if kept is None or kept.second is None or gradient.is_sparse:
        return math.nan, math.nan, math.nan
    where = gradient.detach() != 0
    g = gradient.detach()[where].double()
    if not g.numel():
        return 0.0, 0.0, 0.0
    if event.scale is not None:
        g = g / event.scale.to(g.device)
    first = kept.first[where].double() if kept.first is not None and kept.corrected else g * 0.0
    second = kept.second[where].double()
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
        float((then.abs() > 1.2).double().mean()),
    )
