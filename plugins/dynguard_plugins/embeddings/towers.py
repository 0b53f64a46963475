"""``towers``: do the parts of a model learn together? Velocity, drift and gradients by tower, and their correlation."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field

from dynguard import Action, Evidence, Finding, Section, Severity, Table, hookimpl, validated
from dynguard.findings import Figure
from dynguard_plugins.rounding import short

if TYPE_CHECKING:
    from dynguard.events import EmbeddingEvent, GradientEvent
    from dynguard_plugins.embeddings.towers_sample import Taken

Array = npt.NDArray[np.float64]
PARTNERS = (
    ("user", "item"), ("query", "document"), ("query", "doc"), ("query", "passage"), ("query", "candidate"),
    ("question", "context"), ("text", "image"), ("text", "vision"), ("text", "visual"), ("text", "audio"),
    ("left", "right"), ("source", "target"), ("member", "job"), ("customer", "product"),
)  # fmt: skip
NAMES = ("velocity", "gradient norm", "drift")
KEPT = 400
LEAST_CORRELATED = 8


@dataclass(slots=True)
class Watched:
    """One source."""

    groups: dict[str, list[int]] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    towers: tuple[str, ...] = ()
    samples: list[tuple[int, Any]] = field(default_factory=list)  # (step, (3, towers))
    told: list[str] = field(default_factory=list)
    taken: Taken | None = None
    pending: bool = False

    def read(self) -> tuple[Array, Array]:
        """(k,) steps and (k, 3, towers) samples as numbers."""
        self.samples = [(s, v.tolist() if hasattr(v, "tolist") else v) for s, v in self.samples]
        kept = [(s, v) for s, v in self.samples if len(v[0]) == len(self.towers)]
        values = np.array([v for _, v in kept], dtype=np.float64).reshape(len(kept), 3, len(self.towers))
        return np.array([s for s, _ in kept]), values


class Towers:
    """Compares how fast the towers of a model move, and tells of one that stands still while its partner learns.

    A tower is a top-level submodule, or what the patterns of ``towers`` match. Its relative velocity is that of its
    fastest weight: the length of one update over that of the weights, for tables over the rows that were looked up
    in that step, for others over a strided sample. ``stalled_tower`` is told where the ratio of two partners stays
    below ``ratio`` in ``steady`` samples in a row; partners are all towers that are given, or those whose names say so
    (user and item, query and document, text and image ...). Parts that are no partners may differ as they like.

    Cost: every ``every`` steps, two gathers of <= 65,536 weights, and two of <= 256 rows a table, and about 20
    operations on them; no host read. Memory: 3 copies of the sample.

    Args:
        towers: patterns of parameter names by tower, e.g. ``{"user": ["user.*"], "item": ["item.*", "cat.*"]}``.
        every: steps between two samples.
        ratio: of relative velocities, below which a tower stands still beside its partner.
        steady: in how many samples in a row.
        warmup: steps before which nothing counts.
    """

    @validated
    def __init__(
        self,
        *,
        towers: Mapping[str, Sequence[str]] | None = None,
        every: Annotated[int, Field(ge=2)] = 10,
        ratio: Annotated[float, Field(gt=0, lt=1)] = 0.02,
        steady: Annotated[int, Field(ge=1)] = 8,
        warmup: Annotated[int, Field(ge=0)] = 50,
    ) -> None:
        self.towers = None if towers is None else {name: tuple(patterns) for name, patterns in towers.items()}
        self.every = every
        self.ratio = ratio
        self.steady = steady
        self.warmup = warmup
        self._watched: dict[str, Watched] = {}

    @hookimpl
    def on_gradients(self, event: GradientEvent) -> None:
        """Every few steps: the weights before and after one update."""
        if not event.parameters or not hasattr(event.parameters[0], "detach"):
            return
        from dynguard_plugins.embeddings.towers_sample import Taken

        watched = self._watched.setdefault(event.source, Watched())
        if watched.names != event.names:
            self._group(watched, event)
        if watched.taken is None or not watched.taken.fits(event):
            watched.taken, watched.pending = Taken(event, list(watched.groups.values())), False
        if watched.pending:
            watched.pending = False
            found = watched.taken.after(event)
            if found is not None:
                watched.samples.append((event.step - 1, found))
                if len(watched.samples) > KEPT:
                    watched.samples = [*watched.samples[: -self.steady : 2], *watched.samples[-self.steady :]]
        if event.step % self.every == 0:
            watched.pending = True
            watched.taken.before(event)

    @hookimpl
    def on_embeddings(self, event: EmbeddingEvent) -> None:
        """The rows that were looked up, where this step is sampled."""
        watched = self._watched.get(event.source)
        if watched is not None and watched.pending and watched.taken is not None:
            watched.taken.rows(event)

    @hookimpl
    def diagnose(self) -> Iterable[Finding]:
        """Towers that stand still beside their partners."""
        for source, watched in self._watched.items():
            steps, values = watched.read()
            values = values[steps >= self.warmup][-self.steady :]
            if len(values) == self.steady:
                yield from self._stalled(source, watched, int(steps[-1]), values)

    @hookimpl
    def summarize(self) -> Section | None:
        """Medians by tower, correlations of all pairs, and velocities over time."""
        tables: list[Table] = []
        figures: list[Figure] = []
        for source, watched in self._watched.items():
            steps, values = watched.read()
            if len(steps) and len(watched.towers) > 1:
                tables += [_medians(source, watched.towers, values), _correlations(source, watched.towers, values)]
                figures.append(_velocities(source, watched.towers, steps, values))
        if not tables:
            return None
        return Section(
            title="Towers",
            text="Velocity is the length of one update over that of the weights, drift the length of all the way since "
            "the start over that of the weights then. Correlations are Spearman's, over the samples.",
            tables=tuple(tables),
            figures=tuple(figures),
        )

    def state_dict(self) -> dict[str, Any]:
        """The samples, read; drift is measured from the resume on."""
        saved = {}
        for source, watched in self._watched.items():
            watched.read()
            saved[source] = {
                "names": list(watched.names), "samples": [[s, v] for s, v in watched.samples],
                "told": list(watched.told),
            }  # fmt: skip
        return saved

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up ``state_dict()``."""
        self._watched = {}
        for source, saved in state.items():
            watched = self._watched[source] = Watched(told=list(saved["told"]))
            watched.names = tuple(saved["names"])
            watched.groups = self._groups(watched.names)
            watched.towers = tuple(watched.groups)
            watched.samples = [(step, values) for step, values in saved["samples"]]

    def _group(self, watched: Watched, event: GradientEvent) -> None:
        watched.names = event.names
        watched.groups = self._groups(event.names)
        watched.towers = tuple(watched.groups)
        watched.taken = None

    def _groups(self, names: Sequence[str]) -> dict[str, list[int]]:
        """Indices of parameters by tower; towers without any are left out."""
        if self.towers is not None:
            groups = {
                tower: [i for i, n in enumerate(names) if any(fnmatch.fnmatchcase(n, p) for p in patterns)]
                for tower, patterns in self.towers.items()
            }
            return {tower: indices for tower, indices in groups.items() if indices}
        found: dict[str, list[int]] = {}
        for i, name in enumerate(names):
            found.setdefault(_top(name, names), []).append(i)
        return found

    def _stalled(self, source: str, watched: Watched, step: int, values: Array) -> Iterator[Finding]:
        for slow, fast in self._pairs(watched.towers):
            i, j = watched.towers.index(slow), watched.towers.index(fast)
            with np.errstate(all="ignore"):
                ratios = values[:, 0, i] / values[:, 0, j]
            if slow in watched.told or not (ratios < self.ratio).all():  # false for NaN
                continue
            if watched.taken is not None and watched.taken.rests(i):
                continue  # its learning rates are 0, which someone has set
            watched.told.append(slow)
            yield _tell(source, step, (slow, fast), float(np.median(ratios)), values[:, :, [i, j]])

    def _pairs(self, towers: Sequence[str]) -> Iterator[tuple[str, str]]:
        """(tower, its partner), both ways round."""
        for a in towers:
            for b in towers:
                if a != b and (self.towers is not None or _partners(a, b)):
                    yield a, b


