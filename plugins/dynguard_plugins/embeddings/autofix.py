"""The auto-fix of oscillating rows: holds back the updates of rows whose gradients are strong and cancel."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from dynguard import Evidence, Finding, Severity
from dynguard import Table as Shown
from dynguard_plugins.embeddings.rows_report import label
from dynguard_plugins.embeddings.rows_telling import NARROWEST
from dynguard_plugins.rounding import short

if TYPE_CHECKING:
    from dynguard.events import EmbeddingEvent
    from dynguard_plugins.embeddings.rows import Table

log = logging.getLogger("dynguard")

PACE = 50  # rows to test for each step between two looks
NOTED = 0.02  # a factor that changes by less is the same
OVERVIEW = ("table", "looked at in step", "rows held back", "smallest factor", "room", "state")
ROWS = ("row", "factor", "posterior")


@dataclass(slots=True)
class Repair:
    """What is being done to one table."""

    last: int  # step in which it was looked at, or first seen
    looks: int = 0
    rows: list[int] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)
    posterior: list[float] = field(default_factory=list)
    due: int = 0  # steps from the last look to the next
    room: float | None = None
    tensors: tuple[Any, Any] | None = None  # rows and factors on the table's device

    def record(self) -> dict[str, Any]:
        """As plain numbers."""
        names = ("last", "looks", "due", "room")
        lists = {name: list(getattr(self, name)) for name in ("rows", "factors", "posterior")}
        return {name: getattr(self, name) for name in names} | lists


class Losses:
    """The newest losses, kept where they were made: taking one down reads nothing from a device."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.count = 0
        self._ring: Any = None

    def note(self, loss: Any) -> None:
        """Take down a 0-d loss."""
        ring, device = self._ring, getattr(loss, "device", None)
        if ring is None or (device is not None and device != ring.device):
            kept = self.values()
            ring = loss.new_zeros(self.window) if hasattr(loss, "new_zeros") else np.zeros(self.window)
            for i, value in enumerate(kept):
                ring[(self.count - len(kept) + i) % self.window] = float(value)
            self._ring = ring
        ring[self.count % self.window] = loss
        self.count += 1

    def values(self) -> Any:
        """The losses on the host, oldest first."""
        if self._ring is None:
            return np.zeros(0)
        ring = self._ring.tolist()
        return np.array([ring[i % self.window] for i in range(max(0, self.count - self.window), self.count)])


