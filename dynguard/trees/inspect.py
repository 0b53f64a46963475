"""Replays a fitted model, or a saved one, as if it were trained now: one TreeEvent per boosting round."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dynguard.events import TreeEvent
from dynguard.trees import needed
from dynguard.trees.table import TreeTable, UnreadableError

ACCEPTED = (
    "a fitted model of XGBoost, LightGBM or CatBoost (native or of a scikit-learn class), a scikit-learn Pipeline that "
    "ends in one, a search with best_estimator_, or the path of a saved model (XGBoost json or ubj, LightGBM txt, "
    "CatBoost cbm or json)"
)
SEVERAL = {"calibrated_classifiers_": "calibrated_classifiers_[i].estimator", "estimators_": "estimators_[i]",
           "boosters": "boosters[i]"}  # fmt: skip
MODELS = ("Booster", "XGBModel", "LGBMModel", "CatBoost")  # the classes that all others of the libraries come from
UNNAMED = re.compile(r"(f|Column_)?\d+")  # what the libraries call columns that have no name

Curves = Mapping[str, Mapping[str, Sequence[float]]]


@dataclass(frozen=True, slots=True)
class Replay:
    """All that is known of a fitted model."""

    table: TreeTable
    names: tuple[str, ...]
    parameters: Mapping[str, Any]
    curves: Curves

    def events(self) -> Iterator[TreeEvent]:
        """One event per round; rounds that have metrics but no trees left (use_best_model) come with none."""
        trees = dict(self.table.each_round())
        rounds = max(trees, default=-1) + 1
        lengths = [len(values) for by_name in self.curves.values() for values in by_name.values()]
        nothing = self.table.rows(0, 0)
        for number in range(max([rounds, *lengths])):
            yield TreeEvent(
                round=number,
                library=self.table.library,
                trees=trees.get(number, nothing),
                metrics=self._metrics(number, rounds),
                feature_names=self.names,
                parameters=self.parameters,
            )

    def _metrics(self, number: int, rounds: int) -> dict[str, dict[str, float]]:
        """The metrics of a round: curves that are shorter than the model belong to its last rounds."""
        found: dict[str, dict[str, float]] = {}
        for data, by_name in self.curves.items():
            for name, values in by_name.items():
                at = number - max(rounds - len(values), 0)
                if 0 <= at < len(values):
                    found.setdefault(data, {})[name] = float(values[at])
        return found


def replay(model: Any) -> Iterator[TreeEvent]:
    """One TreeEvent per boosting round of a fitted model; the model is read at once, events are made as they are taken.

    Args:
        model: a model of XGBoost, LightGBM or CatBoost, a Pipeline that ends in one, a search, or a path.

    Raises:
        UnreadableError: something else, a model that is not fitted, or one that has no trees.
        MissingExtraError: the library of a saved model is not installed.
        FileNotFoundError: there is no such file.
    """
    return _read(model).events()


def _read(model: Any) -> Replay:
    if isinstance(model, str | os.PathLike):
        return _read(_load(Path(model)))
    if isinstance(model, Replay):
        return model
    if any(attribute in getattr(model, "__dict__", ()) for attribute in SEVERAL):
        raise UnreadableError(_refusal(model))
    library = _library(model)
    if library is not None:
        return READERS[library](model)
    if hasattr(model, "steps") and hasattr(model, "named_steps"):
        return _pipeline(model)
    for inner in ("best_estimator_", "regressor_"):
        if hasattr(model, inner):
            return _read(getattr(model, inner))
    raise UnreadableError(_refusal(model))


def _library(model: Any) -> str | None:
    """Which library the model is of, without importing any."""
    for kind in type(model).__mro__:
        root = kind.__module__.partition(".")[0]
        if kind.__name__ in MODELS and root in READERS:
            return root
    return None


def _refusal(model: Any) -> str:
    name = type(model).__name__
    for attribute, how in SEVERAL.items():
        if attribute in getattr(model, "__dict__", ()):
            return f"{name} holds several models: inspect each of them, model.{how}"
    if hasattr(model, "estimator") and not isinstance(model, type):
        return f"{name} has no best_estimator_: fit it first. inspect takes {ACCEPTED}"
    return f"can't inspect {name}: give {ACCEPTED}"


def _unfitted(model: Any) -> UnreadableError:
    return UnreadableError(f"{type(model).__name__} is not fitted: fit it, then inspect it")


def _xgboost(model: Any) -> Replay:
    from dynguard.trees import xgb

    booster = model
    if hasattr(model, "get_booster"):
        if not model.__sklearn_is_fitted__():
            raise _unfitted(model)
        booster = model.get_booster()
    curves = getattr(model, "evals_result_", None) or {}
    return Replay(xgb.read(booster), xgb.feature_names(booster), xgb.parameters(booster), curves)


def _lightgbm(model: Any) -> Replay:
    from dynguard.trees import lgb

    booster = model
    if not hasattr(model, "model_to_string"):
        if not model.__sklearn_is_fitted__():
            raise _unfitted(model)
        booster = model.booster_
    text = booster.model_to_string(num_iteration=-1)
    curves = getattr(model, "evals_result_", None) or {}
    return Replay(lgb.parse(text), tuple(booster.feature_name()), lgb.parameters(text), curves)


def _catboost(model: Any) -> Replay:
    from dynguard.trees import cat

    if not model.is_fitted():
        raise _unfitted(model)
    table, names = cat.read(model)
    return Replay(table, names, cat.parameters(model), model.evals_result_ or {})


READERS = {"xgboost": _xgboost, "lightgbm": _lightgbm, "catboost": _catboost}


def _pipeline(pipeline: Any) -> Replay:
    """The last step, with the names that the steps before it give their columns, where they do."""
    last = pipeline.steps[-1][1]
    if isinstance(last, str) or last is None:
        raise UnreadableError(f"the last step of this Pipeline is {last!r}, no model; inspect takes {ACCEPTED}")
    found = _read(last)
    if len(pipeline.steps) == 1 or not all(UNNAMED.fullmatch(name) for name in found.names):
        return found
    try:
        names = tuple(str(name) for name in pipeline[:-1].get_feature_names_out())
    except (AttributeError, ValueError):  # a step that names nothing
        return found
    return replace(found, names=names) if len(names) == len(found.names) else found


def _load(path: Path) -> Any:
    """The model in a file, told by its first bytes: names of files are anyone's choice."""
    with path.open("rb") as file:
        head = file.read(64)
    if head.startswith(b"CBM1"):
        return needed("catboost", "reading a cbm file").CatBoost().load_model(str(path))
    if head.startswith((b"tree\n", b"tree\r\n")):
        return needed("lightgbm", "reading a LightGBM model").Booster(model_file=str(path))
    if head[:1] == b"{":
        return _load_object(path, head)
    raise UnreadableError(f"{path.name} is no saved model: inspect takes {ACCEPTED}")


