"""``collapse``: tables, representations and codebooks in which everything becomes one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from dynguard import Finding, Section, Table, hookimpl, validated
from dynguard.findings import Figure, Scalar
from dynguard_plugins.rounding import short

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dynguard.events import EmbeddingEvent, GradientEvent
    from dynguard_plugins.embeddings.collapse_codebooks import Codebooks
    from dynguard_plugins.embeddings.collapse_outputs import Outputs
    from dynguard_plugins.embeddings.collapse_tables import Tables


class Collapse:
    """Tells where rows of a table, outputs of a module or the use of a codebook have collapsed.

    *Tables*: RankMe (Garrido et al. 2023) of a fixed sample of rows that were looked up, against that of the same rows
    as they began; ``embedding_collapse`` where rank is lost *and* the rows have drawn together, in two measurements.
    *Outputs*: of the last module with parameters, and of those named like representations, the spread over a batch;
    ``embedding_collapse`` where in three samples it has fallen below a tenth of what it was, both by itself and
    against the outputs' size (or the spread of their directions has), though inputs differ, and the loss no longer
    answers to its batches without being near 0 (information, where no loss is observed). Regression to constant
    targets, and heads that ignore their inputs while targets vary, are none.
    *Codebooks*: ``codebook_collapse`` where the perplexity of use is below a tenth of the entries, in two windows after
    the first.

    Cost: every ``every`` steps and table, a Gram matrix of <= 1,024 x 256 numbers and its eigenvalues (a few ms on a
    CPU, one wait on a GPU); every ``forwards`` training forwards and watched module, 15 operations on <= 128 x 128
    numbers; one counting ``index_add_`` per codebook look-up. Nothing else is read before ``diagnose``. Memory: the
    sampled row numbers, and for the first look-ups of a table the weights of these rows.

    Args:
        every: steps between two measurements of a table, and least length of a codebook's window.
        forwards: of how many forward passes one is sampled.
        modules: further names of modules whose outputs are watched, as patterns (``"item_tower.*"``).
        codebooks: regular expressions of the names of codebooks; by default the usual ones.
        rank_share: a collapsed table has less than this share of its first rank (both less 1).
        spread_share: collapsed outputs have less than this share of their spread.
        codebook_share: a collapsed codebook's perplexity is less than this share of its entries.
    """

    @validated
    def __init__(
        self,
        *,
        every: Annotated[int, Field(ge=1)] = 100,
        forwards: Annotated[int, Field(ge=1)] = 20,
        modules: Sequence[str] = (),
        codebooks: Sequence[str] | None = None,
        rank_share: Annotated[float, Field(gt=0, lt=1)] = 0.2,
        spread_share: Annotated[float, Field(gt=0, lt=1)] = 0.1,
        codebook_share: Annotated[float, Field(gt=0, lt=1)] = 0.1,
    ) -> None:
        self.every = every
        self.forwards = forwards
        self.modules = tuple(modules)
        self.codebooks = None if codebooks is None else tuple(codebooks)
        self.rank_share = rank_share
        self.spread_share = spread_share
        self.codebook_share = codebook_share
        self._made: tuple[Tables, Outputs, Codebooks] | None = None
        self._model: int | None = None

    @hookimpl
    def on_gradients(self, event: GradientEvent) -> None:
        """Put the hooks on at the first step, and take note of the loss."""
        _, outputs, codebooks = self._parts()
        outputs.watch(event)
        codebooks.step = event.step
        model = event.training.model if event.training is not None else None
        if model is not None and id(model) != self._model:
            self._model = id(model)
            codebooks.watch(model)

    @hookimpl
    def on_embeddings(self, event: EmbeddingEvent) -> None:
        """Sample the table when due."""
        if hasattr(event.weight, "index_select"):
            self._parts()[0].see(event)

    @hookimpl
    def diagnose(self) -> Iterable[Finding]:
        """What has collapsed, each told once."""
        for part in self._parts():
            yield from part.findings()

    @hookimpl
    def summarize(self) -> Section | None:
        """Rank, spread and use over time."""
        tables, outputs, codebooks = self._parts()
        shown = [_of_tables(tables), _of_outputs(outputs), _of_codebooks(codebooks)]
        if not any(t.rows for t in shown):
            return None
        return Section(
            title="Collapse",
            text="Rank is RankMe, abundance the sum of the singular values over the largest, distance the RMS distance "
            "of two rows; apart is the share of the squared norm that rows do not have in common. Spread is the square "
            "root of the outputs' variance over a batch.",
            tables=tuple(t for t in shown if t.rows),
            figures=tuple(_ranks(tables)),
        )

    @hookimpl
    def on_run_end(self) -> None:
        """Take all hooks off."""
        if self._made is not None:
            self._made[1].detach()
            self._made[2].detach()
            self._model = None

    def state_dict(self) -> dict[str, Any]:
        """All samples, read."""
        tables, outputs, codebooks = self._parts()
        return {
            "tables": tables.state_dict(), "outputs": outputs.state_dict(), "codebooks": codebooks.state_dict(),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up ``state_dict()``."""
        tables, outputs, codebooks = self._parts()
        tables.load_state_dict(state["tables"])
        outputs.load_state_dict(state["outputs"])
        codebooks.load_state_dict(state["codebooks"])

    def _parts(self) -> tuple[Tables, Outputs, Codebooks]:
        if self._made is None:
            from dynguard_plugins.embeddings.collapse_codebooks import Codebooks
            from dynguard_plugins.embeddings.collapse_outputs import REPRESENTATIONS, Outputs
            from dynguard_plugins.embeddings.collapse_tables import Tables

            self._made = (
                Tables(self.every, self.rank_share),
                Outputs(self.forwards, (*REPRESENTATIONS, *self.modules), self.spread_share),
                Codebooks(self.every, self.codebooks, self.codebook_share),
            )
        return self._made


