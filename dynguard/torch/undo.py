"""Undoing the step of an optimizer whose habits are not known: weights and state as they were before it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Undo:
    """The weights and state of an optimizer as they were, to be put back after its step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        with torch.no_grad():
            self._weights = [(p, p.clone()) for group in optimizer.param_groups for p in group["params"]]
            self._state = {p: {k: _copied(v) for k, v in state.items()} for p, state in optimizer.state.items()}

    def __call__(self) -> None:
        """Put them back, in place."""
        with torch.no_grad():
            for parameter, values in self._weights:
                parameter.copy_(values)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
