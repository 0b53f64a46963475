"""LightGBM's callback: one TreeEvent per boosting round, of the trees that the round added."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from dynguard.events import TreeEvent
from dynguard.trees import lgb
from dynguard.trees.forest import joined
from dynguard.trees.reporter import Emit, Failed, Reporter
from dynguard.trees.table import Array, TreeTable


class LightGBMCallback:
    """For ``lightgbm.train``, ``lightgbm.cv`` and the scikit-learn classes: ``callbacks=[...]``.

    A round that LightGBM drops because no tree could split is reported as trees of one leaf worth 0. Under ``cv`` the
    trees of all folds stand in one table and the metrics are the means over the folds. Where ``emit`` asks to stop,
    training ends by LightGBM's EarlyStopException: ``best_iteration`` is the round before, and ``predict`` keeps to it.

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
        self._bases: list[Array | None] = []
        self._seen: list[int] = []
        self._names: tuple[str, ...] = ()
        self._parameters: Mapping[str, Any] = {}

    def __deepcopy__(self, memo: Any) -> LightGBMCallback:
        """Itself: scikit-learn copies an estimator's parameters, and all copies report to one manager."""
        return self

    def __call__(self, env: Any) -> None:
        """Report the round.

        Raises:
            lightgbm.callback.EarlyStopException: the training is to stop.
        """
        if self._report(partial(self._event, env)):
            from lightgbm.callback import EarlyStopException

            raise EarlyStopException(max(env.iteration - 1, 0), env.evaluation_result_list or [])

    def _event(self, env: Any) -> TreeEvent:
        boosters = list(getattr(env.model, "boosters", ())) or [env.model]
        if env.iteration == env.begin_iteration:
            self._begin(boosters, env)
        tables = [self._new(which, booster, env.iteration) for which, booster in enumerate(boosters)]
        return TreeEvent(
            round=env.iteration,
            library="lightgbm",
            trees=joined(tables),
            metrics=_by_data(env.evaluation_result_list or ()),
            feature_names=self._names,
            parameters=self._parameters,
            source=self._source,
        )

    def _begin(self, boosters: list[Any], env: Any) -> None:
        self._bases = [None] * len(boosters)
        self._seen = [env.begin_iteration] * len(boosters)
        self._names = tuple(boosters[0].feature_name())
        text = boosters[0].model_to_string(start_iteration=0, num_iteration=1)
        self._parameters = {**lgb.parameters(text), **{k: v for k, v in env.params.items() if _plain(v)}}

    def _new(self, which: int, booster: Any, round_: int) -> TreeTable:
        """The trees of the round, or what stands for them where there are none."""
        start, total = self._seen[which], lgb.rounds(booster)
        table = lgb.read(booster, start, total, self._bases[which])
        self._bases[which], self._seen[which] = table.base, total
        return table if total > start else lgb.nothing_added(table, round_)


def _plain(value: Any) -> bool:
    return isinstance(value, str | int | float | bool)


def _by_data(results: Iterable[Any]) -> dict[str, dict[str, float]]:
    """LightGBM's tuples (data, metric, value, ...) by data set and metric."""
    found: dict[str, dict[str, float]] = {}
    for data, metric, value, *_ in results:
        found.setdefault(data, {})[metric] = float(value)
    return found