def _of_tables(tables: Tables) -> Table:
    rows: list[tuple[Scalar, ...]] = []
    for watched in tables.tables.values():
        samples = watched.read()
        if samples:
            (_, first), (step, now) = samples[0], samples[-1]
            rows.append((watched.name, step, *(short(x) for pair in zip(first, now, strict=True) for x in pair)))
    columns = [
        f"{name} {when}" for name in ("rank", "abundance", "distance", "norm", "apart") for when in ("first", "now")
    ]
    return Table(title="Tables", columns=("table", "step", *columns), rows=tuple(rows))


def _of_outputs(outputs: Outputs) -> Table:
    rows = []
    for name, place in outputs.places.items():
        samples = place.read()
        if samples:
            (_, first), (step, now) = samples[0], samples[-1]
            spreads = short(first[0] ** 0.5), short(now[0] ** 0.5)
            rows.append((name, step, *spreads, short(first[2]), short(now[2])))
    columns = ("module", "step", "spread first", "spread now", "participation first", "participation now")
    return Table(title="Outputs", columns=columns, rows=tuple(rows))


def _of_codebooks(codebooks: Codebooks) -> Table:
    rows = []
    for name, book in codebooks.books.items():
        windows = book.read()
        if windows:
            rows.append((name, book.size, windows[-1][0], short(windows[0][1]), short(windows[-1][1])))
    columns = ("codebook", "entries", "step", "perplexity first", "perplexity now")
    return Table(title="Codebooks", columns=columns, rows=tuple(rows))


def _ranks(tables: Tables) -> Iterable[Figure]:
    for watched in tables.tables.values():
        samples = watched.read()
        if len(samples) > 1:
            yield Figure(
                title=f"Effective rank of {watched.name}", mark="line", x=tuple(s for s, _ in samples),
                series={"rank": tuple(v[0] for _, v in samples)}, x_label="step", y_label="RankMe",
                alt=f"from {samples[0][1][0]:.1f} to {samples[-1][1][0]:.1f}",
            )  # fmt: skip
