"""The embedding source: which rows of a table each step looked up, how often, and their gradients."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from dynguard.arrays import local
from dynguard.events import EmbeddingEvent, GradientEvent
from dynguard.torch.distributed import is_sharded
from dynguard.torch.module_hooks import ModuleHook, no_training_forward
from dynguard.torch.statistics import Statistics, wide

TABLES = (nn.Embedding, nn.EmbeddingBag)
MOST = 1024  # look-ups of one table that wait for a step


@dataclass(slots=True)
class _Lookup:
    ids: Tensor
    training: bool


class Lookups:
    """Remembers the ids that embedding modules are given between two steps, by the identity of their weight.

    A pre-hook per module keeps a reference to the ids, which costs no copy and no host read. Not counted are lookups
    without gradients (evaluation), those of a probe, and the second forward of activation checkpointing. Where some of
    a step's lookups came from modules in training mode, only those count (an evaluation that forgot ``no_grad``).
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._ids: dict[int, list[_Lookup]] = {}
        self._padding: dict[int, int] = {}
        self._handles: list[Any] = []
        self._known: set[int] = set()
        self.watch(modules)

    def watch(self, modules: Iterable[nn.Module]) -> None:
        """Put hooks on all embedding modules within these."""
        for module in (m for top in modules for m in top.modules() if isinstance(m, TABLES)):
            if id(module) not in self._known:
                self._known.add(id(module))
                self._handles.append(module.register_forward_pre_hook(ModuleHook(self._seen), with_kwargs=True))

    def detach(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._known = [], set()
        self._ids.clear()

    def _seen(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        weight = module._parameters.get("weight")  # a parametrised one would be computed anew
        ids = args[0] if args else kwargs.get("input")
        if not isinstance(ids, Tensor) or weight is None or not weight.requires_grad or no_training_forward():
            return
        padding: Any = getattr(module, "padding_idx", None)
        if padding is not None:
            self._padding[id(weight)] = int(padding)
        lookups = self._ids.setdefault(id(weight), [])
        lookups.append(_Lookup(ids.detach(), module.training))
        if len(lookups) > MOST:  # forwards that no step came of
            del lookups[0]

    @property
    def waiting(self) -> bool:
        """Whether there are ids that nobody has taken yet."""
        return bool(self._ids)

    def padding(self, weight: Tensor) -> int | None:
        """The row that is padding, or None."""
        return self._padding.get(id(weight))

    def forget_all_but(self, owned: Sequence[Container[int]]) -> None:
        """Let go of the ids of weights that are in none of these by ``id(weight)``: no watched optimizer holds them."""
        for key in [key for key in self._ids if not any(key in mine for mine in owned)]:
            del self._ids[key]

    def take(self, weight: Tensor) -> Tensor | None:
        """(k,) ids looked up since the last call, repeats included; None where there were none."""
        lookups = self._ids.pop(id(weight), [])
        if any(lookup.training for lookup in lookups):
            lookups = [lookup for lookup in lookups if lookup.training]
        flat = [lookup.ids.reshape(-1) for lookup in lookups if lookup.ids.numel()]
        if not flat:
            return None
        return torch.cat([ids.to(flat[0].device, torch.int64) for ids in flat])


def embedding_events(event: GradientEvent, lookups: Lookups) -> Iterator[EmbeddingEvent]:
    """One event per table that was looked up, or that has a sparse gradient without any lookup that was seen.

    Costs what the touched rows cost, whatever the size of the table.
    """
    statistics = cast(Statistics, event.statistics)
    for i in _candidates(event, statistics, lookups):
        weight, gradient = event.parameters[i], event.gradients[i]
        ids = lookups.take(weight)
        if ids is None and (gradient is None or gradient.layout is not torch.sparse_coo or weight.ndim != 2):
            continue
        if is_sharded(weight):
            continue  # a row may live on another rank
        rows, counts, values = _rows(ids, statistics.gradients[i], statistics.summed[i], weight)
        norms = torch.linalg.vector_norm(values, dim=1, dtype=wide(values.dtype)) if values is not None else None
        if norms is None:
            norms = torch.zeros(rows.shape[0], device=rows.device)
        if event.scale is not None:
            unscale = 1.0 / event.scale.to(norms.device)
            norms, values = norms * unscale, None if values is None else values * unscale
        yield EmbeddingEvent(
            step=event.step,
            source=event.source,
            table=event.names[i],
            rows=rows,
            counts=counts,
            row_gradient_norms=norms,
            gradients=values,
            weight=weight.detach(),
            padding=lookups.padding(weight),
            learning_rate=event.learning_rates[i] if len(event.learning_rates) else None,
            rejected=event.rejected,
            index=i,
            training=event.training,
            elsewhere=_elsewhere(rows, gradient) if event.step % 16 == 0 else False,
        )


def on_host(tensor: Tensor) -> bool:
    """Whether asking for a tensor's values makes nobody wait."""
    return isinstance(local(tensor), np.ndarray)


def counted(ids: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """(r,) distinct ids ascending and (r,) how often each is there.

    How many there are can't be known of ids on a device without waiting for it. There r is as many as there may be, and
    places left over repeat the largest id with a count of 0.

    Args:
        ids: (k,) from 0.
        size: ids are below it.
    """
    if on_host(ids) or not ids.numel():
        rows, counts = torch.unique(ids, return_counts=True)
        return rows, counts
    ordered = ids.sort().values
    place = torch.cat([ordered.new_zeros(1), (ordered[1:] != ordered[:-1]).to(ordered.dtype).cumsum(0)])
    counts = ordered.new_zeros(min(ids.shape[0], size)).index_add_(0, place, torch.ones_like(place))
    rows = ordered[-1:].repeat(counts.shape[0]).scatter_(0, place, ordered)
    return rows, counts


def first_of_each(rows: Tensor) -> Tensor:
    """(r,) for each of ascending rows the place of the first that is the same."""
    return torch.searchsorted(rows, rows)


def some_of(rows: Tensor, counts: Tensor, most: int) -> Tensor:
    """(<= most,) rows, evenly spaced among those that were looked up."""
    if on_host(rows):
        return rows[:: -(-rows.shape[0] // most)] if rows.shape[0] > most else rows
    places = min(rows.shape[0], most)
    return rows.index_select(0, torch.arange(places, device=rows.device) * (counts > 0).sum() // places)


def _elsewhere(rows: Tensor, gradient: Tensor | None) -> Any:
    """0-d bool: whether some of 256 rows have a dense gradient without being among ``rows``, ascending."""
    if gradient is None or gradient.layout is not torch.strided or not rows.numel() or not gradient.shape[0]:
        return False
    sample = torch.arange(0, gradient.shape[0], -(-gradient.shape[0] // 256), device=gradient.device)
    own = rows[torch.searchsorted(rows, sample).clamp_max(rows.shape[0] - 1)] == sample
    return ((gradient.detach().index_select(0, sample) != 0).flatten(1).any(dim=1) & ~own).any()


def _candidates(event: GradientEvent, statistics: Statistics, lookups: Lookups) -> Iterator[int]:
    """Indices of the parameters that may have been looked up: most models have a few tables among many layers."""
    likely = sorted({*event.tables, *statistics.sparse})
    yield from likely
    if lookups.waiting:  # of a module that joined later, or of another optimizer
        yield from (i for i in range(len(event.parameters)) if i not in likely)


def _rows(
    ids: Tensor | None, gradient: Tensor | None, summed: Tensor | None, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(r,) rows and (r,) counts as of ``counted``, (r, d) gradients of the rows, or None where there is no gradient.

    Args:
        ids: (k,) as they were looked up, or None.
        gradient: of the whole table.
        summed: the same, coalesced where it is sparse.
        weight: (N, d).
    """
    if ids is None:
        assert gradient is not None
        ids = gradient._indices()[0]
    rows, counts = counted(ids.to(weight.device), weight.shape[0])
    if summed is None:
        return rows, counts, None
    if summed.layout is not torch.sparse_coo:
        return rows, counts, summed.detach().index_select(0, rows)
    have = summed.indices()[0]
    if have.shape == rows.shape and on_host(rows) and torch.equal(have, rows):
        return rows, counts, summed.values()  # nearly always: the gradient is that of these look-ups
    if have.shape[0] == 0:
        return rows, counts, weight.new_zeros((rows.shape[0], weight.shape[1]))
    at = torch.searchsorted(have, rows).clamp_max(have.shape[0] - 1)
    known = (have[at] == rows).unsqueeze(1)
    return rows, counts, torch.where(known, summed.values()[at], 0.0)
