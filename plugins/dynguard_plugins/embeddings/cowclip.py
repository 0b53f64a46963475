"""``cowclip``: clips the gradient of each looked-up row by how often it was looked up and how long it is."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from dynguard import Section, hookimpl, validated
from dynguard import Table as Shown
from dynguard_plugins.rounding import short

if TYPE_CHECKING:
    from dynguard.events import EmbeddingEvent, RunInfo

log = logging.getLogger("dynguard")

BINS, PER_OCTAVE = 256, 8  # of factors below 1: down to 2^-32 in steps of 9 %
COLUMNS = ("table", "steps", "rows looked up", "clipped", "share", "median factor of clipped")


@dataclass(slots=True)
class Clipped:
    """Of one table: steps, rows looked up, and (256,) how many of them were clipped by which factor, on its device."""

    steps: int = 0
    rows: Any = 0
    factors: Any = None


class CowClip:
    """Adaptive column-wise clipping of embedding gradients, for training with large batches.

    Zheng et al. 2022, "CowClip: Reducing CTR Prediction Model Training Time from 12 hours to 10 minutes on 1 GPU",
    arXiv 2204.06240, algorithm 1: the gradient of a row that was looked up c times in the batch (repeats counted, as
    the authors' code does, of every field and sample) is shortened to at most ``c max(r |w|, zeta)``.

    What else the paper asks for is left to the user: the learning rate of embeddings stays what it was at the small
    batch, their L2 weight grows in proportion to the batch, that of the dense layers grows with its square root and
    warms up, and embeddings start larger (standard deviation 1e-2). The optimizer's own weight decay comes after the
    clip; a penalty that is part of the loss is clipped with it.

    The authors' code takes ``r sqrt(d) zeta`` for zeta, d being the width, and leaves first-order weights (tables of
    one column) alone; so does this by default, for the latter. For a mean over the batch gradients shrink as the batch
    grows and thresholds do not: the report says how often the clip has acted at all.

    Acts before ``adjust_gradients``. Over several processes counts of one are not those of the batch, and replicas
    would drift apart: nothing is clipped there, which is said once. Cost of a step: a read of the looked-up rows and
    one pass over their gradients; nothing is read from the device.

    Args:
        r: share of the row's norm that a look-up may bring.
        zeta: least norm that a look-up may always bring.
        tables: patterns of names of tables to clip, e.g. ``["user.*"]``; by default all of at least two columns.
    """

    @validated
    def __init__(
        self,
        *,
        r: Annotated[float, Field(gt=0)] = 1.0,
        zeta: Annotated[float, Field(ge=0)] = 1e-5,
        tables: tuple[str, ...] | None = None,
    ) -> None:
        self.r, self.zeta, self.tables = r, zeta, tables
        self._alone = True
        self._clipped: dict[tuple[str, str], Clipped] = {}

    @hookimpl
    def on_run_start(self, run: RunInfo) -> None:
        """Take note of how many processes train."""
        self._alone = run.world_size == 1
        if not self._alone:
            log.warning("cowclip stands aside: each of %d processes counts its own look-ups only", run.world_size)

    @hookimpl
    def adjust_embeddings(self, event: EmbeddingEvent) -> None:
        """Shorten the gradients of the rows that exceed their threshold."""
        if event.training is None or event.gradients is None or not self._alone or not self._chosen(event):
            return
        factors = self._factors(event)
        event.training.scale_row_gradients(event.index, event.rows, factors)
        self._note((event.source, event.table), factors, event.counts > 0)

    def _chosen(self, event: EmbeddingEvent) -> bool:
        weight = event.weight
        if getattr(weight, "ndim", 0) != 2 or not hasattr(weight, "index_select"):
            return False
        if self.tables is None:
            return bool(weight.shape[1] > 1)
        return any(fnmatchcase(event.table, pattern) for pattern in self.tables)

    def _factors(self, event: EmbeddingEvent) -> Any:
        """(r,) min(1, threshold / norm); 1 where the norm is not finite, which no factor mends."""
        import torch

        norms = event.row_gradient_norms
        sizes = torch.linalg.vector_norm(event.weight.index_select(0, event.rows), dim=1, dtype=norms.dtype)
        limits = event.counts * (self.r * sizes).clamp_min(self.zeta)
        over = torch.isfinite(norms) & (norms > limits) & (event.counts > 0)
        return torch.where(over, limits / norms, 1.0)

    def _note(self, key: tuple[str, str], factors: Any, looked_up: Any) -> None:
        import torch

        told = self._clipped.setdefault(key, Clipped())
        told.steps += 1
        if told.factors is None or told.factors.device != factors.device:
            old = [0] * BINS if told.factors is None else told.factors
            told.factors = torch.as_tensor(old, dtype=torch.int64, device=factors.device)
            told.rows = int(told.rows)
        told.rows = told.rows + looked_up.sum()
        bins = (-PER_OCTAVE * factors.log2()).clamp(0, BINS - 1).long()
        told.factors.index_add_(0, bins, (factors < 1).long())

    @hookimpl
    def summarize(self) -> Section | None:
        """How many rows were clipped, and by how much."""
        if not self._clipped:
            return None
        rows = tuple(_line(table, told) for (_, table), told in self._clipped.items())
        return Section(
            title="CowClip",
            text=f"Rows are clipped to look-ups x max({self.r:g} |w|, {self.zeta:g}).",
            tables=(Shown(columns=COLUMNS, rows=rows),),
        )

    def state_dict(self) -> dict[str, Any]:
        """The counters of all tables."""
        return {
            "tables": [
                [*key, told.steps, int(told.rows), told.factors.tolist()] for key, told in self._clipped.items()
            ]
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up ``state_dict()``."""
        import torch

        self._clipped = {
            (source, table): Clipped(steps, rows, torch.tensor(factors))
            for source, table, steps, rows, factors in state["tables"]
        }


def _line(table: str, told: Clipped) -> tuple[Any, ...]:
    counts, rows = told.factors.tolist(), int(told.rows)
    clipped, below, median = sum(counts), 0, None
    for i, count in enumerate(counts):  # from the mildest factor on
        below += count
        if clipped and 2 * below >= clipped:
            median = short(2.0 ** (-(i + 0.5) / PER_OCTAVE))
            break
    return (table, told.steps, rows, clipped, short(clipped / max(rows, 1)), median)
