"""Hooks on the user's modules that stay behind where a module is copied or pickled, and look away where they must."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dynguard.torch.probe import probing


def inert(*arguments: Any, **keywords: Any) -> None:
    """What a hook becomes in a copied or unpickled module: it does nothing and holds nothing."""


class ModuleHook:
    """A forward hook that a copy of its module, or a pickle of it, does not take along.

    A bound method or a closure would: deepcopy would copy the whole plugin with it, and pickle would fail.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        """The hook proper, left out where a forward is traced or compiled."""
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            return None
        return self._call(*arguments)

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return inert

    def __copy__(self) -> Callable[..., None]:
        return inert

    def __reduce__(self) -> tuple[Any, ...]:
        return _make_inert, ()


def _make_inert() -> Callable[..., None]:
    return inert


def no_training_forward() -> bool:
    """Whether no step of the user's comes of this forward: no gradients, a probe, a recomputation, vmap."""
    return (
        not torch.is_grad_enabled()
        or probing()
        or torch._C._current_graph_task_id() != -1  # recomputed by activation checkpointing
        or torch._C._functorch.peek_interpreter_stack() is not None
    )
