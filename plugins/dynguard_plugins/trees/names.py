"""What the libraries call things: metrics and their direction, links of objectives, parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dynguard import Prescription

TRAINING = ("train", "learn")
HIGHER = (
    "auc", "ndcg", "map", "pre", "accuracy", "f1", "totalf1", "r2", "precision", "recall", "mcc", "kappa",
    "average_precision", "pfound", "mrr", "hitrate", "queryauc", "zeroonegain", "balancedaccuracy", "filtereddcg",
    "dcg",
)  # fmt: skip
LOWER = (
    "rmse", "mae", "mse", "l1", "l2", "logloss", "mlogloss", "binary_logloss", "multi_logloss", "error", "merror",
    "binary_error", "multi_error", "huber", "fair", "mphe", "poisson", "poisson-nloglik", "gamma", "gamma-nloglik",
    "gamma-deviance", "gamma_deviance", "tweedie", "tweedie-nloglik", "quantile", "pinball", "logcosh", "crossentropy",
    "cross_entropy", "multiclass", "multiclassonevsall", "cox-nloglik", "aft-nloglik", "hinge", "expectile", "lq",
    "multirmse", "queryrmse", "querysoftmax", "pairlogit", "yetirank", "cox", "survivalaft", "rmsewithuncertainty",
    "msle", "rmsle", "mape", "smape", "mean_squared_error", "mean_absolute_error", "kullback_leibler", "brierscore",
)  # fmt: skip
COARSE = ("error", "merror", "binary_error", "multi_error")  # steps of 1/n: no slope to speak of
BOUNDED = ("rmsle", "msle", "mape", "smape", *HIGHER)  # not finite for reasons of their own
# Objectives whose prediction is exp(margin): margins are in nats, whatever the target's unit.
LOG = ("count:poisson", "reg:gamma", "reg:tweedie", "survival:cox", "survival:aft", "poisson", "gamma", "tweedie",
       "cox", "survivalaft")  # fmt: skip
COUNTS = ("count:poisson", "poisson")  # where the hessian is the prediction itself
SOFTMAX = ("multi:softmax", "multi:softprob", "multiclass", "softmax", "multiclassova", "multiclassonevsall")
LOGISTIC = (
    "binary:logistic", "binary:logitraw", "reg:logistic", "binary", "cross_entropy", "logloss", "crossentropy",
)  # fmt: skip
DEFAULTS: Mapping[str, Mapping[str, float]] = {
    "xgboost": {"gamma": 0.0, "min_split_loss": 0.0, "min_child_weight": 1.0},
    "lightgbm": {"min_gain_to_split": 0.0, "min_data_in_leaf": 20.0, "min_sum_hessian_in_leaf": 1e-3},
    "catboost": {"min_data_in_leaf": 1.0},
}
RATE: Mapping[str, str] = {"xgboost": "eta", "lightgbm": "learning_rate", "catboost": "learning_rate"}
RATES = ("eta", "learning_rate", "shrinkage_rate")
SAMPLING = (
    "subsample", "colsample_bytree", "colsample_bylevel", "colsample_bynode", "bagging_fraction", "feature_fraction",
    "feature_fraction_bynode", "rsm", "sub_row", "sub_feature",
)  # fmt: skip
# What bounds a leaf's value, with the value that the library's documentation gives for it.
LEASH: Mapping[str, tuple[tuple[str, float], ...]] = {
    "xgboost": (("max_delta_step", 0.7), ("min_child_weight", 1.0), ("reg_lambda", 1.0)),
    "lightgbm": (("max_delta_step", 0.7), ("min_sum_hessian_in_leaf", 1e-3), ("lambda_l2", 1.0)),
    "catboost": (("l2_leaf_reg", 3.0),),
}
SAME = {"reg_lambda": ("reg_lambda", "lambda"), "lambda_l2": ("lambda_l2", "reg_lambda")}


def is_training(data: str) -> bool:
    """Whether a data set is the one that is trained on, by its name."""
    return data.lower().startswith(TRAINING)


def direction(metric: str) -> int:
    """-1 where less is better, 1 where more is, 0 where the name says nothing."""
    name = metric.lower().partition(":")[0].partition("@")[0]
    return -1 if name in LOWER else 1 if name in HIGHER else 0


def bounded(metric: str) -> bool:
    """Whether a metric is defined for some predictions only, so that it may be NaN in a healthy run."""
    return metric.lower().partition(":")[0].partition("@")[0] in BOUNDED


def objective(parameters: Mapping[str, Any]) -> str:
    """The objective's name in lower case, without its own parameters."""
    found = parameters.get("objective", parameters.get("loss_function", ""))
    name = str(found).lower()
    return name if name in LOG or name in SOFTMAX else name.partition(":")[0] if ":" in name and "=" in name else name


def one_class(parameters: Mapping[str, Any], base: Sequence[float]) -> bool:
    """Whether a classifier starts so sure (10 nats) that all its rows are of one class."""
    logistic = objective(parameters) in LOGISTIC
    return logistic and len(base) > 0 and min(abs(value) for value in base) >= 10.0


def rate(parameters: Mapping[str, Any]) -> float | None:
    """The learning rate, where it is known."""
    return next((number(parameters[name]) for name in RATES if name in parameters), None)


def number(value: Any) -> float | None:
    """A parameter as a number: XGBoost writes some as "[5E-1]"."""
    try:
        return float(str(value).strip("[]"))
    except ValueError:
        return None


def sampled(parameters: Mapping[str, Any]) -> bool:
    """Whether rounds differ by chance: rows or columns are drawn."""
    return any((number(parameters.get(name, 1)) or 1.0) < 1.0 for name in SAMPLING)


def restraints(library: str, parameters: Mapping[str, Any]) -> list[tuple[str, float, float]]:
    """(name, value, default) of the parameters that forbid more splits than the library's defaults do."""
    given = ((name, number(parameters.get(name)), least) for name, least in DEFAULTS.get(library, {}).items())
    return [(name, value, least) for name, value, least in given if value is not None and value > least]


def slower(library: str, parameters: Mapping[str, Any], why: str, most: float = 0.3) -> Prescription:
    """A smaller learning rate."""
    now = rate(parameters)
    proposed = most if now is None else min(most, now / 10)
    return Prescription(parameter=RATE.get(library, "learning_rate"), current=now, proposed=proposed, why=why)


def leashes(library: str, parameters: Mapping[str, Any]) -> tuple[Prescription, ...]:
    """What bounds the leaves, for those parameters that are looser than they should be."""
    found = []
    for name, usual in LEASH.get(library, ()):
        now = next((number(parameters[n]) for n in SAME.get(name, (name,)) if n in parameters), None)
        if now is None or now < usual:
            why = "bounds each leaf's step" if name == "max_delta_step" else "keeps leaves of next to no hessian small"
            found.append(Prescription(parameter=name, current=now, proposed=usual, why=why))
    return tuple(found)