def _top(name: str, names: Sequence[str]) -> str:
    """The first part of a name in which not all names agree."""
    parts = name.split(".")
    shared = 0
    while shared < len(parts) - 1 and all(n.split(".")[: shared + 1] == parts[: shared + 1] for n in names):
        shared += 1
    return parts[min(shared, max(len(parts) - 2, 0))]


def _partners(a: str, b: str) -> bool:
    """Whether two names differ by partners' words alone: ``user_tower`` and ``item_tower``."""
    return any(
        x in a.lower() and y in b.lower() and a.lower().replace(x, "") == b.lower().replace(y, "")
        for pair in PARTNERS
        for x, y in (pair, pair[::-1])
    )


def _tell(source: str, step: int, towers: tuple[str, str], ratio: float, values: Array) -> Finding:
    slow, fast = towers
    (own, other), (gradient, partner) = np.median(values[:, 0], axis=0), np.median(values[:, 1], axis=0)
    alive = bool(gradient > 0)
    return Finding(
        kind="stalled_tower",
        severity=Severity.WARNING,
        step=step,
        subject=slow,
        source=source,
        action=Action.WARN,
        premise=f"tower {slow!r} moves {own:.3g} of its length a step while {fast!r} moves {other:.3g} "
        f"({ratio:.2g} of that, in {len(values)} samples in a row); its gradient is "
        + (f"alive, with a norm of {gradient:.3g}" if alive else "zero"),
        implies=f"{fast!r} learns alone, against a {slow!r} that stays as it is: "
        + ("its steps are too small for it" if alive else "the loss does not reach it (detached, or saturated)"),
        expected_effect="a learning rate of its own brings it along"
        if alive
        else "once the loss reaches it, both towers move",
        evidence=(
            Evidence(name="velocity_ratio", value=ratio),
            Evidence(name="velocity", value=float(own)),
            Evidence(name="partner_velocity", value=float(other)),
            Evidence(name="gradient_norm", value=float(gradient)),
            Evidence(name="partner_gradient_norm", value=float(partner)),
            Evidence(name="partner", value=fast),
            Evidence(name="gradient", value="alive" if alive else "zero"),
            Evidence(name="samples", value=len(values)),
        ),
    )


