"""Collapse of embedding tables: effective rank and distances of a fixed sample of exposed rows, over time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dynguard import Action, Evidence, Finding, Severity
from dynguard.torch.embeddings import some_of

if TYPE_CHECKING:
    from dynguard.events import EmbeddingEvent

ROWS, COLUMNS = 1024, 256
ENOUGH, GATHERED = 512, 8  # rows, or look-ups of the table, after which the sample is complete
KEPT = 200
NAMES = ("rank", "abundance", "distance", "norm", "apart")
LEAST_RANK = 2.0


def measure(rows: Tensor) -> Tensor:
    """RankMe, information abundance, RMS distance of pairs, RMS norm, and how much of the squared norm is not shared.

    Args:
        rows: (n, d); of more than 256 columns, evenly spaced ones are taken.

    Returns:
        (5,) in the order of ``NAMES``, on the device; NaN where an entry is not finite or all are 0.
    """
    wide = torch.float32 if rows.device.type == "mps" else torch.float64
    x = rows[:, :: -(-rows.shape[1] // COLUMNS)].to(wide)
    good = x.isfinite().all() & (x != 0).any()
    x = x.nan_to_num(0.0, 0.0, 0.0)
    x = x / (unit := x.abs().amax().clamp_min(1e-300 if wide == torch.float64 else 1e-30))
    gram = x.T @ x if x.shape[1] <= x.shape[0] else x @ x.T
    values = torch.linalg.eigvalsh(gram).clamp_min(0).sqrt()
    shares = values / values.sum() + 1e-7
    variance = (x - x.mean(0)).square().sum(1).mean()
    square = x.square().sum(1).mean()
    found = torch.stack([
        torch.exp(-(shares * shares.log()).sum()), values.sum() / values.amax(), (2 * variance).sqrt() * unit,
        square.sqrt() * unit, variance / square,
    ])  # fmt: skip
    return torch.where(good, found, torch.nan)


@dataclass(slots=True)
class Watched:
    """One table."""

    source: str
    name: str
    rows: Tensor | None = None  # (r,) the sample
    first: Tensor | None = None  # its weights as they were when first looked up, until the sample is complete
    events: int = 0
    samples: list[tuple[int, Any]] = field(default_factory=list)  # (step, (5,)), the first of the rows as they began
    weight: Any = None
    step: int = 0
    told: bool = False
    shape: tuple[int, ...] = ()

    def read(self) -> list[tuple[int, list[float]]]:
        """The finite samples as numbers. Reads the device once for each that is new."""
        self.samples = [(s, v.tolist() if isinstance(v, Tensor) else v) for s, v in self.samples]
        return [(s, v) for s, v in self.samples if np.isfinite(v).all()]


class Tables:
    """All tables of a run.

    Args:
        every: steps between two measurements.
        share: a collapsed table has less than this share of its first rank (both less 1).
    """

    def __init__(self, every: int, share: float) -> None:
        self.every = every
        self.share = share
        self.tables: dict[tuple[str, str], Watched] = {}
        self._saved: dict[tuple[str, str], Mapping[str, Any]] = {}

    def see(self, event: EmbeddingEvent) -> None:
        """Gather the sample in a table's first steps, and measure it when due."""
        weight = event.weight
        if getattr(weight, "ndim", 0) != 2 or not isinstance(weight, Tensor) or weight.shape[1] < 2:
            return
        watched = self._of(event)
        watched.weight, watched.step = weight, event.step
        if watched.rows is None or watched.first is not None:
            _gather(watched, event)
        elif event.step - watched.samples[-1][0] >= self.every:
            self._take(watched, event.step)

    def findings(self) -> Iterator[Finding]:
        """Tables whose last two measurements both show a collapse, the present being one."""
        for watched in self.tables.values():
            if watched.told or watched.weight is None or watched.first is not None or watched.rows is None:
                continue
            if watched.step > watched.samples[-1][0]:
                self._take(watched, watched.step)
            samples = watched.read()
            if len(samples) >= 3 and all(self._collapsed(samples[0][1], v) for _, v in samples[-2:]):
                watched.told = True
                yield _tell(watched, samples)

    def _collapsed(self, first: list[float], now: list[float]) -> bool:
        """Rank lost *and* rows drawn together: a table that learns a low-rank truth keeps its distances."""
        if first[0] < LEAST_RANK:
            return False
        together = now[2] < 0.25 * first[2] or now[4] < 0.1 * first[4]
        return together and now[0] - 1 < self.share * (first[0] - 1)

    def _take(self, watched: Watched, step: int) -> None:
        assert watched.rows is not None
        with torch.no_grad():
            watched.samples.append((step, measure(watched.weight.index_select(0, watched.rows))))
        if len(watched.samples) > KEPT:  # every second one, never the first nor the newest two
            watched.samples = [*watched.samples[:-2:2], *watched.samples[-2:]]

    def _of(self, event: EmbeddingEvent) -> Watched:
        key = event.source, event.table
        watched = self.tables.get(key)
        if watched is None:
            watched = self.tables[key] = Watched(*key)
            saved = self._saved.pop(key, None)
            if saved is not None:
                _take_up(watched, saved, event.weight)
        moved = watched.rows is not None and watched.rows.device != event.weight.device
        shape = tuple(event.weight.shape)
        if moved or (watched.shape and (shape[1] != watched.shape[1] or shape[0] < watched.shape[0])):
            self.tables[key] = watched = Watched(*key)
        watched.shape = shape
        return watched

    def state_dict(self) -> list[Any]:
        """As plain numbers."""
        saved = []
        for t in self.tables.values():
            t.read()
            saved.append({
                "source": t.source, "name": t.name, "rows": None if t.rows is None else t.rows.tolist(),
                "first": None if t.first is None else t.first.double().tolist(), "events": t.events, "step": t.step,
                "samples": [[s, v] for s, v in t.samples], "told": t.told,
            })  # fmt: skip
        return [*saved, *self._saved.values()]

    def load_state_dict(self, state: list[Any]) -> None:
        """Take up ``state_dict()``; a table is matched by its name when it is next looked up."""
        self.tables = {}
        self._saved = {(saved["source"], saved["name"]): saved for saved in state}


