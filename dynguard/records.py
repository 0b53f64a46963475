"""Records as strict JSON and back: one object per record, with a ``type`` field.

Non-finite numbers are spelled ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``; everything but ASCII is escaped, so that
any text that Python can hold survives, lone surrogates too. On the way back those three words are numbers again
wherever a number may stand.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from dynguard.actions import Intervention
from dynguard.findings import Finding, Metrics, Names, Record, RunEnd, RunStart, Section

TYPES: Mapping[str, type] = {
    "run_start": RunStart,
    "names": Names,
    "metrics": Metrics,
    "finding": Finding,
    "intervention": Intervention,
    "section": Section,
    "run_end": RunEnd,
}
_NAMES = {kind: name for name, kind in TYPES.items()}
_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_SCALARS = ("value", "current", "proposed", "rows", "x")  # fields that hold a number or a word
_LONGEST_INT = 4096  # bits; Python refuses to spell much longer ones in decimal


def strict(value: Any) -> Any:
    """``value`` in terms of strict JSON: dict, list, str, int, bool, None and finite floats. Never raises."""
    if value is None or isinstance(value, bool | str):
        return value.value if isinstance(value, Enum) else value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else spell(value)
    if isinstance(value, int):
        return int(value) if value.bit_length() <= _LONGEST_INT else hex(value)
    if isinstance(value, Enum):
        return strict(value.value)
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return numbers(value)
    if isinstance(value, np.generic):
        return strict(value.item())
    return [strict(item) for item in value] if isinstance(value, list | tuple | set | frozenset) else str(value)


def spell(value: float) -> str:
    """The word for a non-finite number."""
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def numbers(values: npt.ArrayLike) -> list[Any]:
    """A vector as JSON numbers, with as few digits as name each entry exactly in its own precision."""
    return [strict(float(str(value))) for value in np.asarray(values).ravel()]


def encode(record: Record) -> dict[str, Any]:
    """The record as strict JSON values, its ``type`` first. TypeError where it is no record."""
    name = _NAMES.get(type(record))
    if name is None:
        raise TypeError(f"not a record: {type(record).__name__} (one of {', '.join(t.__name__ for t in _NAMES)})")
    if isinstance(record, BaseModel):
        fields = record.model_dump()
    else:  # not asdict, which would copy every vector
        fields = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    return {"type": name, **strict(fields)}


def decode(data: Mapping[str, Any]) -> Record:
    """The record that ``encode`` was given. ValueError where the data is not one."""
    fields = dict(data)
    kind = TYPES.get(str(fields.pop("type", None)))
    if kind is None:
        raise ValueError(f"no record of type {data.get('type')!r}")
    try:
        if kind is Metrics:
            return _metrics(**fields)
        if kind is Names:
            return Names(str(fields["vector"]), tuple(map(str, fields["names"])), str(fields["source"]))
        record: Record = kind(**_revive(fields))
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"a damaged record of type {data['type']!r}: {error}") from error
    return record


def dumps(record: Record) -> str:
    """One line of strict ASCII JSON."""
    return write_json(encode(record))


def loads(text: str) -> Record:
    """The record that ``dumps`` was given. ValueError where the text is not one."""
    data = json.loads(text)
    if not isinstance(data, dict):
        raise ValueError(f"a record is a JSON object, not {type(data).__name__}")
    return decode(data)


def write_json(data: Any) -> str:
    """Compact ASCII JSON of what ``strict`` gives; ValueError on a bare NaN or infinity."""
    return json.dumps(data, allow_nan=False, separators=(",", ":"))


def _metrics(
    step: int, values: Mapping[str, Any], vectors: Mapping[str, Iterable[Any]], source: str, time: Any
) -> Metrics:
    return Metrics(
        step=int(step),
        values={name: float(value) for name, value in values.items()},
        vectors={name: np.array([float(v) for v in vector], np.float32) for name, vector in vectors.items()},
        source=str(source),
        time=float(time),
    )


def _revive(node: Any, scalar: bool = False) -> Any:
    if isinstance(node, str):
        return _NUMBERS.get(node, node) if scalar else node
    if isinstance(node, list):
        return [_revive(item, scalar) for item in node]
    if isinstance(node, dict):
        return {key: item if key == "info" else _revive(item, key in _SCALARS) for key, item in node.items()}
    return node
