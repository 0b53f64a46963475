"""``bad_base_score``: the first rounds spend their moves on one constant."""

from __future__ import annotations

import math

from dynguard import Action, Evidence, Finding, Prescription, Severity
from dynguard_plugins.rounding import short
from dynguard_plugins.trees import names
from dynguard_plugins.trees.history import History

ROUNDS = 5
TIMES = 10.0  # mean leaf over the leaves' standard deviation
MOVED = 0.05  # how much better training must have got by it
PARAMETER = {"xgboost": "base_score", "lightgbm": "boost_from_average", "catboost": "boost_from_average"}


def bad_base_score(history: History) -> Finding | None:
    """In each of the first five rounds all leaves have one sign and their mean is ten times their spread.

    For squared error both shrink by 1 - eta a round, so that the ratio is that of the base's error to the spread of
    what can be predicted, whatever the learning rate and the target's unit. Softmax is left out: margins are the same
    up to a constant, and a class starts where it must. Cost: O(1) a round.
    """
    rounds = history.rounds
    if len(rounds) != ROUNDS or rounds[0].number != 0 or history.average:
        return None
    if names.objective(history.parameters) in names.SOFTMAX or names.one_class(history.parameters, history.base):
        return None
    signs = {round_.sign for round_ in rounds}
    if signs not in ({1}, {-1}) or min(round_.offset for round_ in rounds) < TIMES or not _matters(history):
        return None
    return _finding(history) if history.first_time("bad_base_score") else None


def _matters(history: History) -> bool:
    """Not a mere rounding error of the base: training got better by it, or it is no small part of the base."""
    train = history.curves.train
    if train is not None and len(train.values) > 1:
        return train.first - train.last > MOVED * abs(train.first)
    moved = abs(sum(round_.mean for round_ in history.rounds))
    if names.objective(history.parameters) in names.LOG:
        return moved > 0.5
    base = max((abs(value) for value in history.base), default=0.0)
    return moved > 0.1 * base and any(round_.splits for round_ in history.rounds)


def _finding(history: History) -> Finding:
    rounds, library = history.rounds, history.library
    rate = names.rate(history.parameters)
    ratio = min(1e6, *(round_.offset for round_ in rounds))
    identity = names.objective(history.parameters) not in names.LOG
    base = history.base[0] if len(history.base) == 1 else None
    target = None if rate is None or base is None or not identity else base + rounds[0].mean / rate
    # eta < 1: after k rounds (1 - eta)^k of the offset is left
    left = None if rate is None or not 0 < rate < 1 else math.ceil(math.log(ratio) / -math.log1p(-rate))
    return Finding(
        kind="bad_base_score",
        severity=Severity.WARNING,
        step=rounds[-1].number,
        source=history.source,
        action=Action.WARN,
        premise=f"in each of the first {ROUNDS} rounds all leaves have one sign, and their mean is more than "
        f"{ratio:.3g} times their spread",
        implies="the starting prediction is far from the target's mean: the first rounds only make up for it",
        expected_effect="with the right start these rounds are spent on the features",
        evidence=(
            Evidence(name="mean_over_spread", value=short(ratio)),
            Evidence(name="first_mean_leaf", value=rounds[0].mean),
            Evidence(name="base_margin", value=base),
            Evidence(name="estimated_mean", value=short(target)),
            Evidence(name="rounds_to_make_up", value=left, unit="rounds"),
        ),
        prescriptions=(_prescription(library, history, target),),
    )


def _prescription(library: str, history: History, target: float | None) -> Prescription:
    name = PARAMETER.get(library, "base_score")
    current = names.number(history.parameters.get(name))
    if library == "xgboost":
        why = "the mean of the target, on the scale of predictions"
        return Prescription(parameter=name, current=current, proposed=short(target), why=why)
    why = "starts at the target's mean; with an objective of your own give init_score (LightGBM) or baseline (CatBoost)"
    return Prescription(parameter=name, current=current, proposed=True, why=why)
