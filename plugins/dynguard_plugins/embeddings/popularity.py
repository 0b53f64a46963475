"""``popularity``: how unevenly rows are exposed, and whether the model bends what its data says of popularity."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field

from dynguard import Finding, Section, hookimpl, validated
from dynguard_plugins.embeddings import popularity_telling
from dynguard_plugins.embeddings.popularity_telling import Exposed

if TYPE_CHECKING:
    from dynguard.events import EmbeddingEvent

SAMPLE = 65_536
LISTS = 20_000


@dataclass(slots=True)
class Table:
    """One table under watch."""

    source: str
    name: str
    exposures: Any  # (N,) int32 on the table's device
    start: Any = None  # (N,) a table of width 1 as it was at first
    weight: Any = None
    padding: int | None = None
    labels: Sequence[str] | None = None
    step: int = 0
    steps: int = 0
    told: list[str] = field(default_factory=list)
    lists: list[list[int]] = field(default_factory=list)
    lists_step: int = -1


class Popularity:
    """Counts every row's exposures, and compares what the model makes of popularity with what its data says.

    Skewed data is no finding. ``popularity_bias`` is told where a table of width 1 (item biases) *inverts* popularity:
    rows that were seen often were pushed down and rows that were seen rarely up, as happens where a log q correction
    has the wrong sign; and where recommendations, if they are given to :meth:`recommended`, are far more popular (or
    far less) than what the data itself shows. Row norms, which grow with the number of updates in most models, are
    reported and never a finding.

    Cost of a step: one ``index_add_`` of the r touched rows per table, no host read. Memory: 4 bytes a row, and one
    copy of tables of width 1.

    Args:
        labels: names of rows by table, e.g. ``{"item.weight": ["Up", "Alien"]}``.
        inverted: rank correlation of movement and exposure below ``-inverted`` is an inversion.
        lift: by how much the mean popularity of recommendations may differ from the data's, as a share of it.
        head: which share of the rows, by exposure, is the head.
        false_alarm_rate: for all tables of a run together.
        least_steps: steps in which a table was looked up before anything is said about it.
        least_rows: exposed rows that a table must have for the same.
        top: how many rows the report names.
    """

    @validated
    def __init__(
        self,
        *,
        labels: Mapping[str, Sequence[str]] | None = None,
        inverted: Annotated[float, Field(gt=0, lt=1)] = 0.5,
        lift: Annotated[float, Field(gt=0)] = 0.5,
        head: Annotated[float, Field(gt=0, lt=1)] = 0.2,
        false_alarm_rate: Annotated[float, Field(gt=0, lt=1)] = 1e-3,
        least_steps: Annotated[int, Field(ge=1)] = 100,
        least_rows: Annotated[int, Field(ge=10)] = 30,
        top: Annotated[int, Field(ge=1)] = 10,
    ) -> None:
        self.labels = dict(labels or {})
        self.inverted = inverted
        self.lift = lift
        self.head = head
        self.false_alarm_rate = false_alarm_rate
        self.least_steps = least_steps
        self.least_rows = least_rows
        self.top = top
        self._tables: dict[tuple[str, str], Table] = {}
        self._saved: dict[tuple[str, str], Mapping[str, Any]] = {}

    @hookimpl
    def on_embeddings(self, event: EmbeddingEvent) -> None:
        """Count the step's look-ups."""
        weight = event.weight
        if getattr(weight, "ndim", 0) != 2 or not hasattr(weight, "index_select"):
            return
        table = self._table(event)
        table.weight, table.step = weight, event.step
        table.steps += 1
        table.padding, table.labels = event.padding, event.labels or self.labels.get(event.table)
        table.exposures.index_add_(0, event.rows, event.counts.to(table.exposures.dtype))

    @hookimpl
    def diagnose(self) -> Iterable[Finding]:
        """What the model does with popularity, once there is enough to judge by."""
        ripe = [t for t in self._tables.values() if t.steps >= self.least_steps and t.weight is not None]
        level = 1.0 - self.false_alarm_rate / max(len(ripe), 1)
        for table in ripe:
            exposed = self._exposed(table)
            if len(exposed.rows) >= self.least_rows:
                yield from self._news(table, exposed, level)

    @hookimpl
    def summarize(self) -> Section | None:
        """Exposure of all tables, its relation to what the tables hold, and recommendations where they were given."""
        seen = [(t, self._exposed(t)) for t in self._tables.values() if t.steps and t.weight is not None]
        if not seen:
            return None
        listed = [(e, t.lists) for t, e in seen if t.lists]
        tables = [
            popularity_telling.overview([e for _, e in seen], self.head),
            popularity_telling.recommendations(listed, self.head) if listed else None,
            *(popularity_telling.most_exposed(e, t.labels, self.top) for t, e in seen),
        ]
        return Section(
            title="Popularity",
            text="Exposures count repeats within a batch. The correlation is Spearman's, of a row's norm (of its "
            "movement in tables of width 1) with its exposures. Popularity lift is the mean popularity of "
            "recommendations over that of the data, minus 1.",
            tables=tuple(t for t in tables if t is not None),
            figures=tuple(popularity_telling.lorenz(e) for _, e in seen),
        )

    def recommended(self, table: str, lists: Any, source: str = "") -> None:
        """Take note of what the model recommends, to be compared with what the table was shown.

        Calls between two steps add up; those after a later step replace them. At most 20,000 lists are kept.

        Args:
            table: name of the item table's weight, e.g. ``"item.weight"``.
            lists: (users, k) row numbers, or a list of lists of them.
            source: name of the optimizer, "" where there is one.

        Raises:
            KeyError: the table has not been looked up yet.
            ValueError: there is no such row in it.
        """
        if (source, table) not in self._tables:
            known = ", ".join(name for _, name in self._tables) or "none yet"
            raise KeyError(f"recommended(): no table {table!r} has been looked up (tables: {known})")
        kept = self._tables[source, table]
        rows = [[int(i) for i in items] for items in (lists.tolist() if hasattr(lists, "tolist") else lists)]
        size = kept.exposures.shape[0]
        if any(not 0 <= i < size for items in rows for i in items):
            raise ValueError(f"recommended(): {table!r} has rows 0 to {size - 1}, and some of the lists hold others")
        before = kept.lists if kept.lists_step == kept.steps else []
        kept.lists, kept.lists_step = [*before, *(items for items in rows if items)][-LISTS:], kept.steps

    def exposures(self, table: str, source: str = "") -> npt.NDArray[np.int64]:
        """(N,) how often each row of a table was looked up; KeyError where it has not been looked up yet."""
        found: npt.NDArray[np.int64] = self._tables[source, table].exposures.cpu().numpy().astype(np.int64)
        return found

    def state_dict(self) -> dict[str, Any]:
        """All counts; arrays are base64."""
        from dynguard_plugins.embeddings.ledger_follow import pack

        tables = [
            {
                "source": t.source, "name": t.name, "rows": t.exposures.shape[0], "exposures": pack(t.exposures),
                "start": None if t.start is None else pack(t.start), "step": t.step, "steps": t.steps,
                "told": list(t.told), "lists": [list(items) for items in t.lists], "lists_step": t.lists_step,
            }
            for t in self._tables.values()
        ]  # fmt: skip
        return {"tables": [*tables, *self._saved.values()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up ``state_dict()``; each table is matched by its name when it is next looked up."""
        self._tables = {}
        self._saved = {(saved["source"], saved["name"]): saved for saved in state["tables"]}

    def _table(self, event: EmbeddingEvent) -> Table:
        import torch

        key, weight = (event.source, event.table), event.weight
        table = self._tables.get(key)
        if table is not None and table.exposures.device == weight.device:
            if table.exposures.shape[0] >= weight.shape[0]:
                return table
            self._grow(table, weight)
            return table
        counts = torch.zeros(weight.shape[0], dtype=torch.int32, device=weight.device)
        table = self._tables[key] = Table(*key, counts)
        if weight.shape[1] == 1:
            table.start = weight[:, 0].float().clone()
        saved = self._saved.pop(key, None)
        if saved is not None and saved["rows"] == weight.shape[0]:
            _take_up(table, saved)
        return table

    def _grow(self, table: Table, weight: Any) -> None:
        import torch

        have = table.exposures.shape[0]
        more = table.exposures.new_zeros(weight.shape[0] - have)
        table.exposures = torch.cat([table.exposures, more])
        if table.start is not None:
            table.start = torch.cat([table.start, weight[have:, 0].float()])

    def _exposed(self, table: Table) -> Exposed:
        """The exposed rows on the host, a sample of them where there are many, and what is compared with exposure."""
        import torch

        counts = table.exposures.cpu().numpy().astype(np.int64)
        rows = np.flatnonzero(counts)
        rows = rows[(rows != (-1 if table.padding is None else table.padding)) & (rows < table.weight.shape[0])]
        rows = rows[:: -(-len(rows) // SAMPLE)] if len(rows) > SAMPLE else rows
        at = torch.from_numpy(rows).to(table.weight.device)
        taken = table.weight.detach().index_select(0, at).float()
        flat = taken[:, 0] - table.start.index_select(0, at) if table.start is not None else taken.norm(dim=1)
        values = flat.cpu().numpy().astype(np.float64)
        finite = np.isfinite(values)
        return Exposed(
            name=table.name, source=table.source, step=table.step, counts=counts, rows=rows[finite],
            values=values[finite], moved=table.start is not None,
        )  # fmt: skip

    def _news(self, table: Table, exposed: Exposed, level: float) -> Iterator[Finding]:
        found = [
            popularity_telling.inversion(exposed, self.inverted, level, table.labels),
            popularity_telling.lifted(exposed, table.lists, self.lift, self.head),
        ]
        for finding in found:
            if finding is None:
                continue
            which = str(finding.value("what"))
            if which not in table.told:
                table.told.append(which)
                yield finding


def _take_up(table: Table, saved: Mapping[str, Any]) -> None:
    import torch

    from dynguard_plugins.embeddings.ledger_follow import unpack

    shape, device = (saved["rows"],), table.exposures.device
    table.exposures = unpack(saved["exposures"], torch.int32, shape, device)
    if saved["start"] is not None and table.start is not None:
        table.start = unpack(saved["start"], torch.float32, shape, device)
    table.step, table.steps, table.told = saved["step"], saved["steps"], list(saved["told"])
    table.lists, table.lists_step = [list(items) for items in saved["lists"]], saved["lists_step"]