def _load_object(path: Path, head: bytes) -> Any:
    """XGBoost's json or ubj, or CatBoost's json."""
    if head[1:2] not in (b"L", b"l", b"i", b"I", b"U", b"$", b"#"):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UnreadableError(f"{path.name} is no complete JSON: {error}") from error
        if "features_info" in content:
            return _catboost_json(content)
        if "learner" not in content:
            raise UnreadableError(f"{path.name} is JSON but no saved model: inspect takes {ACCEPTED}")
    library = needed("xgboost", "reading an XGBoost model")
    try:
        return library.Booster(model_file=str(path))
    except library.core.XGBoostError as error:
        raise UnreadableError(f"{path.name} is no model that XGBoost reads: {str(error).splitlines()[0]}") from error


def _catboost_json(content: Mapping[str, Any]) -> Replay:
    from dynguard.trees import cat

    info = content["features_info"]
    columns = [*info.get("float_features", ()), *info.get("categorical_features", ())]
    width = max((column["flat_feature_index"] for column in columns), default=-1) + 1
    names = [str(column) for column in range(width)]
    for column in columns:
        names[column["flat_feature_index"]] = column.get("feature_id") or str(column["flat_feature_index"])
    table = cat.parse(content, names)
    return Replay(table, tuple(names), {}, {})
