"""Names of parameters as the user knows them: wrappers that only carry a module do not show in a name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from dynguard.errors import SetupError

Models: TypeAlias = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]
# Attribute under which a wrapper keeps what it wraps: torch.compile, FSDP, activation checkpointing.
WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def unwrap(model: nn.Module) -> nn.Module:
    """The user's module inside DistributedDataParallel, DataParallel and torch.compile."""
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
            continue
        inner = next(
            (m for w in WRAPPERS if w in model._modules and isinstance(m := model._modules[w], nn.Module)), None
        )
        if inner is None:
            return model
        model = inner


def clean(name: str) -> str:
    """A dotted name without the wrappers' attributes: ``layers._orig_mod.0.weight`` -> ``layers.0.weight``."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def modules_by_key(models: Models) -> dict[str, nn.Module]:
    """Key -> unwrapped module; the key is "" for a single model, the mapping's key or the position otherwise."""
    if isinstance(models, nn.Module):
        return {"": unwrap(models)}
    items = models.items() if isinstance(models, Mapping) else ((str(i), m) for i, m in enumerate(models))
    return {key: unwrap(model) for key, model in items}


def named_parameters(models: Models) -> Iterator[tuple[str, nn.Parameter]]:
    """(name, parameter) of all models in their order; a tied parameter comes once, under its first name."""
    seen: set[int] = set()
    for key, model in modules_by_key(models).items():
        for name, parameter in model.named_parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield clean(f"{key}.{name}" if key else name), parameter


def is_meta(parameter: torch.Tensor) -> bool:
    """Whether the parameter has no storage yet."""
    return parameter.device.type == "meta"


def innermost(optimizer: Any) -> Optimizer:
    """The torch optimizer inside a wrapper (Accelerate, Lightning); SetupError where there is none."""
    seen = optimizer
    for _ in range(8):
        inner = getattr(seen, "optimizer", None)
        if not isinstance(inner, Optimizer):
            break
        seen = inner
    if not isinstance(seen, Optimizer):
        raise SetupError(
            f"optimizer must be a torch.optim.Optimizer (one, a list or a dict); got {type(optimizer).__name__}"
        )
    return seen