class AutoFix:
    """Multiplies the update of every row that oscillates by its empirical-Bayes share of signal; all others stay.

    Which rows: those that the oscillation test picks among all at its false discovery rate. By how much:
    :func:`~dynguard_plugins.embeddings.autofix_posterior.shares`. It is the applied update that is multiplied, in
    every step in which the table is looked up, whether the row itself is or not: an optimizer with momentum moves a row
    mostly after its visit. (Adaptive optimizers undo a factor on gradients.) A row that is held back though it has
    something to learn shows it: its gradients then point one way, and the next look lets it go.

    A table is looked at anew, which reads its ledger from the device, every ``every`` steps, later after a tenth of the
    steps so far, and less often the more rows there are to test (3 microseconds each, for at most some 0.15 ms a step).
    It is left alone while it sleeps: when the posterior that the run's newest observed losses fall is below ``room``.
    Where no losses are observed, the posterior is that the gradients of the table's rows add up more often than
    independent ones would. On a plateau the posterior takes any value with equal chance, and rows that oscillate cost
    most there: so by default it sleeps only when the loss all but certainly rises.

    Several processes that train one model have each seen other rows, and would let their replicas drift apart: nothing
    is changed there, which is said once.

    Cost of a step: a copy of the rows held back before the update, and one pass over them after it.

    Args:
        level: false discovery rate of the rows that are held back.
        floor: least factor.
        every: steps between two looks, at first.
        window: how many losses say whether there is room.
        room: least posterior at which anything is done; 0 for always.
        most: how many rows of a table are held back at most.
    """

    def __init__(
        self, *, level: float = 0.01, floor: float = 0.05, every: int = 200, window: int = 200, room: float = 0.01,
        most: int = 10_000,
    ) -> None:  # fmt: skip
        self.level, self.floor, self.every, self.room, self.most = level, floor, every, room, most
        self.losses = Losses(window)
        self.alone = True
        self.repairs: dict[tuple[str, str], Repair] = {}
        self._news: list[tuple[tuple[str, str], dict[str, Any]]] = []

    def start(self, world_size: int) -> None:
        """Take note of how many processes there are."""
        self.alone = world_size == 1
        if not self.alone:
            log.warning("rows: autofix stands aside, as each of %d processes sees other rows", world_size)

    def note_loss(self, loss: Any) -> None:
        """Take down an observed 0-d loss; no host read."""
        if loss is not None and self.alone:
            self.losses.note(loss)

    def repair(self, table: Table, event: EmbeddingEvent) -> tuple[Any, Any] | None:
        """(k,) rows ascending and (k,) factors of the coming update, on the table's device, or None.

        Args:
            table: the table with its ledger.
            event: of this step.
        """
        if not self.alone or table.ledger.width < NARROWEST:
            return None
        key = event.source, event.table
        repair = self.repairs.setdefault(key, Repair(event.step))
        if not 0 <= event.step - repair.last < max(self.every, repair.due):
            self._look(key, repair, table, event)
        if not repair.rows or repair.rows[-1] >= event.weight.shape[0]:
            return None
        return _placed(repair, event.weight)

    def _look(self, key: tuple[str, str], repair: Repair, table: Table, event: EmbeddingEvent) -> None:
        from dynguard_plugins.embeddings import autofix_posterior as posterior
        from dynguard_plugins.embeddings.rows_tests import LEAST_VISITS

        columns = table.ledger.columns()
        repair.last, repair.looks = event.step, repair.looks + 1
        tested = int((columns.visits >= LEAST_VISITS).sum())
        repair.due = max(table.ledger.steps // 10, tested // PACE, len(columns.visits) // (100 * PACE))
        room = posterior.improving(self.losses.values())
        repair.room = posterior.adding_up(columns) if room is None else room
        found = posterior.NONE
        if repair.room is not None and repair.room >= self.room:
            found = posterior.shares(columns, table.padding, level=self.level, floor=self.floor, most=self.most)
        before = dict(zip(repair.rows, repair.factors, strict=True))
        now = dict(zip(found.rows.tolist(), found.factors.tolist(), strict=True))
        if _same(before, now):
            return
        repair.rows, repair.factors = list(now), list(now.values())
        repair.posterior, repair.tensors = found.posterior.tolist(), None
        self._news.append((key, repair.record()))

    def findings(self, labels: Mapping[tuple[str, str], Any]) -> Iterator[Finding]:
        """One finding for every look that changed something since the last call.

        Args:
            labels: names of rows by (source, table).
        """
        news, self._news = self._news, []
        for (source, table), record in news:
            yield _finding(source, table, record, labels.get((source, table)))

    def shown(self, labels: Mapping[tuple[str, str], Any], top: int) -> Iterator[Shown]:
        """What is being done now: a line a table, and the rows of each, smallest factor first."""
        looked = {key: repair for key, repair in self.repairs.items() if repair.looks}
        if looked:
            yield Shown(
                title="Rows held back", columns=OVERVIEW,
                rows=tuple(_line(table, repair, self.room) for (_, table), repair in looked.items()),
            )  # fmt: skip
        for key, repair in looked.items():
            if repair.rows:
                order = sorted(range(len(repair.rows)), key=repair.factors.__getitem__)[:top]
                rows = tuple(
                    (label(repair.rows[i], labels.get(key)), short(repair.factors[i]), short(repair.posterior[i]))
                    for i in order
                )
                yield Shown(title=f"Rows of {key[1]} held back", columns=ROWS, rows=rows)

    def state_dict(self) -> dict[str, Any]:
        """Rows, factors, posteriors, what is still to be told, and the newest losses."""
        return {
            "losses": self.losses.values().tolist(),
            "repairs": [[*key, repair.record()] for key, repair in self.repairs.items()],
            "news": [[*key, record] for key, record in self._news],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up ``state_dict()``."""
        self.losses = Losses(self.losses.window)
        for loss in state["losses"]:
            self.losses.note(loss)
        self.repairs = {(source, table): Repair(**record) for source, table, record in state["repairs"]}
        self._news = [((source, table), record) for source, table, record in state["news"]]


def _placed(repair: Repair, weight: Any) -> tuple[Any, Any]:
    import torch

    if repair.tensors is None or repair.tensors[0].device != weight.device:
        rows = torch.tensor(repair.rows, device=weight.device)
        repair.tensors = rows, torch.tensor(repair.factors, dtype=torch.float32, device=weight.device)
    return repair.tensors


def _same(before: Mapping[int, float], now: Mapping[int, float]) -> bool:
    return before.keys() == now.keys() and all(abs(before[row] - now[row]) < NOTED for row in now)


def _line(table: str, repair: Repair, room: float) -> tuple[Any, ...]:
    awake = repair.room is not None and repair.room >= room
    smallest = short(min(repair.factors, default=None))
    return (table, repair.last, len(repair.rows), smallest, short(repair.room), "awake" if awake else "asleep")


def _finding(source: str, table: str, record: Mapping[str, Any], names: Any) -> Finding:
    rows, factors, posterior = record["rows"], record["factors"], record["posterior"]
    some = ", ".join(f"{label(row, names)} x {factor:.2g}" for row, factor in list(zip(rows, factors, strict=True))[:5])
    more = f" and {len(rows) - 5} more" if len(rows) > 5 else ""
    numbers = {
        "rows": len(rows), "smallest_factor": min(factors, default=None), "largest_factor": max(factors, default=None),
        "smallest_posterior": min(posterior, default=None), "posterior_of_room": record["room"],
    }  # fmt: skip
    return Finding(
        kind="rows_held_back", severity=Severity.INFO, step=record["last"], subject=table, source=source,
        rows=tuple(rows),
        evidence=tuple(
            Evidence(name=name, value=value if isinstance(value, int) else short(value))
            for name, value in numbers.items()
        ),
        premise=f"the updates of {len(rows)} oscillating rows are shortened: {some}{more}" if rows
        else "no row's update is shortened any more",
        implies="what they are taught contradicts itself, so most of their way is noise" if rows
        else "no row stands out as oscillating, or the loss no longer falls",
        expected_effect="they come to rest where their examples balance; all other rows learn as before" if rows
        else "all rows learn as the optimizer has it",
        # The expected share of these rows that do oscillate.
        confidence=float(np.mean(posterior)) if posterior else None,
    )  # fmt: skip
