"""Byte-exact pictures of events, answers and states, to see whether something changed or is equal."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from pydantic import BaseModel

from dynguard.signals import Signal
from dynguard.testing.statistics import is_tensor


def fingerprint(value: Any, path: str = "") -> dict[str, bytes | str]:
    """Path -> bytes of every array and number within ``value``; NaN equals NaN of the same bits."""
    if isinstance(value, Signal):
        return fingerprint({"score": value.score, "fired": value.fired, "action": value.action}, path)
    if isinstance(value, BaseModel):
        return {path: value.model_dump_json()}
    parts = _parts(value)
    if parts is None:
        return {path: _bytes(value)}
    joined: dict[str, bytes | str] = {path: type(value).__name__}
    for key, part in parts.items():
        joined |= fingerprint(part, f"{path}.{key}" if path else str(key))
    return joined


def _parts(value: Any) -> Mapping[Any, Any] | None:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return value
    if isinstance(value, tuple | list):
        return dict(enumerate(value))
    return None


def _bytes(value: Any) -> bytes | str:
    if is_tensor(value):
        return _tensor_bytes(value)
    if isinstance(value, np.ndarray | np.generic):
        return f"{value.dtype}{value.shape}".encode() + value.tobytes()
    return repr(value)


def _tensor_bytes(tensor: Any) -> bytes:
    import torch

    plain = tensor.detach()
    if plain.is_sparse:
        sparse = plain.coalesce()
        return _tensor_bytes(sparse.indices()) + _tensor_bytes(sparse.values())
    head = f"{plain.dtype}{tuple(plain.shape)}".encode()
    flat = plain.cpu().contiguous().reshape(-1)
    return head + (flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")


def changed(before: Mapping[str, bytes | str], after: Mapping[str, bytes | str]) -> list[str]:
    """Paths that differ."""
    return [path for path in {**before, **after} if before.get(path) != after.get(path)]
