"""All that a FlowManager holds of torch: sources, the keeper, the ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dynguard.actions import Action
from dynguard.findings import Evidence, Finding, Severity
from dynguard.settings import Settings
from dynguard.torch.distributed import Ranks, find_ranks
from dynguard.torch.embeddings import Lookups
from dynguard.torch.keeper import Keeper
from dynguard.torch.names import clean, innermost, modules_by_key
from dynguard.torch.scaling import listen
from dynguard.torch.setup import Successors, check_models, embedding_tables, make_sources, rank_and_world
from dynguard.torch.source import Listener, Source
from dynguard.torch.training import TorchTraining

log = logging.getLogger("dynguard")

PATIENCE = 16  # steps that a GradScaler may drop in a row
COLLAPSED = 2.0**-9  # a scale at which float16 has nothing left to gain


class Watch:
    """Sources by optimizer, with what can undo their steps and with the other ranks."""

    def __init__(
        self,
        listener: Listener,
        settings: Settings,
        loss_fn: Callable[[Any, Any], Any] | None,
        ranks: Any,
        *,
        rows: bool = False,
    ) -> None:
        self.listener = listener
        self.settings = settings
        self.loss_fn = loss_fn
        self.sources: list[Source] = []
        self.keeper: Keeper | None = None
        self.ranks: Ranks | None = None
        self.lookups: Lookups | None = Lookups(()) if rows else None
        self.tracked: dict[str, Any] = {}
        self.dropped: dict[str, list[float]] = {}  # scales at the steps that a GradScaler dropped in a row, by source
        self._wanted_ranks = ranks
        self._given: list[Any] = []
        self._models: dict[str, nn.Module] = {}
        self._successors: Successors | None = None
        self.rank, self.world_size = rank_and_world()
        self._judged: dict[str, int] = {}
        self._stop_listening = listen(self._scaler_stepped)

    def watch(self, model: Any, optimizer: Any) -> None:
        """Watch a model's optimizers from the start; SetupError where there is nothing to watch."""
        self.sources = make_sources(model, optimizer, self.listener)
        self._successors = Successors(self.sources)
        self._models = modules_by_key(model)
        self._given = [model]
        self._ready()

    def attach(self, optimizer: Any, model: Any, name: str) -> None:
        """Watch one more optimizer; one made anew for the parameters of a source takes that source's place."""
        inner = innermost(optimizer)
        mine = {id(p) for group in inner.param_groups for p in group["params"]}
        for source in self.sources:
            if mine == {id(p) for p in source.parameters}:
                source.watch(inner)
                return
        tables: frozenset[int] = frozenset()
        if model is None:
            known: dict[int, str] = {}
        elif isinstance(model, Mapping) and all(isinstance(p, Tensor) for p in model.values()):
            known = {id(parameter): clean(key) for key, parameter in model.items()}
        else:
            known = check_models(model)
            tables = embedding_tables(model)
            fresh = [m for m in modules_by_key(model).items() if m[1] not in self._models.values()]
            self._models.update({(key or name) if self._models else key: module for key, module in fresh})
            self._given.append(model)
        self.sources.append(Source(inner, known, name, self.listener, tables))
        self.rank, self.world_size = rank_and_world()
        self._ready()

    def _ready(self) -> None:
        given = self._given[0] if len(self._given) == 1 else None
        if self.lookups is not None:
            self.lookups.watch(m for g in self._given for m in _modules(g))
        for source in self.sources:
            source.training = TorchTraining(source, given, self.loss_fn, self.tracked)
        self.keeper = Keeper(self._models, given, self.optimizers, self.loss_fn, self.settings)
        for name, thing in self.tracked.items():
            self.keeper.track(name, thing)
        self.ranks = self.keeper.ranks = find_ranks([m for g in self._given for m in _modules(g)], self._wanted_ranks)
        if self.settings.reads == "deferred":
            for source in self.sources:
                source.deferred = source.can_defer()
                if not source.deferred:
                    log.warning(
                        "reads='deferred' needs a fused optimizer, e.g. AdamW(..., fused=True), that drops an update "
                        "by itself when found_inf is set; %s is not: one host read per step is kept",
                        type(source.optimizer).__name__,
                    )

    def track(self, name: str, thing: Any) -> None:
        """Something else that belongs to the state of training."""
        self.tracked[name] = thing
        if self.keeper is not None:
            self.keeper.track(name, thing)

    def scaler_collapse(self, source: Source, scaler: Any) -> Finding | None:
        """``scaler_collapse``: a GradScaler has dropped step after step while halving its scale.

        Called when it has dropped one. A scale may have to fall far before it fits, so only one below COLLAPSED counts.
        """
        row = self.dropped.setdefault(source.name, [])
        row.append(float(scaler.get_scale()))  # the scaler has just waited for the device itself
        if len(row) < PATIENCE or row[-1] > COLLAPSED or len(row) % PATIENCE > 1:
            return None
        return Finding(
            kind="scaler_collapse",
            severity=Severity.CRITICAL,
            step=source.step,
            subject="scaler",
            action=Action.RAISE,
            detector="dynguard",
            source=source.name,
            premise=f"the GradScaler has dropped {len(row)} steps in a row and its scale fell to {row[-1]:g}",
            implies="the gradients are non-finite whatever the scale: no step will ever be taken again",
            expected_effect="the run stops instead of spending its budget without one update",
            confidence=1.0,
            evidence=(
                Evidence(name="dropped_steps", value=len(row)),
                Evidence(name="scale", value=row[-1]),
            ),
        )

    def optimizers(self) -> list[Optimizer]:
        """The optimizers that are watched now."""
        return [source.optimizer for source in self.sources]

    def _scaler_stepped(self, scaler: Any, optimizer: Any) -> None:
        """A GradScaler was asked for a step; if none came, it dropped it."""
        inner = getattr(optimizer, "optimizer", optimizer)
        for source in self.sources:
            if source.optimizer is not inner and source.optimizer is not optimizer:
                continue
            if self._judged.get(source.name, 0) == source.judged:
                with torch.no_grad():
                    self.listener.dropped_step(source, scaler)
            self._judged[source.name] = source.judged

    def detach(self) -> None:
        """Take all hooks off."""
        self._stop_listening()
        for source in self.sources:
            source.detach()
        if self._successors is not None:
            self._successors.detach()
        if self.lookups is not None:
            self.lookups.detach()
        if self.keeper is not None:
            self.keeper.close()


def _modules(given: Any) -> list[nn.Module]:
    if isinstance(given, nn.Module):
        return [given]
    return [m for m in (given.values() if isinstance(given, Mapping) else given) if isinstance(m, nn.Module)]
