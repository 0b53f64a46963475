"""Evaluating the loss and its gradient again in the middle of training, so that nothing of it stays."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from dynguard.torch import names as naming
from dynguard.torch.distributed import is_sharded
from dynguard.torch.nonfinite import holds_iterator
from dynguard.torch.unchanged import unchanged

_local = threading.local()


def probing() -> bool:
    """Whether this thread is evaluating the loss for a probe: forward hooks of plugins then look away."""
    return bool(getattr(_local, "depth", 0))


@contextmanager
def as_probe() -> Iterator[None]:
    """Mark what runs in this block as a probe."""
    _local.depth = getattr(_local, "depth", 0) + 1
    try:
        yield
    finally:
        _local.depth -= 1


class ProbeError(Exception):
    """The loss can't be evaluated again here; the message says why, for a finding."""


class Probe:
    """The loss on one batch, and its gradient at the present values of some parameters.

    Every evaluation starts from the same random state, so that dropout masks are the same, and leaves random states,
    gradients, buffers (BatchNorm), attributes and modes as they were. Wrappers that would wait for other ranks (DDP)
    are taken off; compiled modules run uncompiled.

    Args:
        model: as the user gave it: one module, or a list or dict of them.
        loss_fn: ``(model, batch) -> loss``; a loss of several entries is averaged.
        batch: what to evaluate it on.
        parameters: with respect to which gradients are taken; those without ``requires_grad`` are left out.

    Raises:
        ProbeError: the batch is an iterator, or the model is in shards (FSDP), which one rank can't evaluate.
    """

    def __init__(
        self, model: Any, loss_fn: Callable[[Any, Any], Any], batch: Any, parameters: Sequence[Tensor]
    ) -> None:
        if holds_iterator(batch):
            raise ProbeError("the batch is an iterator, which can be read only once")
        if any(is_sharded(p) or hasattr(p, "ds_id") for p in parameters):
            raise ProbeError("the parameters live in shards on several ranks (FSDP, DTensor)")
        self.model = alone(model)
        self.loss_fn = loss_fn
        self.batch = batch
        self.parameters = [p for p in parameters if p.requires_grad]
        self._modules = all_modules(self.model)
        self.evaluations = 0

    def loss(self) -> Tensor:
        """The loss at the present parameters, 0-d, detached."""
        with self._evaluating(gradients=False):
            return self._loss().detach()

    def gradients(self, *, within: AbstractContextManager[Any] | None = None) -> list[Tensor]:
        """The gradient at the present parameters: one tensor each, zeros where the loss does not depend on it.

        Args:
            within: a context in which the forward runs, e.g. one that samples the labels.

        Raises:
            ProbeError: the loss function fails, or its loss has no gradient.
        """
        self.evaluations += 1
        with self._evaluating(gradients=True), within or nullcontext():
            try:
                loss = self._loss()
                found = torch.autograd.grad(loss, self.parameters, allow_unused=True)
            except Exception as error:
                raise ProbeError(f"{type(error).__name__}: {str(error)[:300]}") from error
        return [torch.zeros_like(p) if g is None else _dense(g) for p, g in zip(self.parameters, found, strict=True)]

    def products(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """The Hessian times a vector in the shapes of the parameters, by differentiating the gradient once more.

        Raises:
            ProbeError: also where an operation has no second derivative (fused attention kernels).
        """
        self.evaluations += 2
        with self._evaluating(gradients=True):
            try:
                first = torch.autograd.grad(self._loss(), self.parameters, create_graph=True, allow_unused=True)
                pairs = [(g, v) for g, v in zip(first, vectors, strict=True) if g is not None and g.requires_grad]
                along = [torch.sum(g * v) for g, v in pairs]
                found = torch.autograd.grad(along, self.parameters, allow_unused=True) if along else ()
            except Exception as error:
                raise ProbeError(f"{type(error).__name__}: {str(error)[:300]}") from error
        if not found:
            return [torch.zeros_like(p) for p in self.parameters]
        return [torch.zeros_like(p) if h is None else _dense(h) for p, h in zip(self.parameters, found, strict=True)]

    def _loss(self) -> Tensor:
        loss = self.loss_fn(self.model, self.batch)
        if not isinstance(loss, Tensor):
            raise ProbeError(f"loss_fn returned {type(loss).__name__}, not a tensor")
        return loss.mean() if loss.ndim else loss

    @contextmanager
    def _evaluating(self, *, gradients: bool) -> Iterator[None]:
        with as_probe(), unchanged(self._modules, self.batch, gradients=gradients):
            yield


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.layout is not torch.strided else gradient


def all_modules(model: Any) -> list[nn.Module]:
    """All modules of what the user passed as model: one, or a list or dict of them."""
    if isinstance(model, nn.Module):
        return list(model.modules())
    several = model.values() if isinstance(model, Mapping) else model if isinstance(model, (list, tuple)) else ()
    found = {id(m): m for item in several if isinstance(item, nn.Module) for m in item.modules()}
    return list(found.values())


def alone(model: Any) -> Any:
    """The model without what makes it wait for other ranks or spread over devices."""
    if isinstance(model, nn.Module):
        return naming.unwrap(model)
    if type(model) in (list, tuple):
        return type(model)(alone(item) for item in model)
    return {key: alone(item) for key, item in model.items()} if type(model) is dict else model