def _medians(source: str, towers: Sequence[str], values: Array) -> Table:
    rows = tuple(
        (t, _middle(values[:, 0, i]), _middle(values[:, 1, i]), short(values[-1, 2, i])) for i, t in enumerate(towers)
    )
    title = f"Towers of {source}" if source else "Towers"
    return Table(title=title, columns=("tower", "velocity", "gradient norm", "drift at the end"), rows=rows)


def _correlations(source: str, towers: Sequence[str], values: Array) -> Table:
    from dynguard_plugins.embeddings.measures import rank_correlation

    rows = []
    for i, a in enumerate(towers):
        for j in range(i + 1, len(towers)):
            both = np.isfinite(values[:, :, [i, j]]).all(axis=(1, 2))
            found = [
                rank_correlation(values[both, k, i], values[both, k, j])[0]
                if both.sum() >= LEAST_CORRELATED
                else np.nan
                for k in range(3)
            ]
            rows.append((a, towers[j], *(short(x) for x in found), int(both.sum())))
    title = f"Correlations of {source}" if source else "Correlations"
    return Table(title=title, columns=("tower", "other", *NAMES, "samples"), rows=tuple(rows))


def _velocities(source: str, towers: Sequence[str], steps: Array, values: Array) -> Figure:
    return Figure(
        title=f"Velocity of the towers of {source}" if source else "Velocity of towers",
        mark="line", x=tuple(int(s) for s in steps),
        series={t: tuple(short(x) for x in values[:, 0, i]) for i, t in enumerate(towers)},
        x_label="step", y_label="relative velocity",
        alt="; ".join(f"{t}: {_middle(values[:, 0, i])}" for i, t in enumerate(towers)),
    )  # fmt: skip


def _middle(values: Array) -> float | None:
    """Median of what is finite."""
    finite = values[np.isfinite(values)]
    return short(float(np.median(finite))) if finite.size else None
