"""Faults planted in a real training run, at a known step and in a known place, to see whether a detector finds them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from types import TracebackType
from typing import Any, Self

import numpy as np

from dynguard.errors import nearest
from dynguard.testing.statistics import is_tensor

# What wrappers put before a parameter's name: torch.compile, and DistributedDataParallel or DataParallel.
_WRAPPERS = ("_orig_mod.", "module.")


class GradientFault:
    """Changes the gradient of one parameter during backward; a context manager that leaves no hook behind.

    The change happens as autograd hands the gradient over, so it comes before gradient clipping and before whatever
    watches the optimizer, as a real fault would. Under gradient accumulation each backward of the step is hit.

    Attributes:
        step: steps of ``optimizer`` done since the block was entered (0 while the first is being prepared).
        hits: the value of ``step`` at each backward pass that was changed.
    """

    def __init__(
        self,
        model: Any,
        name: str,
        change: Callable[[Any], Any],
        *,
        step: int | Collection[int] | None = None,
        optimizer: Any = None,
    ) -> None:
        if (step is None) != (optimizer is None):
            raise ValueError("a fault at a known step needs both step= and optimizer=; leave out both to use arm()")
        self._parameter = _find(model, name)
        self._change = change
        self._steps = frozenset([step] if isinstance(step, int) else step or ())
        self._optimizer = optimizer
        self._armed = False
        self._handles: list[Any] = []
        self.step = 0
        self.hits: list[int] = []

    def arm(self) -> None:
        """Change the gradient in the next backward pass, once."""
        self._armed = True

    def __enter__(self) -> Self:
        self.step, self.hits = 0, []
        self._handles = [self._parameter.register_hook(self._on_gradient)]
        if self._optimizer is not None:
            self._handles.append(self._optimizer.register_step_post_hook(self._on_step))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _on_step(self, *_: Any) -> None:
        self.step += 1

    def _on_gradient(self, gradient: Any) -> Any:
        if not self._armed and self.step not in self._steps:
            return None
        self._armed = False
        self.hits.append(self.step)
        return self._change(gradient)


def scale_gradient(
    model: Any,
    name: str,
    factor: float,
    *,
    step: int | Collection[int] | None = None,
    optimizer: Any = None,
) -> GradientFault:
    """Multiply the gradient of the parameter ``name`` by ``factor`` at one or several steps of ``optimizer``.

    ::

        with scale_gradient(model, "fc.weight", 1000.0, step=7, optimizer=optimizer) as fault:
            train(model, optimizer)
        assert fault.hits == [7]

    Without ``step`` and ``optimizer``, ``fault.arm()`` says that the next backward pass is hit.

    Args:
        model: the torch module.
        name: of the parameter, as in ``model.named_parameters()``, with or without the prefixes of wrappers.
        factor: any number, also NaN or infinity.
        step: which steps, counted from 0 on entry as ``optimizer`` completes them.
        optimizer: the torch optimizer that is asked to count.

    Raises:
        ValueError: no such parameter, a frozen one, or only one of ``step`` and ``optimizer`` given.
    """
    return GradientFault(model, name, lambda gradient: gradient * factor, step=step, optimizer=optimizer)


def poison_gradient(
    model: Any,
    name: str,
    *,
    index: int | tuple[int, ...] = 0,
    value: float = math.nan,
    step: int | Collection[int] | None = None,
    optimizer: Any = None,
) -> GradientFault:
    """Set one entry of the gradient of the parameter ``name`` to ``value``; else as :func:`scale_gradient`.

    ``index`` is a position in the parameter, as a tuple or counted flat, from the end where negative; in a sparse
    gradient it is one in its values.
    """
    shape = tuple(_find(model, name).shape)
    _position(index, shape)
    return GradientFault(
        model, name, lambda gradient: _poisoned(gradient, index, value), step=step, optimizer=optimizer
    )


def _poisoned(gradient: Any, index: int | tuple[int, ...], value: float) -> Any:
    poisoned = gradient.coalesce().clone() if gradient.is_sparse else gradient.clone()
    entries = poisoned.values() if gradient.is_sparse else poisoned
    entries[_position(index, tuple(entries.shape))] = value
    return poisoned


def _position(index: int | tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    try:
        flat = int(np.ravel_multi_index(index, shape)) if isinstance(index, tuple) else index
        flat += math.prod(shape) if flat < 0 else 0
        return tuple(int(i) for i in np.unravel_index(flat, shape))
    except ValueError as error:
        raise ValueError(f"no entry {index} in a gradient of shape {shape}: {error}") from None


def _find(model: Any, name: str) -> Any:
    parameters: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    by_name = {_clean(full): parameter for full, parameter in parameters.items()} | parameters
    if name not in by_name:
        raise ValueError(f"the model has no parameter {name!r}.{nearest(name, list(parameters))}")
    if not by_name[name].requires_grad:
        raise ValueError(f"parameter {name!r} is frozen (requires_grad=False), so it gets no gradient to change")
    return by_name[name]


def _clean(name: str) -> str:
    for prefix in _WRAPPERS:
        name = name.replace(prefix, "")
    return name


class BadBatches:
    """An iterable of batches in which some are spoiled; the batches given are left as they are.

    Attributes:
        hits: numbers of the batches that were spoiled so far.
    """

    def __init__(self, batches: Iterable[Any], at: frozenset[int], part: int | str | None, change: Any) -> None:
        self._batches, self._at, self._part, self._change = batches, at, part, change
        self._count = 0
        self.hits: list[int] = []

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]  # TypeError where the wrapped iterable has no length

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            number, self._count = self._count, self._count + 1
            if number in self._at:
                batch = self._spoil(batch, number)
            yield batch

    def _spoil(self, batch: Any, number: int) -> Any:
        changed: list[Any] = []
        spoiled = _map_floats(batch, self._part, self._change, changed)
        if not changed:
            where = "" if self._part is None else f" in its part {self._part!r}"
            raise ValueError(f"bad_batch: batch {number} has no floating-point array{where} to spoil")
        self.hits.append(number)
        return spoiled


def bad_batch(
    batches: Iterable[Any],
    *,
    at: int | Collection[int],
    scale: float = 1.0,
    value: float | None = None,
    part: int | str | None = None,
) -> BadBatches:
    """Pass ``batches`` on, spoiling those numbered ``at``.

    In a spoiled batch every floating-point array or tensor, also in nested tuples, lists and dictionaries, is
    multiplied by ``scale`` and then, where ``value`` is given, its first entry is set to it. Others are left alone.

    Args:
        batches: any iterable, e.g. a DataLoader.
        at: numbers of the batches, from 0, counted on over repeated passes (epochs).
        scale: factor, e.g. 1000 for a batch that missed its normalisation.
        value: e.g. ``float("nan")``.
        part: spoil only this item of the batch, e.g. 0 for the inputs of ``(inputs, targets)``.

    >>> import numpy as np
    >>> batches = [np.ones(2), np.ones(2), np.ones(2)]
    >>> [batch.tolist() for batch in bad_batch(batches, at=1, scale=100.0)]
    [[1.0, 1.0], [100.0, 100.0], [1.0, 1.0]]
    """

    def change(array: Any) -> Any:
        with np.errstate(all="ignore"):
            spoiled = array * scale if is_tensor(array) else np.asarray(array * scale, dtype=array.dtype)
        if value is not None:
            spoiled[(0,) * spoiled.ndim] = value
        return spoiled

    return BadBatches(batches, frozenset([at] if isinstance(at, int) else at), part, change)


def _map_floats(batch: Any, part: int | str | None, change: Callable[[Any], Any], changed: list[Any]) -> Any:
    """``batch`` with ``change`` applied to its floating-point arrays, which are noted in ``changed``."""
    if isinstance(batch, dict):
        return {k: _map_floats(v, None, change, changed) if part in (None, k) else v for k, v in batch.items()}
    if isinstance(batch, tuple | list):
        items = [_map_floats(v, None, change, changed) if part in (None, i) else v for i, v in enumerate(batch)]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    if part is None and _is_floating(batch):
        changed.append(batch)
        return change(batch)
    return batch


def _is_floating(value: Any) -> bool:
    if is_tensor(value):
        return bool(value.is_floating_point()) and value.numel() > 0
    return isinstance(value, np.ndarray) and np.issubdtype(value.dtype, np.floating) and value.size > 0
