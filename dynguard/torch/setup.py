"""From what the user gives, models and optimizers, to sources; and every way in which that can be wrong."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dynguard.errors import SetupError
from dynguard.torch import names as naming
from dynguard.torch.globalhooks import is_inside_another
from dynguard.torch.names import innermost
from dynguard.torch.source import Listener, Source, is_watched, untraced


def make_sources(models: naming.Models, optimizers: Any, listener: Listener) -> list[Source]:
    """One source per optimizer, with the model's names. Checks what was given and raises SetupError."""
    known = check_models(models)
    if isinstance(optimizers, Mapping):
        named = {str(k): v for k, v in optimizers.items()}
    elif isinstance(optimizers, (list, tuple)):
        named = {f"optimizer{i}" if len(optimizers) > 1 else "": o for i, o in enumerate(optimizers)}
    else:
        named = {"": optimizers}
    if not named:
        raise SetupError("optimizer is empty: give the optimizer that trains the model")
    inner = {name: innermost(optimizer) for name, optimizer in named.items()}
    for name, optimizer in inner.items():
        _check_owned(name, optimizer, known)
    sources: list[Source] = []
    try:
        for name, optimizer in inner.items():
            sources.append(Source(optimizer, known, name, listener, embedding_tables(models)))
    except SetupError:
        for source in sources:
            source.detach()
        raise
    return sources


def check_models(models: naming.Models) -> dict[int, str]:
    """Names by ``id(parameter)`` of all models; SetupError where there is nothing to watch."""
    several = (
        list(models.values()) if isinstance(models, Mapping) else models if isinstance(models, (list, tuple)) else []
    )
    if not isinstance(models, nn.Module) and not (several and all(isinstance(m, nn.Module) for m in several)):
        raise SetupError(f"model must be a torch.nn.Module (one, a list or a dict); got {type(models).__name__}")
    pairs = list(naming.named_parameters(models))
    if not pairs:
        raise SetupError("the model has no parameters, so there is nothing to watch")
    meta = [name for name, p in pairs if naming.is_meta(p)]
    if meta:
        raise SetupError(
            f"the model is on the 'meta' device (first: {meta[0]!r}): materialise it before FlowManager(model, ...), "
            "e.g. model.to_empty(device='cpu')"
        )
    return {id(p): name for name, p in pairs}


def embedding_tables(models: naming.Models) -> frozenset[int]:
    """``id(parameter)`` of the weights of all nn.Embedding and nn.EmbeddingBag modules."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    found = (m for model in naming.modules_by_key(models).values() for m in model.modules())
    weights = (m._parameters.get("weight") for m in found if isinstance(m, kinds))
    return frozenset(id(w) for w in weights if w is not None)


def _check_owned(name: str, optimizer: Optimizer, known: Mapping[int, str]) -> None:
    alien = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
    if alien:
        total = sum(len(group["params"]) for group in optimizer.param_groups)
        which = f"optimizer {name!r}" if name else "the optimizer"
        raise SetupError(
            f"{len(alien)} of {total} parameters of {which} are not the model's (first: {tuple(alien[0].shape)}). "
            "Give FlowManager all models it trains: FlowManager([model, head], optimizer); was the model replaced or "
            "copied after the optimizer was made?"
        )


def rank_and_world() -> tuple[int, int]:
    """(rank, world size) of torch.distributed; (0, 1) where it is not in use."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


class Successors:
    """Finds an optimizer that is made anew for watched parameters while training (a resume, a new phase)."""

    def __init__(self, sources: list[Source]) -> None:
        self._sources = sources
        self._strangers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._handle = register_optimizer_step_pre_hook(untraced(self._seen))

    def detach(self) -> None:
        """Stop looking."""
        self._handle.remove()

    def _seen(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_watched(optimizer) or optimizer in self._strangers:
            return
        if is_inside_another(optimizer):
            return  # the inner step of SAM, Lookahead ...: the outer one is watched
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for source in self._sources:
            if mine & {id(p) for p in source.parameters}:
                source.watch(optimizer)
                return
        self._strangers.add(optimizer)
