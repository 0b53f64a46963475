"""LightGBM's callback: one TreeEvent per boosting round, of the trees that the round added."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from dynguard.events import TreeEvent
from dynguard.trees import lgb
from dynguard.trees.forest import joined, renumbered
from dynguard.trees.reporter import Emit, Failed, Metrics, Reporter, due
from dynguard.trees.table import Array, TreeTable

Pending = tuple[int, list[int], Metrics]  # a round, how many rounds each booster then held, and its metrics


class LightGBMCallback:
    """For ``lightgbm.train``, ``lightgbm.cv`` and the scikit-learn classes: ``callbacks=[...]``.

    Each of the first 50 rounds is read when it is done, later ones eight at a time (at once where a metric is not
    finite). A round that LightGBM drops because no tree could split is reported as trees of one leaf worth 0. Under
    ``cv`` the trees of all folds stand in one table and the metrics are the means over the folds. Where ``emit`` asks
    to stop, training ends by LightGBM's EarlyStopException: ``best_iteration`` is the round before, and ``predict``
    keeps to it.

    Args:
        emit: takes the event and says whether to stop.
        failed: told when reading trees fails; None lets the exception through.
        source: of the events.
    """

    order = -100  # before early stopping, whose exception would keep the last round from this callback
    before_iteration = False

    def __init__(self, emit: Emit, failed: Failed | None = None, source: str = "") -> None:
        self._report = Reporter(emit, failed)
        self._source = source
        self._boosters: list[Any] = []
        self._pending: list[Pending] = []
        self._count = 0
        self._seen: list[int] = []
        self._bases: list[Array | None] = []
        self._names: tuple[str, ...] = ()
        self._parameters: Mapping[str, Any] = {}

    def __deepcopy__(self, memo: Any) -> LightGBMCallback:
        """Itself: scikit-learn copies an estimator's parameters, and all copies report to one manager."""
        return self

    def __call__(self, env: Any) -> None:
        """Report the round, if it is due.

        Raises:
            lightgbm.callback.EarlyStopException: the training is to stop.
        """
        boosters = list(getattr(env.model, "boosters", ())) or [env.model]
        if env.iteration == env.begin_iteration:
            self._begin(boosters, env)
        metrics = _by_data(env.evaluation_result_list or ())
        self._count += 1
        self._pending.append((env.iteration, [lgb.rounds(booster) for booster in boosters], metrics))
        if not due(self._count, metrics) and env.iteration + 1 < env.end_iteration:
            return
        stopped = self._catch_up(boosters)
        if stopped is not None:
            from lightgbm.callback import EarlyStopException

            raise EarlyStopException(max(stopped.round - 1, 0), env.evaluation_result_list or [])

    def finish(self) -> None:
        """Report rounds that were not read when another callback ended the training; trees that it cut off are lost."""
        boosters, self._boosters = self._boosters, []
        if self._pending:
            self._catch_up(boosters)

    def _begin(self, boosters: list[Any], env: Any) -> None:
        self.finish()
        self._boosters, self._count = boosters, 0
        self._bases = [None] * len(boosters)
        self._seen = [env.begin_iteration] * len(boosters)
        self._names = ()
        self._parameters = {name: value for name, value in env.params.items() if _plain(value)}

    def _catch_up(self, boosters: list[Any]) -> TreeEvent | None:
        """Report the pending rounds; the event that asks to stop, if one does."""
        pending, self._pending = self._pending, []
        seen, self._seen = self._seen, pending[-1][1]
        return self._report(partial(self._events, boosters, pending, seen))

    def _events(self, boosters: list[Any], pending: list[Pending], seen: list[int]) -> Iterator[TreeEvent]:
        if not self._names:
            self._names = tuple(boosters[0].feature_name())
            text = boosters[0].model_to_string(start_iteration=0, num_iteration=1)
            self._parameters = {**lgb.parameters(text), **self._parameters}
        tables = []
        for which, booster in enumerate(boosters):
            tables.append(lgb.read(booster, seen[which], pending[-1][1][which], self._bases[which]))
            self._bases[which] = tables[-1].base
        for number, totals, metrics in pending:
            each = [_of(table, a, b, number) for table, a, b in zip(tables, seen, totals, strict=True)]
            seen = totals
            yield TreeEvent(
                round=number,
                library="lightgbm",
                trees=joined(each),
                metrics=metrics,
                feature_names=self._names,
                parameters=self._parameters,
                source=self._source,
            )


def _of(table: TreeTable, before: int, total: int, number: int) -> TreeTable:
    """The trees of a round; its number differs from the model's where rounds before it were dropped."""
    if total <= before:
        return lgb.nothing_added(table, number)
    found = table.of_rounds(before, total)
    return found if before == number else renumbered(found, number - before)


def _plain(value: Any) -> bool:
    return isinstance(value, str | int | float | bool)


def _by_data(results: Iterable[Any]) -> Metrics:
    """LightGBM's tuples (data, metric, value, ...) by data set and metric."""
    found: dict[str, dict[str, float]] = {}
    for data, metric, value, *_ in results:
        found.setdefault(data, {})[metric] = float(value)
    return found
