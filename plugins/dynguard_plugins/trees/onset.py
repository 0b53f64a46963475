"""``overfit_onset``: the validation loss turns while training goes on, by a sequential test."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from dynguard import Action, Evidence, Finding, Prescription, Severity
from dynguard_plugins.rounding import short
from dynguard_plugins.trees.curves import Curve
from dynguard_plugins.trees.history import History

ALPHA = 1e-2  # at most so many alarms a round while validation does not rise on average
BET = 0.9
WINDOW = 20  # rounds over which the size of steps is known
LEAST = 5  # steps before any are judged
SPENT = 1.0  # of what validation gained since the first round: when as much is lost again, it is a warning
STOPPING = {"xgboost": "early_stopping_rounds", "lightgbm": "early_stopping_round", "catboost": "od_wait"}


def factor(step: float, past: Sequence[float]) -> float:
    """What a step of the validation loss multiplies the evidence by: 1 + 0.9 x, x its size in past steps' RMS.

    x is cut to [-1, 1], so that the factor is positive, and has mean 1 at most where steps are as often down as up.
    """
    scale = math.sqrt(sum(value * value for value in past) / len(past)) if past else 0.0
    return 1.0 + BET * min(max(step / scale, -1.0), 1.0) if scale > 0 else 1.0


def overfit_onset(history: History) -> Finding | None:
    """An e-CUSUM over the steps of the validation loss; the alarm at evidence of 1 / ``ALPHA``, training better still.

    M_t = max(M_{t-1}, 1) (1 + 0.9 x_t) is an e-detector: while the loss does not rise, the mean time to a false alarm
    is at least 1 / ALPHA rounds (Shin, Ramdas & Rinaldo 2022, "E-detectors", arXiv:2203.03532, e-CUSUM). The finding's
    step is the round of least validation loss; ``noticed`` is the round of the alarm. Cost: O(20) a round.
    """
    validation = history.curves.validation
    if validation is None or not validation.values or validation.rounds[-1] != history.newest:
        return None
    if "overfit_onset" in history.told:
        return None
    evidence = _evidence(history, validation)
    if evidence < 1 / ALPHA or not _training_goes_on(history.curves.train, validation):
        return None
    return _finding(history, validation, Severity.INFO) if history.first_time("overfit_onset") else None


def overfit_cost(history: History) -> Finding | None:
    """At the end: validation has lost all that it had gained since the first round. Cost: O(1)."""
    validation = history.curves.validation
    if validation is None or len(validation.values) < WINDOW or "overfit_onset" not in history.told:
        return None
    lost = validation.excess / validation.gained if validation.gained > 0 else math.inf
    if lost < SPENT or not history.first_time("overfit_cost"):
        return None
    return _finding(history, validation, Severity.WARNING, lost)


def _evidence(history: History, curve: Curve) -> float:
    state = history.onset
    if len(curve.values) > LEAST + 1 and state.get("at") != curve.rounds[-1]:
        tail = curve.values[-WINDOW - 2 :]
        steps = [b - a for a, b in pairwise(tail)]
        state["evidence"] = max(state.get("evidence", 1.0), 1.0) * factor(steps[-1], steps[:-1])
        state["at"] = curve.rounds[-1]
    return state.get("evidence", 1.0)


def _training_goes_on(train: Curve | None, validation: Curve) -> bool:
    """Whether training is better now than at validation's best round."""
    if train is None or not train.values or train.metric != validation.metric:
        return True
    back = len(validation.values) - 1 - validation.rounds.index(validation.best_round)
    return train.last < train.values[max(len(train.values) - 1 - back, 0)]


def _finding(history: History, validation: Curve, severity: Severity, lost: float | None = None) -> Finding:
    train = history.curves.train
    evidence = [
        Evidence(name="noticed", value=validation.rounds[-1], unit="round"),
        Evidence(name=f"least_validation_{validation.metric}", value=validation.sign * validation.best),
        Evidence(name=f"validation_{validation.metric}", value=validation.sign * validation.last),
        Evidence(name="evidence", value=short(history.onset["evidence"])),
    ]
    if train is not None and train.values:
        gap = validation.last - train.last
        evidence.append(Evidence(name=f"training_{train.metric}", value=train.sign * train.last))
        evidence.append(Evidence(name="gap", value=short(gap)))
    if lost is not None:
        evidence.append(Evidence(name="lost_of_gain", value=short(min(lost, 1e6))))
    then = "while training goes on" if lost is None else "and is no better now than after the first"
    rounds = validation.best_round + 1
    return Finding(
        kind="overfit_onset",
        severity=severity,
        step=validation.best_round,
        source=history.source,
        action=Action.WARN,
        premise=f"{validation.metric} on {validation.data} has risen since round {validation.best_round}, {then}",
        implies="further rounds fit what is particular to the training rows",
        expected_effect=f"a model of {rounds} rounds does best on validation",
        evidence=tuple(evidence),
        prescriptions=(
            Prescription(
                parameter=STOPPING.get(history.library, "early_stopping_rounds"),
                proposed=max(10, rounds // 10),
                why="stops by itself and keeps the best round",
            ),
        ),
    )