def _gather(watched: Watched, event: EmbeddingEvent) -> None:
    """Add rows as they are before their update; measure them once there are enough, which is the start."""
    rows = some_of(event.rows.to(event.weight.device), event.counts, ROWS)
    first = event.weight.index_select(0, rows)
    watched.events += 1
    if watched.rows is not None and watched.first is not None:
        rows, first = torch.cat([watched.rows, rows])[:ROWS], torch.cat([watched.first, first])[:ROWS]
    watched.rows, watched.first = rows, first
    if rows.shape[0] >= ENOUGH or (watched.events >= GATHERED and rows.shape[0] > 1):
        watched.samples = [(event.step, measure(first))]
        watched.first = None


def _take_up(watched: Watched, saved: Mapping[str, Any], weight: Tensor) -> None:
    rows = saved["rows"]
    if rows is None or (rows and max(rows) >= weight.shape[0]):
        return
    watched.rows = torch.tensor(rows, dtype=torch.int64, device=weight.device)
    if saved["first"] is not None:
        watched.first = torch.tensor(saved["first"], dtype=weight.dtype, device=weight.device)
        watched.first = watched.first.reshape(len(rows), weight.shape[1])
    watched.samples = [(step, values) for step, values in saved["samples"]]
    watched.events, watched.step, watched.told = saved["events"], saved["step"], saved["told"]


def _tell(watched: Watched, samples: list[tuple[int, list[float]]]) -> Finding:
    (begun, first), (_, now) = samples[0], samples[-1]
    return Finding(
        kind="embedding_collapse",
        severity=Severity.WARNING,
        step=watched.step,
        subject=watched.name,
        source=watched.source,
        action=Action.WARN,
        premise=f"the effective rank of {watched.name} has fallen from {first[0]:.1f} (step {begun}) to {now[0]:.1f}, "
        f"and the distance between its rows to {now[2] / first[2] if first[2] else 0:.1%} of what it was",
        implies="its rows have become all but one vector: what is looked up no longer tells rows apart",
        expected_effect="a loss that pushes rows apart (negatives, a uniformity or variance term), or a lower learning "
        "rate, keeps them distinct",
        evidence=(
            *(Evidence(name=name, value=value) for name, value in zip(NAMES, now, strict=True)),
            *(Evidence(name=f"{name}_at_start", value=value) for name, value in zip(NAMES, first, strict=True)),
            Evidence(name="sampled_rows", value=0 if watched.rows is None else len(watched.rows)),
        ),
    )
