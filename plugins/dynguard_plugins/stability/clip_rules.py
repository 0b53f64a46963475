"""The rules of ``clip``: from a step's norms, and what was learned from those before, to the factor of its gradients.

Where the norms lie in host memory the numbers are numpy's, on a device they are tensors; nothing here reads a device.
A rule looks at a step in ``factor()`` and takes it into its baseline only when ``accept()`` says that it was kept.
Norms that are zero or non-finite enter no baseline, and never give a factor other than 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from dynguard_plugins.stability.clip_history import DeviceHistory, HostHistory, Saved
from dynguard_plugins.stability.clip_numbers import choose, is_tensor, number, placed, shrinking, usable

TORCH_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_, with which ``norm`` agrees


@dataclass(slots=True)
class Measured:
    """The norms of one step: of n gradients, and of all together, either numpy's or tensors on one device."""

    names: tuple[str, ...]
    norms: Any
    total: Any

    @property
    def device(self) -> Any:
        """The device, or None for host memory."""
        return getattr(self.total, "device", None) if is_tensor(self.total) else None


class Rule(Protocol):
    """What a rule knows of one source."""

    def factor(self, measured: Measured) -> Any:
        """0-d or (n,): what to multiply the gradients by, at most 1."""

    def accept(self, good: Any) -> None:
        """Take in the step last looked at where ``good`` (a bool, on the host or the device)."""

    def restart(self) -> None:
        """Forget everything learned."""

    def place(self, measured: Measured) -> None:
        """Bring what is known to where the norms are."""

    def state_dict(self) -> dict[str, Any]:
        """All that is known, as plain numbers."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up ``state_dict()``."""


class Norm:
    """A fixed limit of the global norm.

    Pascanu, Mikolov and Bengio 2013, "On the difficulty of training recurrent neural networks", algorithm 1; the factor
    is that of ``torch.nn.utils.clip_grad_norm_``.
    """

    def __init__(self, *, max_norm: float) -> None:
        self.max_norm = max_norm

    def factor(self, measured: Measured) -> Any:
        """0-d factor."""
        return shrinking(self.max_norm / (measured.total + TORCH_EPS), measured.total)

    def accept(self, good: Any) -> None:
        """Nothing is learned."""

    def restart(self) -> None:
        """Nothing is known."""

    def place(self, measured: Measured) -> None:
        """Nothing to bring."""

    def state_dict(self) -> dict[str, Any]:
        """Empty."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to take up."""


class _Learned:
    """A rule that keeps numbers, named in ``KEPT``, which move to the device of the norms when that changes."""

    KEPT: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget everything learned."""
        self._device: Any = self  # none yet
        for name in self.KEPT:
            setattr(self, name, 0.0)

    def place(self, measured: Measured) -> None:
        """Bring what is known to where the norms are."""
        if measured.device != self._device:
            self._device = measured.device
            for name in self.KEPT:
                setattr(self, name, placed(getattr(self, name), measured.total))

    def state_dict(self) -> dict[str, Any]:
        """All that is known, as plain numbers."""
        return {name: number(getattr(self, name)) for name in self.KEPT}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up ``state_dict()``."""
        self._device = self
        for name in self.KEPT:
            setattr(self, name, state[name])


class ZClip(_Learned):
    """Global norms more than ``z_threshold`` standard deviations above their running mean are pulled towards it.

    Kumar et al. 2025, "ZClip: Adaptive spike mitigation for LLM pre-training" (arXiv 2504.02507). With running mean m
    and variance v, a norm g of z = (g - m) / sqrt(v) > z_threshold is clipped to m + z_threshold^2 / z * sqrt(v)
    (reciprocal clipping), and that clipped value g* updates m <- a m + (1 - a) g*, v <- a v + (1 - a) (g* - m)^2. The
    first ``warmup`` norms are not clipped and give the first m and v.
    """

    KEPT = ("mean", "variance", "count", "pending")
    mean: Any
    variance: Any
    count: Any
    pending: Any

    def __init__(self, *, decay: float, z_threshold: float, warmup: int, max_norm: float | None) -> None:
        self.decay, self.z_threshold, self.warmup, self.max_norm = decay, z_threshold, warmup, max_norm
        super().__init__()

    def factor(self, measured: Measured) -> Any:
        """0-d factor."""
        total = measured.total
        excess = total - self.mean
        far = (self.count >= self.warmup) & (excess > self.z_threshold * self.variance**0.5)
        # z_threshold^2 / z * sqrt(v) without a division by sqrt(v), which may be 0
        self.pending = choose(far, self.mean + self.z_threshold**2 * self.variance / excess, total)
        return shrinking(_capped(self.pending, self.max_norm) / total, total)

    def accept(self, good: Any) -> None:
        """Update mean and variance with the clipped value."""
        value = self.pending
        count = self.count + 1
        warm = count <= self.warmup
        weight = choose(warm, 1 / count, 1 - self.decay)  # 1/k makes the plain mean and variance of the warm-up
        step = value - self.mean
        rest = (1 - weight) * step  # distance from the new mean
        variance = (1 - weight) * self.variance + weight * rest * choose(warm, step, rest)
        good = usable(value) & (variance < math.inf) & good
        self.mean = choose(good, self.mean + weight * step, self.mean)
        self.variance = choose(good, variance, self.variance)
        self.count = choose(good, count, self.count)


