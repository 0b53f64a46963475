"""What a manager offers for boosted trees: a callback for each library, and a look at fitted models."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dynguard.errors import ClosedError
from dynguard.events import TreeEvent
from dynguard.rounds import Rounds

if TYPE_CHECKING:
    from dynguard.findings import Finding
    from dynguard.judge import Judge
    from dynguard.trees.cat_callback import CatBoostWatch
    from dynguard.trees.lgb_callback import LightGBMCallback
    from dynguard.trees.xgb_callback import XGBoostCallback


class Boosting:
    """The part of :class:`dynguard.FlowManager` that watches boosting rounds."""

    _judge: Judge
    _closed: bool
    _own_seconds: float
    _own_calls: int
    _start: Callable[[], None]
    _own_failure: Callable[[str, Exception], None]

    def xgboost(self, source: str = "") -> XGBoostCallback:
        """A callback for ``xgboost.train``, ``cv`` and the scikit-learn classes: ``callbacks=[flow.xgboost()]``.

        ``source`` names the model where one manager watches several. MissingExtraError without xgboost.
        """
        from dynguard import trees

        self._check_open()
        return trees.xgboost(self._round, self._own_failure, source)

    def lightgbm(self, source: str = "") -> LightGBMCallback:
        """The same for ``lightgbm.train``, ``cv`` and the scikit-learn classes."""
        from dynguard import trees

        self._check_open()
        callback = trees.lightgbm(self._round, self._own_failure, source)
        self._unfinished.append(callback)
        return callback

    def catboost(self, model: Any, source: str = "") -> CatBoostWatch:
        """For CatBoost: ``with flow.catboost(model) as callback: model.fit(..., callbacks=[callback])``.

        Its callback sees metrics only; the trees are read when ``fit`` has ended, or died.
        """
        from dynguard import trees

        self._check_open()
        return trees.catboost(model, self._round, self._own_failure, source)

    def inspect(self, model: Any) -> list[Finding]:
        """Replay a fitted model, or a saved one by its path, round by round; the findings on it.

        Takes models of XGBoost, LightGBM and CatBoost, their scikit-learn classes, and pipelines that end in one.

        Raises:
            ClosedError: after ``close()``, as the callbacks do.
            UnreadableError: something else, or a model without trees.
        """
        from dynguard.trees.inspect import replay

        self._check_open()
        self._start()
        return self._rounds.replay(replay(model))

    @cached_property
    def _unfinished(self) -> list[LightGBMCallback]:
        return []

    def _finish_rounds(self) -> None:
        """Report rounds that LightGBM ended with and told nobody of."""
        while self._unfinished:
            try:
                self._unfinished.pop(0).finish()
            except Exception as error:  # noqa: BLE001 - close() never raises
                self._own_failure("reading the last boosting rounds", error)

    @cached_property
    def _rounds(self) -> Rounds:
        return Rounds(self._judge)

    def _round(self, event: TreeEvent) -> bool:
        """Judge one round; whether to stop. An error of dynguard's own is reported and training goes on."""
        started = time.perf_counter()
        try:
            self._start()
            return self._rounds.judge_round(event)
        except Exception as error:  # noqa: BLE001 - dynguard's own fault must not stop the run
            self._own_failure("judging a boosting round", error)
            return False
        finally:
            self._own_seconds += time.perf_counter() - started
            self._own_calls += 1

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this FlowManager is closed: train and inspect before close(), or make a new FlowManager")
