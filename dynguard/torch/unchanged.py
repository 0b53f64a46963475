"""Running a user's forward once more so that nothing of it stays: what it could change is kept and put back."""

from __future__ import annotations

import random
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dynguard.torch.nonfinite import walk

ACCELERATORS = ("cuda", "xpu")


class Written:
    """Copies tensors just before an operation writes to them, so that only those that are written to cost memory."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._live: dict[int, list[Tensor]] = {}
        self._copies: list[tuple[Tensor, Tensor]] = []
        for tensor in {id(t): t for t in tensors}.values():
            self._live.setdefault(_storage(tensor), []).append(tensor)
        self._live.pop(0, None)  # tensors that have no memory

    def before(self, function: Any, args: Any, kwargs: Any) -> None:
        """Copy what ``function`` (of torch.ops) is about to write to."""
        for i, argument in enumerate(function._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for written in tree_leaves(args[i] if i < len(args) else kwargs.get(argument.name)):
                    mine = self._live.pop(_storage(written), [])
                    self._copies += [(tensor, tensor.detach().clone()) for tensor in mine]

    def restore(self) -> None:
        """Put the values back."""
        for tensor, copied in self._copies:
            tensor.data.copy_(copied)


def _storage(tensor: Any) -> int:
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
        return 0
    return tensor.untyped_storage().data_ptr()


@contextmanager
def unchanged(modules: Sequence[nn.Module], batch: Any, *, gradients: bool = False) -> Iterator[Written]:
    """Within this block nothing that runs the modules on the batch leaves a trace.

    Random states, gradients, buffers, parameters, plain attributes and modes of the modules, and the tensors of the
    batch are afterwards what they were. Compiled modules run uncompiled. The operations must be shown to the
    :class:`Written` that is given, for the tensors that it guards. ``gradients``: whether autograd records.
    """
    parameters = list({id(p): p for m in modules for p in m.parameters(recurse=False)}.values())
    attributes = [v for m in modules for v in m.__dict__.values() if isinstance(v, Tensor)]
    tensors = [leaf for _, leaf in walk(batch) if isinstance(leaf, Tensor)]
    written = Written([*parameters, *attributes, *tensors])
    with ExitStack() as stack:
        stack.enter_context(_random_states(modules, [*parameters, *tensors]))
        stack.enter_context(_gradients(parameters))
        stack.enter_context(_buffers(modules))
        stack.enter_context(_attributes([m for m in modules if not isinstance(m, torch.jit.ScriptModule)]))
        stack.enter_context(torch.set_grad_enabled(gradients))
        stack.callback(written.restore)
        stack.enter_context(_modes())
        yield written


@contextmanager
def _random_states(modules: Sequence[nn.Module], tensors: Sequence[Tensor]) -> Iterator[None]:
    own = [v for m in modules for v in m.__dict__.values() if isinstance(v, torch.Generator)]
    kept = [(generator, generator.get_state()) for generator in own]
    python, numpy = random.getstate(), np.random.get_state()
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        for kind in ACCELERATORS:
            devices = {t.device.index for t in tensors if t.device.type == kind}
            if devices:
                current = torch.get_device_module(kind).current_device()
                stack.enter_context(torch.random.fork_rng(sorted(devices | {current}), device_type=kind))
        try:
            yield
        finally:
            for generator, state in kept:
                generator.set_state(state)
            random.setstate(python)
            np.random.set_state(numpy)


@contextmanager
def _gradients(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Out of the way, in case that the loss function calls backward itself."""
    kept = [(p, p.grad) for p in parameters if p.is_leaf]
    try:
        for parameter, _ in kept:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient


@contextmanager
def _buffers(modules: Sequence[nn.Module]) -> Iterator[None]:
    """All are copied, as F.batch_norm writes without saying so."""
    live = {id(b): b for m in modules for b in m.buffers(recurse=False) if _storage(b)}.values()
    kept = [(buffer, buffer.detach().clone()) for buffer in live]
    try:
        yield
    finally:
        for buffer, copied in kept:
            if not torch.equal(_bits(buffer), _bits(copied)):
                buffer.data.copy_(copied)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


@contextmanager
def _attributes(modules: Sequence[nn.Module]) -> Iterator[None]:
    """What the modules' attributes are bound to, and the items of those that are plain containers."""
    kept = [(module.__dict__, dict(module.__dict__)) for module in modules]
    items = [(v, v.copy()) for _, had in kept for v in had.values() if type(v) in (list, dict, set, deque)]
    try:
        yield
    finally:
        for container, copied in items:
            if container != copied if isinstance(container, set) else not _alike(container, copied):
                container.clear()
                (container.extend if isinstance(container, (list, deque)) else container.update)(copied)
        for attributes, had in kept:
            for name in [name for name in attributes if name not in had]:
                del attributes[name]
            attributes.update(had)


def _alike(now: Any, then: Any) -> bool:
    """Whether two lists or dicts hold the same objects in the same order."""
    pairs = [(list(c.items()) if isinstance(c, dict) else list(enumerate(c))) for c in (now, then)]
    return [(k, id(v)) for k, v in pairs[0]] == [(k, id(v)) for k, v in pairs[1]]


@contextmanager
def _modes() -> Iterator[None]:
    fast_path, cached = torch.backends.mha.get_fastpath_enabled(), torch.is_autocast_cache_enabled()
    try:
        # Without gradients nn.MultiheadAttention may take another path than it took in training, and autocast would
        # keep casts of the weights that the user's next forward could not train through.
        torch.backends.mha.set_fastpath_enabled(False)
        torch.set_autocast_cache_enabled(False)
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # they were shown when the user's forward ran
            # A compiled function that is called under a dispatch mode would be given up by the compiler for good.
            if hasattr(torch.compiler, "set_stance"):
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        torch.set_autocast_cache_enabled(cached)
