"""How the findings on rows are worded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from dynguard import Evidence, Finding, Severity
from dynguard.findings import Prescription
from dynguard_plugins.embeddings import rows_tests as tests
from dynguard_plugins.embeddings.rows_report import label

if TYPE_CHECKING:
    from dynguard_plugins.embeddings.ledger import Columns
    from dynguard_plugins.embeddings.rows import Table

CHANCE = 3.0  # look-ups a row from which on evenly spread ones would have left 5 % of the rows unseen
NARROWEST = 2  # the direction of a single number is a sign: biases of rows that vary a lot always seem to oscillate
BLIND = 20  # look-ups without gradient from which on a row is said to get none


def findings(table: Table, columns: Columns, *, level: float, most_rows: int) -> Iterator[Finding]:
    """Everything that is to be said of one table."""
    moves = tests.moved(table.known, columns, table.weight, table.decays)
    told = [_never_seen(table, columns), _without_gradient(table, columns), _oscillating(table, columns, level)]
    if not bool(table.elsewhere):  # rows that are trained without being looked up (a tied head) may move
        told += [_zombies(table, moves, level) if table.carries else None, _decaying(table, moves), _padding(table)]
    for one in told:
        if one is not None:
            rows, finding = one
            where = {"step": table.step, "subject": table.name, "source": table.source}
            yield Finding.model_validate({"rows": [int(r) for r in rows[:most_rows]], **where, **finding})


def _some(table: Table, rows: Any) -> str:
    names = ", ".join(label(int(row), table.labels) for row in rows[:5])
    return names + (f" and {len(rows) - 5} more" if len(rows) > 5 else "")


def _evidence(**values: Any) -> tuple[Evidence, ...]:
    return tuple(Evidence(name=name, value=value) for name, value in values.items())


Told = tuple[Any, dict[str, Any]] | None


def _never_seen(table: Table, columns: Columns) -> Told:
    size = len(columns.exposures)
    cover = tests.coverage(columns.exposures, table.padding)
    if not len(cover.unseen) or cover.lookups < CHANCE * size:
        return None
    share = len(cover.unseen) / size
    loud = share > 0.1 and cover.coming < 0.1
    return cover.unseen, {
        "kind": "dead_rows",
        "severity": Severity.WARNING if loud else Severity.INFO,
        "evidence": _evidence(
            rows=len(cover.unseen), reason="never looked up", share=share, lookups=cover.lookups,
            unseen_mass=cover.unseen_mass, share_to_come=cover.coming,
        ),
        "premise": f"{len(cover.unseen)} of {size} rows were not looked up once in {table.known.steps} steps "
        f"({cover.lookups} look-ups): {_some(table, cover.unseen)}",
        "implies": f"they are as they were initialised; of them {cover.coming:.0%} are to be expected within as many "
        "look-ups again",
        "expected_effect": "rows that no data reaches can be left out, hashed together or given a fallback row",
    }  # fmt: skip


def _without_gradient(table: Table, columns: Columns) -> Told:
    blind = (columns.visits >= BLIND) & (columns.energy == 0)
    if table.padding is not None and table.padding < len(blind):
        blind[table.padding] = False
    rows = np.flatnonzero(blind)
    if not len(rows) or not (columns.energy > 0).any():
        return None  # a table that gets no gradient at all is a layer's fault, not that of rows
    return rows, {
        "kind": "dead_rows",
        "severity": Severity.WARNING,
        "evidence": _evidence(rows=len(rows), reason="no gradient", lookups=int(columns.exposures[rows].sum())),
        "premise": f"{len(rows)} rows were looked up at least {BLIND} times and never had a gradient: "
        f"{_some(table, rows)}",
        "implies": "what follows them takes no account of them (masked, detached or saturated)",
        "expected_effect": "with the mask or the saturation gone they learn",
    }


def _oscillating(table: Table, columns: Columns, level: float) -> Told:
    if table.known.width < NARROWEST:
        return None
    found = tests.oscillating(columns, table.padding, level)
    if not len(found.rows):
        return None
    return found.rows, {
        "kind": "oscillating_rows",
        "evidence": _evidence(
            rows=len(found.rows), energy_ratio=found.strength, resultant=found.detail, false_discovery_rate=found.rate,
            visits=int(np.median(columns.visits[found.rows])),
        ),
        "premise": f"the gradients of {len(found.rows)} rows are {found.strength**0.5:.1f} times those of rows seen as "
        f"often, and cancel: {_some(table, found.rows)}",
        "implies": "their targets contradict each other (noisy or duplicate ids, both labels for one pair)",
        "expected_effect": "with their examples mended or weighted down, these rows settle and stop shaking others",
        "confidence": 1 - found.rate,
    }  # fmt: skip


def _zombies(table: Table, moves: tests.Moved, level: float) -> Told:
    found = tests.zombies(moves, table.known.steps, table.padding, level)
    if not len(found.rows):
        return None
    return found.rows, {
        "kind": "zombie_rows",
        "evidence": _evidence(
            rows=len(found.rows), share_of_way=found.strength, steps_absent=found.detail, followed=len(moves.rows),
            false_discovery_rate=found.rate,
        ),
        "premise": f"{len(found.rows)} rows went {found.strength:.0%} of their way after their last look-up, "
        f"{found.detail:.0f} steps ago: {_some(table, found.rows)}",
        "implies": "the optimizer moves every row at every step by a stale momentum",
        "expected_effect": "a sparse optimizer moves only the rows that were looked up",
        "confidence": 1 - found.rate,
        "prescriptions": (
            Prescription(
                parameter="optimizer", proposed="torch.optim.SparseAdam with nn.Embedding(sparse=True)",
                why="momentum is kept and applied for touched rows only",
            ),
        ),
    }  # fmt: skip


def _decaying(table: Table, moves: tests.Moved) -> Told:
    found = tests.decaying(moves, table.padding)
    if not len(found.rows):
        return None
    loud = found.strength > 0.2
    return found.rows, {
        "kind": "decay_without_gradient",
        "severity": Severity.WARNING if loud else Severity.INFO,
        "evidence": _evidence(rows=len(found.rows), share_of_norm_lost=found.strength, followed=len(moves.rows)),
        "premise": f"{len(found.rows)} rows have lost {found.strength:.1%} of their norm since their last look-up, "
        f"straight towards 0: {_some(table, found.rows)}",
        "implies": "weight decay acts on rows whether they are looked up or not, so the rarest shrink most",
        "expected_effect": "without decay rows keep what they have learned",
        "prescriptions": (
            Prescription(
                parameter=f"weight_decay of {table.name}", proposed=0.0, why="rarely seen rows are not decayed"
            ),
        ),
    }


def _padding(table: Table) -> Told:
    if table.pad_start is None or table.padding is None:
        return None
    start = table.pad_start.double().cpu().numpy()
    now = table.weight[table.padding].detach().double().cpu().numpy()
    way, size = float(np.linalg.norm(now - start)), float(np.linalg.norm(start))
    typical = float(table.weight[:1024].detach().double().norm(dim=1).median())
    if not way > 1e-3 * max(size, typical):
        return None
    return [table.padding], {
        "kind": "pad_row_moves",
        "evidence": _evidence(rows=1, way=way, norm_at_start=size),
        "premise": f"the padding row {table.padding} has moved by {way:.3g} (its norm was {size:.3g})",
        "implies": "padding is no longer neutral: the weight is tied, written to, or decays",
        "expected_effect": "a padding row that stays put adds the same to every sequence",
    }