class AdaGC(_Learned):
    """Each gradient is held below ``ratio`` times the running mean of its own clipped norms.

    Wang et al. 2025, "AdaGC: Enhancing LLM pretraining stability via adaptive gradient clipping" (arXiv 2502.11034),
    algorithm 1. In the first ``warmup`` steps all gradients together are clipped to ``max_norm`` and gamma_i is the
    smallest clipped norm of layer i; then h_i = min(ratio gamma_i / |g_i|, 1) and
    gamma_i <- decay gamma_i + (1 - decay) |h_i g_i|. Steps are counted per layer, so that a layer without a gradient at
    a step (an expert, a frozen one) neither gets a gamma of 0 nor leaves its warm-up untrained.
    """

    KEPT = ("gamma", "seen", "pending")
    gamma: Any
    seen: Any
    pending: Any

    def __init__(self, *, ratio: float, decay: float, warmup: int, max_norm: float) -> None:
        self.ratio, self.decay, self.warmup, self.max_norm = ratio, decay, warmup, max_norm
        super().__init__()

    def restart(self) -> None:
        """Forget everything learned."""
        self._device = self
        self._names: tuple[str, ...] = ()
        self.gamma, self.seen, self.pending = [], [], []

    def place(self, measured: Measured) -> None:
        """Bring what is known to where the norms are, and make room for layers that joined."""
        if isinstance(self.gamma, list) and self._names != measured.names:  # of a state: the names say which is which
            for kept, unknown in zip(self.KEPT, (math.inf, 0.0, 0.0), strict=True):
                have = dict(zip(self._names, getattr(self, kept), strict=True))
                setattr(self, kept, [have.get(name, unknown) for name in measured.names])
        super().place(measured)
        if self._names is not measured.names:
            self._names = measured.names
            self._grow(measured)

    def _grow(self, measured: Measured) -> None:
        missing = len(measured.names) - len(self.gamma)
        if missing > 0:
            self.gamma = _extended(self.gamma, missing, math.inf)
            self.seen, self.pending = _extended(self.seen, missing, 0.0), _extended(self.pending, missing, 0.0)

    def factor(self, measured: Measured) -> Any:
        """(n,) factors."""
        norms, total = measured.norms, measured.total
        everywhere = shrinking(self.max_norm / total, total)
        own = self.ratio * self.gamma / norms
        factors = shrinking(choose(self.seen < self.warmup, everywhere, own), norms)
        self.pending = choose(usable(norms) & usable(total), norms * factors, 0.0)
        return factors

    def accept(self, good: Any) -> None:
        """Update each layer's gamma with its clipped norm."""
        value = self.pending
        good = usable(value) & good
        lowest = choose(self.gamma < value, self.gamma, value)
        smooth = self.decay * self.gamma + (1 - self.decay) * value
        self.gamma = choose(good, choose(self.seen < self.warmup, lowest, smooth), self.gamma)
        self.seen = choose(good, self.seen + 1, self.seen)

    def state_dict(self) -> dict[str, Any]:
        """All that is known, as plain numbers, with the names of the layers."""
        return {"names": list(self._names), **super().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up ``state_dict()``; layers are found by name."""
        super().load_state_dict(state)
        self._names = tuple(state["names"])


class AutoClip(_Learned):
    """The limit is a percentile of the global norms so far, this step's included.

    Seetharaman et al. 2020, "AutoClip: Adaptive gradient clipping for source separation networks" (arXiv 2007.14469).
    The paper keeps all norms; here the newest ``history`` are kept.
    """

    KEPT = ("pending",)
    pending: Any

    def __init__(self, *, percentile: float, history: int, max_norm: float | None) -> None:
        self.share, self.length, self.max_norm = percentile / 100.0, history, max_norm
        super().__init__()

    def restart(self) -> None:
        """Forget everything learned."""
        super().restart()
        self._norms: HostHistory | DeviceHistory | Saved = Saved([])

    def place(self, measured: Measured) -> None:
        """Bring the history to where the norms are."""
        if measured.device != self._device:
            kept = self._norms.values()
            host = measured.device is None
            self._norms = HostHistory(self.length, kept) if host else DeviceHistory(self.length, kept, measured.total)
        super().place(measured)

    def factor(self, measured: Measured) -> Any:
        """0-d factor."""
        self.pending = total = measured.total
        assert not isinstance(self._norms, Saved)
        limit = self._norms.quantile(total, self.share)
        return shrinking(_capped(limit, self.max_norm) / total, total)

    def accept(self, good: Any) -> None:
        """Put the norm into the history."""
        assert not isinstance(self._norms, Saved)
        self._norms.add(self.pending, usable(self.pending) & good)

    def state_dict(self) -> dict[str, Any]:
        """The norms that are kept, oldest first."""
        return {**super().state_dict(), "history": self._norms.values()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up ``state_dict()``."""
        super().load_state_dict(state)
        self._norms = Saved(state["history"])


def _capped(limit: Any, cap: float | None) -> Any:
    return limit if cap is None else choose(limit > cap, cap, limit)


def _extended(values: Any, count: int, fill: float) -> Any:
    if not is_tensor(values):
        return np.concatenate((np.atleast_1d(values), np.full(count, fill)))
    import torch

    return torch.cat((values, values.new_full((count,), fill)))
