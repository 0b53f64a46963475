"""The running estimate of curvature that ``helene`` clips by."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynguard.events import GradientEvent, Training

log = logging.getLogger("dynguard")

GROWTH = 10.0  # a single estimate counts for at most this many times the layer's mean so far
TRIES = 3  # failures in a row after which the loss is not evaluated again


class Curvature:
    """Mean over time of the diagonal of the Gauss-Newton matrix, by parameter, in float32 or wider.

    A running mean of all estimates first, an exponential one with ``decay`` once there are ``1 / (1 - decay)`` of them.
    An estimate that is not finite in a layer is left out there. One that is more than 10 times as large as the
    layer's mean so far is scaled down to that, so that no batch moves the mean of n estimates beyond
    ``1 + 9 / (n + 1)`` times what it was, nor an old one beyond ``1 + 9 (1 - decay)`` times.

    Args:
        decay: per estimate.
        share: of the batch that is evaluated.
    """

    def __init__(self, decay: float, share: float) -> None:
        self.decay, self.share = decay, share
        self.values: dict[int, Any] = {}  # h by parameter
        self.means: dict[int, float] = {}  # over the entries of each
        self.counts: dict[int, int] = {}
        self.sampled = 0  # estimates by sampled labels
        self.fallbacks = 0  # by the step's own gradients
        self.why = ""  # the last reason for that
        self._failures = 0

    def estimate(self, event: GradientEvent, chosen: Sequence[int]) -> None:
        """Take in one more estimate at the present weights; reads the device."""
        assert event.training is not None
        found, scale = self._sampled(event, event.training, chosen), 1.0
        if found is None:
            self.fallbacks += 1
            scale = 1.0 if event.scale is None else float(event.scale)
            found = [_widened(event.gradients[i]) for i in chosen]
        else:
            self.sampled += 1
        for i, root, mean in zip(chosen, found, _mean_squares(found), strict=True):
            if math.isfinite(mean):
                self._take(i, root, mean / scale**2, 1.0 / scale**2)

    def _take(self, index: int, root: Any, mean: float, factor: float = 1.0) -> None:
        """``factor * root^2``, whose mean is ``mean``."""
        import torch

        count, before = self.counts.get(index, 0), self.means.get(index, 0.0)
        value = self.values.get(index)
        if value is None or value.shape != root.shape:
            value = self.values[index] = torch.zeros_like(root)
            count, before = 0, 0.0
        most = GROWTH * before if before > 0 else math.inf
        weight = max(1.0 - self.decay, 1.0 / (count + 1))
        if mean > most:
            factor *= most / mean
        value.mul_(1.0 - weight).addcmul_(root, root, value=weight * factor)
        self.means[index] = before + weight * (min(mean, most) - before)
        self.counts[index] = count + 1

    def _sampled(self, event: GradientEvent, training: Training, chosen: Sequence[int]) -> list[Any] | None:
        from dynguard.torch.probe import ProbeError

        found: list[Any] | None = None
        together = _together(training.model)
        if together is None:
            self._say("ranks run without DistributedDataParallel, and copies of a model must clip alike")
            return None
        try:
            found = self._evaluated(event, training, chosen)
            self._failures = 0
        except ProbeError as error:
            self._failures += 1
            self._say(str(error))
        if not together:
            return found
        import torch

        from dynguard.torch.gauss_newton import mean_over_ranks

        rows = [r.square() for r in found or [torch.zeros_like(_widened(event.gradients[i])) for i in chosen]]
        return [r.sqrt_() for r in rows] if mean_over_ranks(rows, known=found is not None) else None

    def _evaluated(self, event: GradientEvent, training: Training, chosen: Sequence[int]) -> list[Any]:
        from dynguard.torch.gauss_newton import part, roots, widened
        from dynguard.torch.probe import Probe, ProbeError

        if training.loss_fn is None:
            raise ProbeError("FlowManager was given no loss_fn")
        if not event.batches or event.batches[-1] is None:
            raise ProbeError("no batch was observed")
        if self._failures >= TRIES:
            raise ProbeError(self.why)
        weights = [event.parameters[i] for i in chosen]
        seed = self.sampled + self.fallbacks
        rows = part(event.batches[-1], self.share)
        try:
            return [widened(r) for r in roots(Probe(training.model, training.loss_fn, rows, weights), seed)]
        except ProbeError:
            if rows is event.batches[-1]:
                raise
        found = roots(Probe(training.model, training.loss_fn, event.batches[-1], weights), seed)
        self.share = 1.0  # the loss takes whole batches only
        return [widened(r) for r in found]

    def _say(self, why: str) -> None:
        if why != self.why:
            log.warning("helene: curvature by sampled labels is not to be had (%s); squared gradients stand in", why)
        self.why = why


def _widened(gradient: Any) -> Any:
    from dynguard.torch.gauss_newton import widened

    return widened(local(gradient).detach())


def _mean_squares(tensors: Sequence[Any]) -> list[float]:
    """Of the entries of each, on the host: one wait for each device."""
    import torch

    at: dict[Any, list[int]] = {}
    for i, tensor in enumerate(tensors):
        at.setdefault(tensor.device, []).append(i)
    means = [0.0] * len(tensors)
    for members in at.values():
        flat = [tensors[i].reshape(-1) for i in members]  # no squares are made: new memory costs more than they do
        read = torch.stack([torch.dot(f, f).double() / max(len(f), 1) for f in flat]).tolist()
        for i, mean in zip(members, read, strict=True):
            means[i] = mean
    return means


def _together(model: Any) -> bool | None:
    """Whether ranks hold copies of the model, which must clip alike; None where that can't be known."""
    import torch

    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    if torch.distributed.get_world_size() == 1:
        return False
    models = list(model.values()) if isinstance(model, dict) else model if isinstance(model, (list, tuple)) else [model]
    return any(isinstance(m, torch.nn.parallel.DistributedDataParallel) for m in models) or None


def local(tensor: Any) -> Any:
    """The shard of a distributed tensor, any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
