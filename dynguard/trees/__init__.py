"""What needs a tree library: one adapter each and one columnar tree table.

The functions here are what a manager calls; they import a library only when they are called.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dynguard.errors import MissingExtraError

if TYPE_CHECKING:
    from dynguard.trees.cat_callback import CatBoostWatch
    from dynguard.trees.lgb_callback import LightGBMCallback
    from dynguard.trees.reporter import Emit, Failed
    from dynguard.trees.xgb_callback import XGBoostCallback


def xgboost(emit: Emit, failed: Failed | None = None, source: str = "") -> XGBoostCallback:
    """A callback for ``xgboost.train``, ``xgboost.cv`` and XGBoost's scikit-learn classes.

    Raises:
        MissingExtraError: xgboost is not installed.
    """
    needed("xgboost")
    from dynguard.trees.xgb_callback import XGBoostCallback

    return XGBoostCallback(emit, failed, source)


def lightgbm(emit: Emit, failed: Failed | None = None, source: str = "") -> LightGBMCallback:
    """A callback for ``lightgbm.train``, ``lightgbm.cv`` and LightGBM's scikit-learn classes.

    Raises:
        MissingExtraError: lightgbm is not installed.
    """
    needed("lightgbm")
    from dynguard.trees.lgb_callback import LightGBMCallback

    return LightGBMCallback(emit, failed, source)


def catboost(model: Any, emit: Emit, failed: Failed | None = None, source: str = "") -> CatBoostWatch:
    """A context manager that gives the callback for ``model.fit(callbacks=[...])``.

    Raises:
        MissingExtraError: catboost is not installed.
    """
    needed("catboost")
    from dynguard.trees.cat_callback import CatBoostWatch

    return CatBoostWatch(model, emit, failed, source)


def needed(library: str, need: str = "watching its training") -> Any:
    """The imported library.

    Raises:
        MissingExtraError: it is not installed; says which pip command installs it.
    """
    try:
        return importlib.import_module(library)
    except ModuleNotFoundError as error:
        if error.name != library:
            raise
        raise MissingExtraError(library, library, need) from error
