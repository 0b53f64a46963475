"""Watching an optimizer whose model is found, or given, later than the manager was made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dynguard.torch.names import clean
from dynguard.torch.source import Listener, Source, check_models, embedding_tables, innermost


def attach(optimizer: Any, model: Any, name: str, listener: Listener) -> Source:
    """A source for ``optimizer``, with names from a module, several modules, or a mapping of names to parameters."""
    tables: frozenset[int] = frozenset()
    if model is None:
        known: dict[int, str] = {}
    elif isinstance(model, Mapping) and all(isinstance(p, Tensor) for p in model.values()):
        known = {id(parameter): clean(key) for key, parameter in model.items()}
    else:
        known = check_models(model)
        tables = embedding_tables(model)
    return Source(innermost(optimizer), known, name, listener, tables)
