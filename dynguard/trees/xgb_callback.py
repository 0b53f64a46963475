"""XGBoost's callback: one TreeEvent per boosting round, of the trees that the round added."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from xgboost.callback import TrainingCallback
from xgboost.core import XGBoostError

from dynguard.events import TreeEvent
from dynguard.trees import xgb
from dynguard.trees.forest import joined
from dynguard.trees.reporter import Emit, Failed, Reporter
from dynguard.trees.table import TreeTable

Metrics = Mapping[str, Mapping[str, float]]
UPDATING = "trees are updated"
NONE = TreeTable.empty(library="xgboost", single=True)


class XGBoostCallback(TrainingCallback):
    """For ``xgboost.train``, ``xgboost.cv`` and the scikit-learn classes: ``callbacks=[...]``.

    Under ``cv`` the trees of all folds stand in one table and the metrics are the means over the folds. Where ``emit``
    asks to stop, training ends by XGBoost's own path and the model keeps the rounds before (at least one). With
    process_type="update" rounds come with their metrics first and with their trees when all are done.

    Args:
        emit: takes the event and says whether to stop.
        failed: told when reading trees fails; None lets the exception through.
        source: of the events.
    """

    def __init__(self, emit: Emit, failed: Failed | None = None, source: str = "") -> None:
        super().__init__()
        self._report = Reporter(emit, failed)
        self._source = source
        self._seen = 0
        self._keep: int | None = None
        self._unread: int | None = None
        self._names: tuple[str, ...] = ()
        self._parameters: Mapping[str, Any] = {}

    def __deepcopy__(self, memo: Any) -> XGBoostCallback:
        """Itself: scikit-learn copies an estimator's parameters, and all copies report to one manager."""
        return self

    def before_training(self, model: Any) -> Any:
        """Note how many rounds there are already (continued training)."""
        self._seen, self._keep, self._unread = model.num_boosted_rounds(), None, None
        self._names, self._parameters = (), {}
        return model

    def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
        """Report the round; True stops the training."""
        start, total = self._seen, model.num_boosted_rounds()
        self._seen = total
        stop = self._report(partial(self._event, model, start, total, _latest(evals_log)))
        if stop:
            self._keep = max(start, 1)
            if _folds(model):  # cv cuts its result off here
                model.set_attr(best_iteration=str(self._keep - 1))
        return stop

    def after_training(self, model: Any) -> Any:
        """Report a round that another callback's stop kept from this one, and cut off what dynguard stopped at."""
        total = model.num_boosted_rounds()
        if self._unread is not None:
            self._seen, self._unread = self._unread, None
        if self._keep is None:
            for start in range(self._seen, total):
                self._report(partial(self._event, model, start, start + 1, {}))
            self._seen = total
        if self._keep is None or _folds(model) or self._keep >= total:
            return model
        return model[: self._keep]

    def _event(self, model: Any, start: int, stop: int, metrics: Metrics) -> TreeEvent:
        boosters = _folds(model) or [model]
        if not self._names:
            self._names, self._parameters = xgb.feature_names(boosters[0]), xgb.parameters(boosters[0])
        return TreeEvent(
            round=stop - 1,
            library="xgboost",
            trees=self._trees(boosters, start, stop),
            metrics=metrics,
            feature_names=self._names,
            parameters=self._parameters,
            source=self._source,
        )

    def _trees(self, boosters: list[Any], start: int, stop: int) -> TreeTable:
        """The new trees; none where a model is being updated, which can't be read until all its trees are."""
        if self._unread is None:
            try:
                return joined([xgb.read(booster, start, stop) for booster in boosters])
            except XGBoostError as error:
                if UPDATING not in str(error):
                    raise
                self._unread = start
        return NONE


def _folds(model: Any) -> list[Any]:
    return [fold.bst for fold in getattr(model, "cvfolds", ())]


def _latest(log: Any) -> Metrics:
    """The last value of every metric; under cv it is kept as (mean, standard deviation)."""
    return {
        data: {name: float(np.ravel(values[-1])[0]) for name, values in by_name.items() if values}
        for data, by_name in log.items()
    }
