"""All that a FlowManager holds of torch: sources, the keeper, the ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from dynguard.actions import Action
from dynguard.findings import Evidence, Finding, Severity
from dynguard.settings import Settings
from dynguard.torch.distributed import Ranks, find_ranks
from dynguard.torch.keeper import Keeper
from dynguard.torch.names import clean, modules_by_key
from dynguard.torch.setup import Successors, check_models, embedding_tables, make_sources, rank_and_world
from dynguard.torch.source import Listener, Source, innermost

log = logging.getLogger("dynguard")

QUIET = 8  # losses without a step after which a tracked scaler is looked at


class Watch:
    """Sources by optimizer, with what can undo their steps and with the other ranks."""

    def __init__(
        self, listener: Listener, settings: Settings, loss_fn: Callable[[Any, Any], Any] | None, ranks: Any
    ) -> None:
        self.listener = listener
        self.settings = settings
        self.loss_fn = loss_fn
        self.sources: list[Source] = []
        self.keeper: Keeper | None = None
        self.ranks: Ranks | None = None
        self.tracked: dict[str, Any] = {}
        self.quiet = 0  # losses observed since an optimizer stepped
        self._scales: list[float] = []
        self._wanted_ranks = ranks
        self._given: list[Any] = []
        self._models: dict[str, nn.Module] = {}
        self._successors: Successors | None = None
        self.rank, self.world_size = rank_and_world()

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
        self.keeper = Keeper(self._models, given, self.optimizers, self.loss_fn, self.settings)
        for name, thing in self.tracked.items():
            self.keeper.track(name, thing)
        self.ranks = find_ranks([m for g in self._given for m in _modules(g)], self._wanted_ranks)
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

    def scaler_collapse(self, step: int) -> Finding | None:
        """``scaler_collapse``: a tracked GradScaler has dropped step after step while halving its scale.

        Called once per observed loss; it looks at the scale (a host read) only when no optimizer has stepped for long.
        """
        self.quiet += 1
        scaler = self.tracked.get("scaler")
        if scaler is None or self.quiet < QUIET or self.quiet % QUIET:
            if self.quiet <= 1:
                self._scales.clear()
            return None
        self._scales.append(float(scaler.get_scale()))
        falling = all(b < a for a, b in pairwise(self._scales))
        if len(self._scales) < 2 or not falling or self._scales[-1] > self._scales[0] / 2**4:
            return None
        return Finding(
            kind="scaler_collapse",
            severity=Severity.CRITICAL,
            step=step,
            subject="scaler",
            action=Action.RAISE,
            detector="dynguard",
            source=self.sources[0].name if self.sources else "",
            premise=f"the GradScaler has dropped about {self.quiet} steps in a row and its scale fell to "
            f"{self._scales[-1]:g}",
            implies="the gradients are non-finite whatever the scale: no step will ever be taken again",
            expected_effect="the run stops instead of spending its budget without one update",
            confidence=1.0,
            evidence=(
                Evidence(name="losses_without_a_step", value=self.quiet),
                Evidence(name="scale", value=self._scales[-1]),
            ),
        )

    def optimizers(self) -> list[Optimizer]:
        """The optimizers that are watched now."""
        return [source.optimizer for source in self.sources]

    def detach(self) -> None:
        """Take all hooks off."""
        for source in self.sources:
            source.detach()
        if self._successors is not None:
            self._successors.detach()
        if self.keeper is not None:
            self.keeper.close()


def _modules(given: Any) -> list[nn.Module]:
    if isinstance(given, nn.Module):
        return [given]
    return [m for m in (given.values() if isinstance(given, Mapping) else given) if isinstance(m, nn.Module)]
