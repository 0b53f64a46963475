"""CatBoost's watch: metrics while ``fit`` runs, trees when it has ended, or died."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Self

from dynguard.events import TreeEvent
from dynguard.trees import cat
from dynguard.trees.forest import renumbered
from dynguard.trees.reporter import Emit, Failed, Metrics, Reporter
from dynguard.trees.table import TreeTable

NONE = TreeTable.empty(library="catboost", single=True)


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
        self._given: Mapping[str, Any] = {}

    def __enter__(self) -> Self:
        self._begin()
        return self

    def __deepcopy__(self, memo: Any) -> CatBoostWatch:
        """Itself: scikit-learn copies an estimator's parameters, and all copies report to one manager."""
        return self

    def after_iteration(self, info: Any) -> bool:
        """Report the metrics of the round; False stops the training."""
        round_ = int(info.iteration) - 1
        self._round = round_ + 1
        self._given = self._given or cat.parameters(self._model)
        metrics = self._latest(info.metrics or {})
        stopped = self._report(partial(self._events, [(round_, NONE)], (), self._given, metrics))
        if stopped is not None:
            self._stopped = round_
        return stopped is None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._model.is_fitted():
            return
        before = self._before()
        if self._stopped is not None and self._model.tree_count_ > before + max(self._stopped, 1):
            self._model.shrink(before + max(self._stopped, 1))
        self._report(partial(self._new, before))

    def _new(self, before: int) -> Iterator[TreeEvent]:
        """The trees of this fit."""
        table, names = cat.read(self._model)
        new = renumbered(table.of_rounds(before, self._model.tree_count_), -before)
        return self._events(new.each_round(), names, cat.parameters(self._model), {})

    def _before(self) -> int:
        """How many trees the model had before this fit (init_model): those that no round of this fit can be.

        With use_best_model CatBoost cuts the model back to the best round of this fit.
        """
        best, kept = self._model.best_iteration_, self._round
        if best is not None and self._model.get_param("use_best_model") is not False:
            kept = min(int(best) + 1, kept)
        return max(int(self._model.tree_count_) - kept, 0) if kept else 0

    def _latest(self, metrics: Mapping[str, Mapping[str, list[float]]]) -> Metrics:
        """The values that are new since the last round (metric_period leaves some out)."""
        found: dict[str, dict[str, float]] = {}
        for data, by_name in metrics.items():
            for name, values in by_name.items():
                if len(values) > self._lengths.get((data, name), 0):
                    self._lengths[data, name] = len(values)
                    found.setdefault(data, {})[name] = float(values[-1])
        return found

    def _events(
        self,
        rounds: Iterable[tuple[int, TreeTable]],
        names: tuple[str, ...],
        parameters: Mapping[str, Any],
        metrics: Metrics,
    ) -> Iterator[TreeEvent]:
        for number, trees in rounds:
            yield TreeEvent(
                round=number,
                library="catboost",
                trees=trees,
                metrics=metrics,
                feature_names=names,
                parameters=parameters,
                source=self._source,
            )
