"""One more evaluation of the loss on a kept batch, followed module by module.

For steps that fired only: nothing is hooked before or after. Hooks on the modules tell where, a dispatch mode tells
which operation and which parameters are used.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dynguard.torch import names as naming
from dynguard.torch.distributed import is_sharded
from dynguard.torch.nonfinite import count, dense, holds_iterator, is_finite, is_mask, kinds, walk
from dynguard.torch.probe import all_modules, alone, as_probe
from dynguard.torch.unchanged import Written, unchanged

log = logging.getLogger("dynguard")

Autocast = Callable[[], AbstractContextManager[Any]]
LossFunction = Callable[[Any, Any], Any]

TABLE_ROWS = 100  # of an embedding table that are listed
NEEDS_GRADIENTS = "does not require grad"  # torch.autograd.grad says so where gradients are off
COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem")


class StopRerunError(Exception):
    """Ends the evaluation: it is out of time, or would wait for other ranks."""


@dataclass(slots=True)
class Frame:
    """One call, still running, of a module or (``module`` is None) of the loss function.

    ``clean``: what it was given is finite. ``operation``: the first in its own code to make a non-finite number of
    finite ones. ``call``: how often the module was called before.
    """

    name: str
    module: nn.Module | None
    clean: bool
    call: int = 0
    operation: str = ""


@dataclass(slots=True)
class Producer:
    """Who first made a non-finite number.

    Attributes:
        name, module, operation: of its frame; the module is None for the loss function.
        handed: the module that was given the number, "" where the number is in the producer's own output.
        numbers: what :func:`~dynguard.torch.nonfinite.count` tells of it.
        parameters, buffers: names of the producer's that are non-finite themselves.
        rows: non-finite rows of an embedding table.
    """

    name: str
    module: nn.Module | None
    operation: str
    handed: str
    numbers: dict[str, Any]
    parameters: list[str]
    buffers: list[str]
    rows: tuple[int, ...]


class Trace:
    """Follows one evaluation: what modules are given and put out, what operations take and make.

    Args:
        models: modules by key, as their parameters are named.
        deadline: on ``time.monotonic()``.
        looking: whether to look for non-finite numbers, or at the order of the parameters only.

    Attributes:
        found: the first producer of a non-finite number, or None.
        order: names of the parameters in the order of their use.
        modules: (module, name) by ``id(module)``.
    """

    def __init__(self, models: Mapping[str, nn.Module], deadline: float, *, looking: bool = True) -> None:
        self.found: Producer | None = None
        self._models = models
        self._deadline = deadline
        self._looking = looking
        self._used: dict[str, None] = {}
        self._stack: list[Frame] = []
        self._calls: dict[int, int] = {}
        self._own = False  # the operations that run are this trace's
        self._meant = False  # infinities were put in on purpose (masked_fill, an additive mask)
        self._stray = False  # infinities were there before, in the batch or in a parameter
        self._names = {id(p): name for name, p in naming.named_parameters(models)}
        self.modules = _named_modules(models)
        self._masks: set[int] = set()
        self._written = Written(())

    @property
    def order(self) -> list[str]:
        """Names of the parameters in the order of their use so far."""
        return list(self._used)

    def run(self, loss_fn: LossFunction, model: Any, batch: Any, written: Written) -> None:
        """Evaluate the loss, and see what happens."""
        if self._looking:
            self._survey(batch)
        root = Frame("loss_fn", None, self._unclean(batch) is None)
        self._stack = [root]
        self._written = written
        with self._hooked(), _Operations(self):
            loss = loss_fn(model, batch)
        worst = self._unclean(torch.tensor(loss) if isinstance(loss, float) else loss)
        if worst is not None and root.clean:
            self._produced(root, worst)

    def _survey(self, batch: Any) -> None:
        """Learn which infinities were there before: constants of the model are masks, others are strays."""
        for model in self._models.values():
            constants = [*model.buffers(), *(p for p in model.parameters() if not p.requires_grad)]
            self._masks |= {id(c) for c in constants if kinds([c]) == (False, True) and not bool(c.isposinf().any())}
        weights = [p for m in self._models.values() for p in m.parameters() if p.requires_grad]
        leaves = (dense(leaf) for _, leaf in walk(batch))
        self._stray = kinds([*weights, *(v for v in leaves if v is not None and not is_mask(v))])[1]

    # -- modules

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        handles: list[Any] = []
        try:
            for module, _ in self.modules.values():
                handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
                handles.append(module.register_forward_hook(self._leave, with_kwargs=True, always_call=True))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        name, call = self.modules[id(module)][1], self._calls.get(id(module), 0)
        self._calls[id(module)] = call + 1
        worst = self._unclean((args, kwargs))
        if worst is not None and self._stack[-1].clean:
            self._produced(self._stack[-1], worst, handed=name)
        self._stack.append(Frame(name, module, worst is None, call))

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        frame = self._stack[-1]
        if frame.module is not module:  # a hook of the user's failed before it was entered
            return
        worst = self._unclean(output)
        if worst is not None and frame.clean:
            self._produced(frame, worst)
        self._stack.pop()
        self._use(module._parameters.values())  # those that a kernel takes which no dispatch mode sees

    @contextmanager
    def _looking_on(self) -> Iterator[None]:
        self._own = True
        try:
            yield
        finally:
            self._own = False

    def _unclean(self, value: Any) -> Tensor | None:
        """The first tensor in ``value`` with non-finite entries that nobody put there on purpose."""
        if not self._looking or self.found is not None:
            return None
        with self._looking_on():
            leaves = (dense(leaf) for _, leaf in walk(value, limit=1000) if not isinstance(leaf, (float, complex)))
            return next((v for v in leaves if v is not None and not is_finite(v) and not self._on_purpose(v)), None)

    def _on_purpose(self, values: Tensor) -> bool:
        if bool(values.isnan().any()):
            return False
        computed = self._stray or any(frame.operation for frame in self._stack)
        return is_mask(values) or (self._meant and not computed)

    def _produced(self, frame: Frame, values: Tensor, handed: str = "") -> None:
        within = list(self._models.values()) if frame.module is None else [frame.module]
        with self._looking_on():
            self.found = Producer(
                frame.name,
                frame.module,
                frame.operation,
                handed,
                count(values) | {"call": frame.call or None, "autocast": _autocast_dtypes()},
                [self._names.get(id(p), n) for m in within for n, p in m.named_parameters() if self._is_bad(p)],
                self._bad_buffers(within),
                _bad_rows(frame.module),
            )

    def _is_bad(self, tensor: Tensor) -> bool:
        return id(tensor) not in self._masks and any(kinds([tensor]))

    def _bad_buffers(self, within: Iterable[nn.Module]) -> list[str]:
        """Where a module trains, the forward writes its buffers: they are then no cause but a consequence."""
        resting = ((m, path) for top in within for path, m in top.named_modules() if not m.training)
        bad = ((m, path, n) for m, path in resting for n, b in m._buffers.items() if b is not None and self._is_bad(b))
        return [f"{self.modules[id(m)][1]}.{n}" if id(m) in self.modules else f"{path}.{n}" for m, path, n in bad]

    # -- operations

    def operation(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run one operation of the evaluation, and see what it takes and makes."""
        if self._own or not hasattr(function, "_schema"):  # a higher-order operator: flex attention
            return function(*args, **kwargs)
        if time.monotonic() > self._deadline:
            raise StopRerunError("out of time")
        if function.namespace in COLLECTIVES:
            raise StopRerunError(f"{function} would wait for other ranks")
        inputs = tree_leaves((args, kwargs))
        self._use(inputs)
        # What torch.empty hands out is whatever was in memory before.
        looking = self._looking and self.found is None and not function.is_view and "empty" not in function.name()
        before = None
        if function._schema.is_mutable:
            self._written.before(function, args, kwargs)
            before = kinds(inputs) if looking else None
        output = function(*args, **kwargs)
        if looking:
            self._judge(function, inputs, before, output)
        return output

    def _judge(self, function: Any, inputs: list[Any], before: tuple[bool, bool] | None, output: Any) -> None:
        nan, inf = kinds(tree_leaves(output))
        if not (nan or inf):
            return
        given_nan, given_inf = before or kinds(inputs)
        made = [v for v in map(dense, tree_leaves(output)) if v is not None and not is_finite(v)]
        if given_nan or (not nan and all(map(is_mask, made))):  # log() of zeros and ones is a mask, too
            return
        if nan or not given_inf:
            frame = self._stack[-1]
            frame.operation = frame.operation or function.name().removeprefix("aten::").split(".")[0].rstrip("_")
        else:
            self._meant = self._meant or any(map(self._means, inputs))

    def _means(self, value: Any) -> bool:
        """Whether an infinite input is one that code puts in on purpose: a constant or a mask."""
        if isinstance(value, float) or id(value) in self._masks:
            return not isinstance(value, float) or math.isinf(value)
        entries = dense(value) if isinstance(value, Tensor) else None
        return entries is not None and not is_finite(entries) and (not entries.ndim or is_mask(entries))

    def _use(self, values: Iterable[Any]) -> None:
        for value in values:
            if id(value) in self._names:
                self._used.setdefault(self._names[id(value)])


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch gives its hook no types
    """Shows every operation to a trace."""

    supports_higher_order_operators = True

    def __init__(self, trace: Trace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self._trace = trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._trace.operation(func, args, kwargs or {})


def rerun(
    models: Mapping[str, nn.Module],
    loss_fn: LossFunction,
    model: Any,
    batch: Any,
    deadline: float,
    *,
    autocast: Autocast | None = None,
    looking: bool = True,
) -> Trace:
    """Evaluate ``loss_fn(model, batch)`` again and tell what was seen, as far as it went.

    Not done where the batch is an iterator, or the model in shards, which a part of the ranks can't evaluate. Gradients
    are off unless the loss function takes some itself. An exception in it, also for want of memory, ends it and is no
    error.
    """
    for gradients in (False, True):
        trace = Trace(models, deadline, looking=looking)
        modules = [module for module, _ in trace.modules.values()]
        if holds_iterator(batch) or any(
            _in_shards(m) or _compiled_for_good(m) for m in [*all_modules(model), *modules]
        ):
            break
        try:
            with as_probe(), unchanged(modules, batch, gradients=gradients) as written, (autocast or nullcontext)():
                trace.run(loss_fn, alone(model), batch, written)
        except Exception as error:  # noqa: BLE001 - the user's code, run at a moment that it does not expect
            log.debug("the batch could not be evaluated again to the end: %.300s", f"{type(error).__name__}: {error}")
            if trace.found is None and NEEDS_GRADIENTS in str(error):
                continue
        break
    return trace


def _named_modules(models: Mapping[str, nn.Module]) -> dict[int, tuple[nn.Module, str]]:
    """(module, name) by ``id(module)``, each under its first name; the model itself by its key or its type."""
    found: dict[int, tuple[nn.Module, str]] = {}
    for key, model in models.items():
        for path, module in naming.unwrap(model).named_modules():
            name = naming.clean(".".join(part for part in (key, path) if part))
            found.setdefault(id(module), (module, name or type(module).__name__))
    return found


def _in_shards(module: nn.Module) -> bool:
    """Whether a module's weights live on several ranks: FSDP, DTensor, ZeRO-3."""
    if type(module).__name__ == "FullyShardedDataParallel":
        return True
    return any(is_sharded(p) or hasattr(p, "ds_id") for p in module._parameters.values() if p is not None)


def _compiled_for_good(module: nn.Module) -> bool:
    """Whether a module is compiled and can't be run uncompiled (torch before 2.6)."""
    compiled = "_orig_mod" in module._modules
    return not hasattr(torch.compiler, "set_stance") and (compiled or module._compiled_call_impl is not None)


def _bad_rows(module: nn.Module | None) -> tuple[int, ...]:
    """Non-finite rows of an embedding table, 100 at most."""
    if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return ()
    bad = ~torch.isfinite(module.weight.detach()).all(1)
    return tuple(bad.nonzero()[:TABLE_ROWS, 0].tolist())


def _autocast_dtypes() -> str | None:
    kinds_of_device = ("cpu", "cuda", "xpu", "mps")
    active = [torch.get_autocast_dtype(kind) for kind in kinds_of_device if torch.is_autocast_enabled(kind)]
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in active) or None
