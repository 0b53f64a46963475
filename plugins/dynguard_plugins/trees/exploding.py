"""``exploding_leaves``: leaf values without bound. No limit has the target's unit.

Where predictions are exp(margin), leaf values are in nats whatever the target's unit: a step of more than 20 nats
(a factor of 5e8) is never right. Elsewhere, and below that, a leaf is compared with the leaves before it.
"""

from __future__ import annotations

import math

from dynguard import Action, Evidence, Finding, Severity
from dynguard_plugins.rounding import short
from dynguard_plugins.trees import names
from dynguard_plugins.trees.history import History, Round

NATS = 20.0  # a step of the margin under a log link that no data calls for
OVERSHOT = 5.0  # one that does so where the predictions' sum then grew ...
GROWN = 100.0  # ... by this factor
FAR = 100.0  # a leaf over the largest of all rounds before
FARTHER = 1000.0  # the same where no training metric can confirm it
LEAST_ROUNDS = 3


def exploding_leaves(history: History) -> Finding | None:
    """The newest round's leaves or training metric are not finite, or out of all proportion.

    Cost: O(1) a round.
    """
    round_ = history.rounds[-1] if history.rounds and history.rounds[-1].number == history.newest else None
    why = _lost(history, round_) or (_overshot(history, round_) if round_ else "") or ""
    why = why or (_outgrown(history, round_) if round_ else "")
    return _finding(history, round_, why) if why and history.first_time("exploding_leaves") else None


def _lost(history: History, round_: Round | None) -> str:
    """What is no longer finite."""
    if round_ is not None and not math.isfinite(round_.extreme):
        return f"a leaf of round {round_.number} is {round_.extreme}"
    train = history.curves.train
    if train is None or not train.lost or names.bounded(train.metric):
        return ""
    if round_ is None or round_.largest > OVERSHOT or not math.isfinite(round_.cover):
        return f"{train.metric} on {train.data} is not finite any more"
    return ""


def _overshot(history: History, round_: Round) -> str:
    """Log-odds far beyond certainty that do harm; or, under a log link, more nats in one step than any data calls for,
    or a step after which the predictions' sum grew a lot.
    """
    kind = names.objective(history.parameters)
    if kind in (*names.LOGISTIC, *names.SOFTMAX) and round_.largest > NATS and _much_worse(history):
        return f"a leaf of round {round_.number} moves log-odds by {round_.extreme:.3g}, and training gets worse"
    if kind not in names.LOG:
        return ""
    if round_.largest > NATS:
        return f"a leaf of round {round_.number} multiplies predictions by exp({round_.extreme:.3g})"
    first = history.rounds[0]
    counts = kind in names.COUNTS and history.library != "catboost"  # whose cover is no hessian
    if counts and history.peak > OVERSHOT and 0 < GROWN * first.cover < round_.cover:
        return (
            f"after leaves of up to {history.peak:.3g} nats the sum of predictions (the hessian's) is "
            f"{round_.cover / first.cover:.3g} times what it was"
        )
    return ""


def _much_worse(history: History) -> bool:
    train = history.curves.train
    return train is not None and len(train.values) > 1 and train.excess > max(train.gained, 0.5 * abs(train.best))


def _outgrown(history: History, round_: Round) -> str:
    """A leaf far beyond all of the rounds before, while training gets worse."""
    if len(history.rounds) <= LEAST_ROUNDS or not 0 < history.peak < math.inf or history.average:
        return ""
    times = round_.largest / history.peak
    train = history.curves.train
    if train is None or len(train.values) < LEAST_ROUNDS:
        confirmed = times > FARTHER
    else:
        confirmed = times > FAR and train.excess > max(0.5 * train.gained, 0.0)
    return f"a leaf of round {round_.number} is {times:.3g} times the largest before" if confirmed else ""


def _finding(history: History, round_: Round | None, why: str) -> Finding:
    library = history.library
    train = history.curves.train
    evidence = [Evidence(name="rounds", value=history.newest + 1)]
    if round_ is not None:
        evidence += [
            Evidence(name="largest_leaf", value=round_.extreme),
            Evidence(name="largest_before", value=history.peak),
            Evidence(name="cover_share_of_leaf", value=short(round_.thin)),
            Evidence(name="root_cover", value=round_.cover),
        ]
    if train is not None:
        evidence.append(Evidence(name="not_finite", value=train.lost, unit="rounds"))
        evidence += [Evidence(name=f"training_{train.metric}", value=train.sign * v) for v in train.values[-1:]]
    return Finding(
        kind="exploding_leaves",
        severity=Severity.CRITICAL,
        step=history.newest,
        source=history.source,
        action=Action.RAISE,
        premise=why,
        implies="leaves that hold next to no hessian take Newton steps -G/H without bound; the rounds that follow only "
        "make up for it, or overflow",
        expected_effect="the model keeps the rounds before; with the leaves' steps bounded training stays finite",
        evidence=tuple(evidence),
        prescriptions=(
            *names.leashes(library, history.parameters),
            names.slower(library, history.parameters, "shorter steps overshoot less"),
        ),
    )
