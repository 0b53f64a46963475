"""``rows``: accounts for every row of every embedding table: which are dead, moved, fought over or decaying."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from dynguard import Finding, Section, hookimpl, validated

if TYPE_CHECKING:
    from dynguard.events import EmbeddingEvent, LossEvent, RunInfo
    from dynguard_plugins.embeddings.autofix import AutoFix
    from dynguard_plugins.embeddings.ledger import Columns, Ledger


log = logging.getLogger("dynguard")
runs = itertools.count()  # runs of this process: the same number on all ranks of one


@dataclass(slots=True)
class Table:
    """One table under watch; ``whole`` is what all ranks have seen of it when they were last brought together."""

    ledger: Ledger
    source: str
    name: str
    weight: Any = None
    padding: int | None = None
    pad_start: Any = None
    labels: Sequence[str] | None = None
    step: int = 0
    oscillating: int = 0
    whole: Ledger | None = None
    decays: bool = True  # unless the optimizer says that it does not
    carries: bool = True  # a momentum from step to step, likewise
    elsewhere: Any = False  # whether rows have had gradients without being looked up, 0-d

    @property
    def known(self) -> Ledger:
        """Of all ranks if they have been brought together, else of this one."""
        return self.ledger if self.whole is None else self.whole


class Rows:
    """Keeps 15 bytes for every row of an embedding table, and tells at ``diagnose`` what has become of the rows.

    Found are rows never looked up (``dead_rows``), rows that move though nothing looks them up any more
    (``zombie_rows``, ``decay_without_gradient``), rows whose gradients are strong and cancel (``oscillating_rows``) and
    a padding row that does not stay where it is (``pad_row_moves``).

    Cost of a step: for r touched rows of width d, 2 reads of their weights, one of their gradients, 5 r d
    multiplications and 15 r bytes read and written, twice; about 50 small operations and no host read. Memory: 15 bytes
    a row, and 2 d weights for each row that is followed exactly (needed for rows that move unseen): all rows of a
    table that fits into ``exact_bytes``, else as many as 1 byte a row pays for.

    Args:
        labels: names of rows by table, e.g. ``{"item.weight": ["Up", "Alien"]}``.
        false_discovery_rate: of oscillating and zombie rows among those named.
        least_steps: steps that a table is watched before anything is said about it.
        most_rows: how many rows a finding lists, and autofix holds back in a table.
        exact_bytes: a table whose rows can all be followed exactly within so much memory has them followed.
        follow: how many rows are followed exactly in a larger table.
        top: how many rows the report's tables show.
        autofix: hold back the updates of oscillating rows
            (:class:`~dynguard_plugins.embeddings.autofix.AutoFix` says which, when and by how much); each change is a
            finding ``rows_held_back``.
        floor: of autofix: least factor of a row's update.
        every: of autofix: steps between two looks at a table, at first.
        room: of autofix: least posterior that the observed losses fall at which anything is done; 0 for always.
    """

    @validated
    def __init__(
        self,
        *,
        labels: Mapping[str, Sequence[str]] | None = None,
        false_discovery_rate: Annotated[float, Field(gt=0, lt=1)] = 0.01,
        least_steps: Annotated[int, Field(ge=1)] = 100,
        most_rows: Annotated[int, Field(ge=1)] = 10_000,
        exact_bytes: Annotated[int, Field(ge=0)] = 2**18,
        follow: Annotated[int | None, Field(ge=1)] = None,
        top: Annotated[int, Field(ge=1)] = 20,
        autofix: bool = False,
        floor: Annotated[float, Field(ge=0, le=1)] = 0.05,
        every: Annotated[int, Field(ge=1)] = 200,
        room: Annotated[float, Field(ge=0, le=1)] = 0.01,
    ) -> None:
        self.labels = dict(labels or {})
        self.false_discovery_rate = false_discovery_rate
        self.least_steps = least_steps
        self.most_rows = most_rows
        self.exact_bytes = exact_bytes
        self.follow = follow
        self.top = top
        self._tables: dict[tuple[str, str], Table] = {}
        self._told: dict[tuple[str, ...], list[int]] = {}
        self._saved: dict[tuple[str, str], Mapping[str, Any]] = {}
        self._ranks, self._rank, self._run, self._key = 1, 0, 0, ""
        self._mislabelled: set[str] = set()
        self._fix: AutoFix | None = None
        if autofix:
            from dynguard_plugins.embeddings.autofix import AutoFix

            self._fix = AutoFix(level=false_discovery_rate, floor=floor, every=every, room=room, most=most_rows)

    @hookimpl
    def on_run_start(self, run: RunInfo) -> None:
        """Take note of how many processes train."""
        self._ranks, self._rank, self._run = run.ranks, run.rank, next(runs)
        if self._fix is not None:
            self._fix.start(run.world_size)

    @hookimpl
    def on_loss(self, event: LossEvent) -> None:
        """Take the loss down for the auto-fix, which sleeps when it no longer falls."""
        if self._fix is not None:
            self._fix.note_loss(event.loss)

    @hookimpl
    def on_embeddings(self, event: EmbeddingEvent) -> None:
        """Enter the step into the table's ledger."""
        if getattr(event.weight, "ndim", 0) != 2 or not hasattr(event.weight, "index_select"):
            return
        table = self._table(event)
        table.weight, table.step = event.weight, event.step
        table.decays, table.carries = _habits(event)
        if event.elsewhere is not False:
            table.elsewhere = event.elsewhere | table.elsewhere
        table.labels = event.labels or self.labels.get(event.table)
        rejected = event.rejected
        ok = rejected.logical_not() if hasattr(rejected, "logical_not") else not rejected
        table.ledger.see(event.step, event.rows, event.counts, event.gradients, event.weight, ok)

    @hookimpl
    def adjust_embeddings(self, event: EmbeddingEvent) -> None:
        """Hold back the updates of rows that oscillate, if asked to."""
        table = self._tables.get((event.source, event.table))
        if self._fix is None or table is None or event.training is None:
            return
        held = self._fix.repair(table, event)
        if held is not None:
            event.training.scale_rows(event.index, *held)

    @hookimpl
    def diagnose(self) -> Iterable[Finding]:
        """What the ledgers show of each table that has been watched for long enough."""
        from dynguard_plugins.embeddings import rows_telling

        self._bring_together()
        self._check_labels()
        for table in self._tables.values():
            ledger = table.ledger if self._ranks == 1 else table.whole
            if ledger is None or ledger.steps < self.least_steps or table.weight is None:
                continue
            columns = ledger.columns()
            found = rows_telling.findings(table, columns, level=self.false_discovery_rate, most_rows=self.most_rows)
            yield from self._news(table, found)
        if self._fix is not None:
            yield from self._fix.findings(self._labels())

    @hookimpl
    def summarize(self) -> Section | None:
        """Exposure of all tables, and the rows that move most for how often they are seen."""
        from dynguard import Table as Shown
        from dynguard_plugins.embeddings import rows_report

        tables = [table for table in self._tables.values() if table.ledger.steps > 0]
        if not tables:
            return None
        shown, figures, first = [], [], []
        for table in tables:
            ledger = table.known
            columns = ledger.columns()
            first.append(rows_report.overview(table.name, columns, ledger.steps, table.oscillating))
            shown.append(rows_report.fastest(table.name, columns, table.labels, self.top))
            figures += [rows_report.lorenz(table.name, columns.exposures), rows_report.speeds(table.name, columns)]
        whole = Shown(columns=rows_report.OVERVIEW, rows=tuple(first))
        if self._fix is not None:
            shown += self._fix.shown(self._labels(), self.top)
        return Section(
            title="Embedding rows",
            text="Look-ups count repeats within a batch. Velocity is the length of a row's way in the step of a visit.",
            tables=(whole, *(t for t in shown if t is not None)),
            figures=tuple(f for f in figures if f is not None),
        )

    def ledger(self, table: str, source: str = "") -> Ledger:
        """The ledger of a table, for other tools; KeyError where it has not been looked up yet.

        Where several ranks train one model it is that of all together as of the last ``diagnose``, if there was one.
        """
        return self._tables[source, table].known

    def columns(self, table: str, source: str = "") -> Columns:
        """A table's ledger as numpy arrays, one entry a row."""
        return self.ledger(table, source).columns()

    def state_dict(self) -> dict[str, Any]:
        """All ledgers as numbers and strings."""
        tables = [
            {
                "source": t.source, "name": t.name, "padding": t.padding, "step": t.step,
                "ledger": t.ledger.state_dict(),
                "pad_start": None if t.pad_start is None else t.pad_start.double().tolist(),
            }
            for t in self._tables.values()
        ]  # fmt: skip
        return {
            "tables": [*tables, *self._saved.values()],
            "told": [[list(key), rows] for key, rows in self._told.items()],
            "autofix": None if self._fix is None else self._fix.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up ``state_dict()``; each table is matched by its name when it is next looked up."""
        self._tables = {}
        self._saved = {(saved["source"], saved["name"]): saved for saved in state["tables"]}
        self._told = {tuple(key): list(rows) for key, rows in state["told"]}
        if self._fix is not None and state.get("autofix") is not None:
            self._fix.load_state_dict(state["autofix"])

    def _check_labels(self) -> None:
        """Say once which labels are of no table that was looked up, or too few for theirs."""
        sizes = {table.name: len(table.ledger) for table in self._tables.values()}
        for name, given in self.labels.items() if sizes else ():
            if name in self._mislabelled or len(given) >= sizes.get(name, math.inf):
                continue
            self._mislabelled.add(name)
            if name in sizes:
                log.warning("rows: %d labels for the %d rows of %r", len(given), sizes[name], name)
            else:
                log.warning("rows: labels for %r, which was not looked up: there are %s", name, sorted(sizes))

    def _bring_together(self) -> None:
        """Add up what all ranks have seen. One that does not come costs the others a few seconds, once."""
        if self._ranks < 2 or not self._tables:
            return
        from dynguard.torch.sharing import exchange
        from dynguard_plugins.embeddings.ledger import Ledger

        names = {"/".join(key): table for key, table in self._tables.items()}
        key, before = f"rows/{self._run}/{max(t.step for t in names.values())}", self._key
        mine = {name: table.ledger.state_dict() for name, table in names.items()}
        self._key = key
        parts = exchange(key, mine, replaces=before or None)
        if parts is None:
            self._ranks = -1  # not tried again, and nothing is said of rows that only others may have seen
            log.warning("rows: the ledgers of all ranks could not be brought together: nothing more is said of rows")
            return
        for name, table in names.items():
            table.whole = Ledger.from_state(mine[name], table.ledger.device)
            for rank, part in enumerate(parts):
                if rank != self._rank and name in part:
                    table.whole.merge(Ledger.from_state(part[name], table.ledger.device))

    def _labels(self) -> dict[tuple[str, str], Sequence[str] | None]:
        return {key: table.labels for key, table in self._tables.items()}

    def _table(self, event: EmbeddingEvent) -> Table:
        from dynguard_plugins.embeddings.ledger import Ledger

        key = event.source, event.table
        table, weight = self._tables.get(key), event.weight
        fits = table is not None and table.ledger.width == weight.shape[1] and len(table.ledger) <= weight.shape[0]
        if table is None or not fits or table.ledger.device != weight.device:
            table = Table(Ledger(weight, exact_bytes=self.exact_bytes, follow=self.follow), event.source, event.table)
            saved = self._saved.pop(key, None)
            if saved is not None and (saved["ledger"]["width"], saved["ledger"]["rows"]) == (
                weight.shape[1], weight.shape[0]
            ):  # fmt: skip
                _take_up(table, saved, weight)
            elif self._fix is not None and (saved is not None or key in self._tables):
                self._fix.repairs.pop(key, None)  # of another table by that name
            self._tables[key] = table
        if event.padding is not None and table.pad_start is None and 0 <= event.padding < weight.shape[0]:
            table.padding, table.pad_start = event.padding, weight[event.padding].clone()
        return table

    def _news(self, table: Table, found: Iterable[Finding]) -> Iterator[Finding]:
        """Those that say something new: the first of their kind, or one of whose rows a twentieth was not told last."""
        for finding in found:
            count = int(finding.value("rows") or 0)
            if finding.kind == "oscillating_rows":
                table.oscillating = count
            reason = str(finding.value("reason")) if finding.kind == "dead_rows" else ""
            key = (table.source, table.name, finding.kind, reason)
            told = self._told.get(key)
            if told is None or len(set(told).symmetric_difference(finding.rows)) > 0.05 * len(told):
                self._told[key] = list(finding.rows)
                yield finding


def _habits(event: EmbeddingEvent) -> tuple[bool, bool]:
    """Whether the table's optimizer decays weights, and whether it carries a momentum; True where that is not known."""
    training = event.training
    if training is None or getattr(training, "optimizer", None) is None:
        return True, True
    group = training.optimizer.param_groups[training.groups[event.index]]
    known = {name: value for name, value in group.items() if isinstance(value, int | float)}
    momentum = "betas" in group or "beta" in group or known.get("momentum", 0.0 if "lr_decay" in group else 1.0) != 0
    return known.get("weight_decay", 1.0) > 0, momentum


def _take_up(table: Table, saved: Mapping[str, Any], weight: Any) -> None:
    from dynguard_plugins.embeddings.ledger import Ledger

    table.ledger = Ledger.from_state(saved["ledger"], weight.device)
    if saved["pad_start"] is not None:
        table.padding, table.pad_start = saved["padding"], weight.new_tensor(saved["pad_start"])
