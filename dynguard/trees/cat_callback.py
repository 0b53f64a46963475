"""CatBoost's watch: metrics while ``fit`` runs, trees when it has ended, or died."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import TracebackType
from typing import Any, Self

from dynguard.events import TreeEvent
from dynguard.trees import cat
from dynguard.trees.reporter import Emit, Failed, Reporter
from dynguard.trees.table import TreeTable


class CatBoostWatch:
    """``with CatBoostWatch(model, emit) as callback: model.fit(..., callbacks=[callback])``.

    CatBoost shows its callback the metrics alone. While fitting, each round is an event with metrics and a table of no
    trees; on the way out each round is an event with its trees and no metrics. Both count the rounds of this fit from
    0; ``tree`` counts all trees of the model. Where ``fit`` dies (CatBoost can't write infinite metrics) the metrics so
    far have been reported, the trees are if the model has any, and the error goes on its way. Where ``emit`` asks to
    stop while fitting, CatBoost ends its training and the model is shrunk to the rounds before (at least one).

    Args:
        model: the estimator that will be fitted, of any of CatBoost's classes.
        emit: takes the event and says whether to stop.
        failed: told when reading trees fails; None lets the exception through.
        source: of the events.
    """

    def __init__(self, model: Any, emit: Emit, failed: Failed | None = None, source: str = "") -> None:
        self._model = model
        self._report = Reporter(emit, failed)
        self._source = source
        self._begin()

    def _begin(self) -> None:
        self._round = 0  # how many rounds this fit has reported
        self._stopped: int | None = None
        self._lengths: dict[tuple[str, str], int] = {}

    def __enter__(self) -> Self:
        self._begin()
        return self

    def __deepcopy__(self, memo: Any) -> CatBoostWatch:
        """Itself: scikit-learn copies an estimator's parameters, and all copies report to one manager."""
        return self

    def after_iteration(self, info: Any) -> bool:
        """Report the metrics of the round; False stops the training."""
        self._round = round_ = int(info.iteration) - 1
        self._round += 1
        stop = self._report(partial(self._event, round_, self._latest(info.metrics or {}), TreeTable.empty(**KIND)))
        if stop and self._stopped is None:
            self._stopped = round_
        return not stop

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._model.is_fitted():
            return
        before = self._before()
        if self._stopped is not None and self._model.tree_count_ > before + max(self._stopped, 1):
            self._model.shrink(before + max(self._stopped, 1))
        tables, names = self._tables(before)
        for round_, table in tables:
            self._report(partial(self._event, round_, {}, table, names))

    def _tables(self, before: int) -> tuple[list[tuple[int, TreeTable]], tuple[str, ...]]:
        try:
            table, names = cat.read(self._model)
        except Exception as error:
            if self._report.failed is None:
                raise
            self._report.failed("reading the trees of a CatBoost model", error)
            return [], ()
        new = cat.renumbered(table.of_rounds(before, self._model.tree_count_), -before)
        return list(new.each_round()), names

    def _before(self) -> int:
        """How many trees the model had before this fit (init_model): those that no round of this fit can be.

        With use_best_model CatBoost cuts the model back to the best round of this fit.
        """
        trees, kept = int(self._model.tree_count_), self._round
        best = self._model.best_iteration_
        if best is not None and self._model.get_param("use_best_model") is not False:
            kept = min(int(best) + 1, kept) if kept else trees
        return max(trees - kept, 0) if kept else 0

    def _latest(self, metrics: Mapping[str, Mapping[str, list[float]]]) -> dict[str, dict[str, float]]:
        """The values that are new since the last round (metric_period leaves some out)."""
        found: dict[str, dict[str, float]] = {}
        for data, by_name in metrics.items():
            for name, values in by_name.items():
                if len(values) > self._lengths.get((data, name), 0):
                    self._lengths[data, name] = len(values)
                    found.setdefault(data, {})[name] = float(values[-1])
        return found

    def _event(
        self, round_: int, metrics: Mapping[str, Mapping[str, float]], table: TreeTable, names: tuple[str, ...] = ()
    ) -> TreeEvent:
        return TreeEvent(
            round=round_,
            library="catboost",
            trees=table,
            metrics=metrics,
            feature_names=names,
            parameters=cat.parameters(self._model),
            source=self._source,
        )


KIND: Mapping[str, Any] = {"library": "catboost", "single": True}
