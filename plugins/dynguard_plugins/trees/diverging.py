"""``diverging_rounds``: each round makes the training worse, as with a learning rate above 2."""

from __future__ import annotations

from dynguard import Action, Evidence, Finding, Severity
from dynguard_plugins.rounding import short
from dynguard_plugins.trees import names
from dynguard_plugins.trees.curves import Curve
from dynguard_plugins.trees.history import History

RISES = 4  # rounds in a row, each worse than the one before
WORSE = 0.5  # how much worse than the best round, as a share of it
LEVEL = 5  # rounds that all lie above the first
CALMER = 0.9  # leaves that are never as large as this part of the first round's are no sign of divergence
SWINGS = 6  # rounds whose largest leaf changed sign each time ...
GROWTH = 4.0  # ... and grew by this factor over them, or since the growth began


def diverging_rounds(history: History) -> Finding | None:
    """Training gets worse round by round, or leaves swing ever farther from side to side.

    By the metric: 4 rises in a row that end worse than the best by more than all that was gained and by half of the
    best; or 5 rounds that all lie above the first by more than twice what was gained. Without a training metric: the
    largest leaf changes its sign at each of 6 rounds and never shrinks, by a factor of 4 or more in all: for squared
    error the residual is multiplied by 1 - eta each round. A metric is not believed where leaves have only shrunk
    since the first round (XGBoost's binary:logitraw has the logloss of its margins). Cost: O(1) a round.
    """
    train = history.curves.train
    if train is not None and len(train.values) >= RISES + 1:
        why = _worse(train) if train.rounds[-1] == history.newest else ""
        why = "" if why and _calm(history) else why
    else:
        why = "" if train is not None and train.values else _swinging(history)
    return _finding(history, why) if why and history.first_time("diverging_rounds") else None


def _worse(train: Curve) -> str:
    beyond = train.excess > max(train.gained, WORSE * abs(train.best), 0.0) and train.excess > 0
    if beyond and train.rises() >= RISES:
        return f"{train.metric} on {train.data} got worse at each of the last {train.rises()} rounds"
    lowest = min(train.values[-LEVEL:])
    if len(train.values) > 2 * LEVEL and lowest - train.first > max(2 * train.gained, WORSE * abs(train.first)):
        return f"{train.metric} on {train.data} has been worse than after the first round for {LEVEL} rounds"
    return ""


def _calm(history: History) -> bool:
    """Whether leaves have only shrunk since the first round: then the metric does not fit what is trained."""
    rounds = history.rounds
    seen = len(rounds) > 1 and rounds[-1].number == history.newest
    return seen and all(round_.rms < CALMER * rounds[0].rms for round_ in rounds[1:])


def _swinging(history: History) -> str:
    """Every largest leaf of the other sign than the one before, and farther out; counted over as long as that held."""
    rounds = history.rounds
    if history.average or len(rounds) <= SWINGS or rounds[-1].number != history.newest:
        return ""
    tail = [round_.extreme for round_ in rounds[-32:]]
    run = 0
    while run + 1 < len(tail) and tail[-1 - run] * tail[-2 - run] < 0 and abs(tail[-1 - run]) >= abs(tail[-2 - run]):
        run += 1
    if run >= SWINGS and abs(tail[-1]) >= GROWTH * abs(tail[-1 - run]):
        times = abs(tail[-1] / tail[-1 - run])
        return f"the largest leaf changed its sign at each of the last {run} rounds and grew {times:.3g}-fold"
    return ""


def _finding(history: History, why: str) -> Finding:
    train, rounds = history.curves.train, history.rounds
    evidence = []
    if train is not None and train.values:
        evidence += [
            Evidence(name=f"training_{train.metric}", value=train.sign * train.last),
            Evidence(name="best", value=train.sign * train.best),
            Evidence(name="best_round", value=train.best_round),
            Evidence(name="rises", value=train.rises(), unit="rounds"),
        ]
    if rounds:
        evidence.append(Evidence(name="largest_leaf", value=rounds[-1].extreme))
    rate = names.rate(history.parameters)
    if rate is not None:
        evidence.append(Evidence(name="learning_rate", value=short(rate)))
    return Finding(
        kind="diverging_rounds",
        severity=Severity.CRITICAL,
        step=history.newest,
        source=history.source,
        action=Action.RAISE,
        premise=why,
        implies="each round overshoots by more than it corrects: no further round can help",
        expected_effect="the model keeps the rounds before; a learning rate below 1 shrinks the residual each round",
        evidence=tuple(evidence),
        prescriptions=(
            names.slower(history.library, history.parameters, "above 2 squared error grows by 1 - eta each round"),
        ),
    )
