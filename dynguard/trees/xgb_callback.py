"""XGBoost's callback: one TreeEvent per boosting round, of the trees that the round added."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from xgboost.callback import TrainingCallback
from xgboost.core import XGBoostError

from dynguard.events import TreeEvent
from dynguard.trees import xgb
from dynguard.trees.forest import joined
from dynguard.trees.reporter import Emit, Failed, Metrics, Reporter, due, unheard
from dynguard.trees.table import TreeTable

UPDATING = "trees are updated"
NONE = TreeTable.empty(library="xgboost", single=True)


class XGBoostCallback(TrainingCallback):
    """For ``xgboost.train``, ``xgboost.cv`` and the scikit-learn classes: ``callbacks=[...]``.

    Each of the first 50 rounds is read when it is done, later ones eight at a time (at once where a metric is not
    finite). Under ``cv`` the trees of all folds stand in one table and the metrics are the means over the folds. Where
    ``emit`` asks to stop, training ends by XGBoost's own path and the model keeps the rounds before (at least one).
    With process_type="update" rounds come with their metrics first and with their trees when all are done.

    Args:
        emit: takes the event and says whether to stop.
        failed: told when reading trees fails; None lets the exception through.
        source: of the events.
    """

    def __init__(self, emit: Emit, failed: Failed | None = None, source: str = "") -> None:
        super().__init__()
        self._report = Reporter(emit, failed)
        self._source = source
        self._begin(0)

    def _begin(self, seen: int) -> None:
        self._seen, self._count = seen, 0  # rounds of the model that have been reported; rounds of this training
        self._metrics: dict[int, Metrics] = {}  # of the rounds that have not
        self._keep: int | None = None
        self._unread: int | None = None
        self._names: tuple[str, ...] = ()
        self._parameters: Mapping[str, Any] = {}

    def __deepcopy__(self, memo: Any) -> XGBoostCallback:
        """Itself: scikit-learn copies an estimator's parameters, and all copies report to one manager."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """An estimator that holds this callback can be saved; what is loaded reports to no one."""
        return XGBoostCallback, (unheard, None, self._source)

    def before_training(self, model: Any) -> Any:
        """Note how many rounds there are already (continued training)."""
        self._begin(model.num_boosted_rounds())
        return model

    def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
        """Report the round, if it is due; True stops the training."""
        total = model.num_boosted_rounds()
        self._count += 1
        self._metrics[total - 1] = metrics = _latest(evals_log)
        return due(self._count, metrics) and self._catch_up(model, total)

    def after_training(self, model: Any) -> Any:
        """Report the last rounds and cut off what dynguard stopped at."""
        total = model.num_boosted_rounds()
        if self._unread is not None:
            self._seen, self._unread = self._unread, None
        if self._keep is None and total > self._seen:
            self._catch_up(model, total)
        if self._keep is None or _folds(model) or self._keep >= total:
            return model
        return model[: self._keep]

    def _catch_up(self, model: Any, total: int) -> bool:
        """Report the rounds up to ``total``; True where one of them asks to stop."""
        start, self._seen = self._seen, total
        stopped = self._report(partial(self._events, model, start, total))
        self._metrics.clear()
        if stopped is None:
            return False
        self._keep = max(stopped.round, 1)
        if _folds(model):  # cv cuts its result off here
            model.set_attr(best_iteration=str(self._keep - 1))
        return True

    def _events(self, model: Any, start: int, stop: int) -> Iterator[TreeEvent]:
        boosters = _folds(model) or [model]
        if not self._names:
            self._names, self._parameters = xgb.feature_names(boosters[0]), xgb.parameters(boosters[0])
        tables = self._trees(boosters, start, stop)
        for number in range(start, stop):
            yield TreeEvent(
                round=number,
                library="xgboost",
                trees=joined([table.of_rounds(number, number + 1) for table in tables]),
                metrics=self._metrics.get(number, {}),
                feature_names=self._names,
                parameters=self._parameters,
                source=self._source,
            )

    def _trees(self, boosters: list[Any], start: int, stop: int) -> list[TreeTable]:
        """The new trees; none where a model is being updated, which can't be read until all its trees are."""
        if self._unread is None:
            try:
                return [xgb.read(booster, start, stop) for booster in boosters]
            except XGBoostError as error:
                if UPDATING not in str(error):
                    raise
                self._unread = start
        return [NONE]


def _folds(model: Any) -> list[Any]:
    return [fold.bst for fold in getattr(model, "cvfolds", ())]


def _latest(log: Any) -> Metrics:
    """The last value of every metric; under cv it is kept as (mean, standard deviation)."""
    return {
        data: {name: float(np.ravel(values[-1])[0]) for name, values in by_name.items() if values}
        for data, by_name in log.items()
    }
