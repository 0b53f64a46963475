"""Where a model makes logits: its output layer, and its attention, found by structure and by usual names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

QUERY = re.compile(r"(^|[._])(q|query|q_proj|query_proj|wq|to_q|q_lin)$")
KEY = re.compile(r"(^|[._])(k|key|k_proj|key_proj|wk|to_k|k_lin)$")
# q, k and v side by side; those that interleave them by head (query_key_value) are left alone
FUSED = re.compile(r"(^|[._])(qkv|c_attn|to_qkv|wqkv|in_proj|qkv_proj)$", re.IGNORECASE)
QUERY_NORM = re.compile(r"(^|[._])(q_norm|query_norm|norm_q|q_layernorm|q_ln)$")
KEY_NORM = re.compile(r"(^|[._])(k_norm|key_norm|norm_k|k_layernorm|k_ln)$")
HEADS = ("num_heads", "n_head", "n_heads", "num_attention_heads", "heads")
WIDTHS = ("head_dim", "attention_head_size", "dim_head", "head_size")


@dataclass(slots=True, frozen=True)
class Place:
    """One module to look at.

    Attributes:
        name: of the module, as the user knows it.
        module: the module.
        kind: ``head`` (output layer), ``query``, ``key``, ``fused`` (q, k, v in one projection) or ``whole``
            (``nn.MultiheadAttention``).
        of: the name that its logits go by.
        width: of one attention head, 0 for all that comes out.
    """

    name: str
    module: Any
    kind: str
    of: str
    width: int = 1


def places(model: Any) -> Iterator[Place]:
    """All places of what the user passed as model; none in what is compiled."""
    from dynguard.torch import names as naming

    if model is None or _compiled(model):
        return
    head: Place | None = None
    for key, top in naming.modules_by_key(model).items():
        modules = dict(top.named_modules())
        normed = {path.rpartition(".")[0] for path, m in modules.items() if _norm(path, m)}
        for path, module in modules.items():
            name = ".".join(part for part in (key, path) if part)
            if _linear(module) and module.out_features > 1 and not QUERY.search(path) and not KEY.search(path):
                head = Place(name, module, "head", name)
            place = _attention(name, path, module, modules, normed)
            if place is not None:
                yield place
    if head is not None and not FUSED.search(head.name):
        yield head


def _attention(name: str, path: str, module: Any, modules: dict[str, Any], normed: set[str]) -> Place | None:
    from torch import nn

    if isinstance(module, nn.MultiheadAttention):
        return Place(name, module, "whole", name, module.head_dim)
    up, of = path.rpartition(".")[0], name.rpartition(".")[0]
    parent = modules.get(up)
    if up in normed:  # logits are made of what is normalised, not of the projections
        kind = "query" if QUERY_NORM.search(path) else "key" if KEY_NORM.search(path) else ""
        return Place(name, module, kind, of, _width(parent, 0)) if kind else None
    size = getattr(module, "out_features", None) or getattr(module, "nf", None)  # nf: transformers' Conv1D
    if not isinstance(size, int) or not hasattr(module, "weight"):
        return None
    if QUERY.search(path):
        return Place(name, module, "query", of, _width(parent, size))
    if KEY.search(path):
        query = next((m for p, m in modules.items() if p.rpartition(".")[0] == up and QUERY.search(p)), None)
        return Place(name, module, "key", of, _width(parent, getattr(query, "out_features", size)))
    return Place(name, module, "fused", of, _width(parent, size // 3)) if _three(path, module, size) else None


def _width(parent: Any, size: int) -> int:
    """Width of one head: as the attention module says, else of all that comes out."""
    for name in WIDTHS:
        value = getattr(parent, name, None)
        if isinstance(value, int) and value > 0:
            return value
    for name in HEADS:
        value = getattr(parent, name, None)
        if isinstance(value, int) and value > 0 and size % value == 0:
            return size // value
    return size


def _three(path: str, module: Any, size: int) -> bool:
    """Whether the module makes queries, keys and values of its input, of one size."""
    inputs = getattr(module, "in_features", None) or getattr(module, "nx", None)
    return bool(FUSED.search(path)) and size % 3 == 0 and inputs in (size // 3, None)


def _linear(module: Any) -> bool:
    from torch import nn

    return isinstance(module, nn.Linear) and type(module).__name__ != "NonDynamicallyQuantizableLinear"


def _norm(path: str, module: Any) -> bool:
    from torch import nn

    return not isinstance(module, nn.Identity) and bool(QUERY_NORM.search(path))


def _compiled(model: Any) -> bool:
    from dynguard.torch.probe import all_modules

    return any(
        type(m).__name__ == "OptimizedModule" or getattr(m, "_compiled_call_impl", None) is not None
        for m in all_modules(model)
    )
