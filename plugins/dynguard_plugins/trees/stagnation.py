"""``stagnating_trees``: rounds that add roots only."""

from __future__ import annotations

from dynguard import Action, Evidence, Finding, Prescription, Severity
from dynguard_plugins.trees import names
from dynguard_plugins.trees.history import History

RUN = 10  # rounds in a row without a split
STILL = 3  # rounds from the first on that neither split nor moved anything
SCALE = Prescription(
    parameter="target", proposed="scaled to variance 1", why="XGBoost refuses splits of less than 1e-6 gain"
)
BASE = Prescription(
    parameter="base_score", proposed="left out: it is fitted then",
    why="where all predictions are far from the target, no split stands out from the common error",
)  # fmt: skip
LEARNED = 0.1  # of the first round's loss: below it nothing is left to learn
LITTLE = 0.1  # of the first round's loss: a gain of less than it is little ...
HELD = 0.25  # ... and of less than this where a parameter forbids splits
SETTLED = 0.2  # of the first round's hessian, likewise


def stagnating_trees(history: History) -> Finding | None:
    """Ten rounds in a row without a split; or three, where nothing at all moved since the first and no chance enters.

    Where nothing is left to learn (the training loss is a tenth of the first round's or less, or the hessian has
    vanished), or much was learnt before the splits ended, that is said as information. Cost: O(1) a round.
    """
    if history.root_run < STILL or history.average or "stagnating_trees" in history.told:
        return None
    if _hopeless(history):
        history.first_time("stagnating_trees")
        return _finding(history, Severity.ERROR, Action.RAISE, "no split and no move since the first round")
    if history.root_run < RUN or _moving(history):
        return None
    blame = not _learned(history) and _to_blame(history)
    if not history.first_time("stagnating_trees" if blame else "settled_trees"):
        return None
    severity = Severity.WARNING if blame else Severity.INFO
    return _finding(history, severity, Action.WARN, f"no split in the last {history.root_run} rounds")


def _moving(history: History) -> bool:
    """Whether training got better all the same: the roots make up for a bad start."""
    train = history.curves.train
    if train is None or len(train.values) < RUN:
        return False
    before = train.values[-RUN - 1 :][0]
    return before - train.last > LEARNED * abs(before)


def _hopeless(history: History) -> bool:
    """Each round is the same as the one before: nothing was split or moved since the first, and no chance enters.

    Without a training loss that is so of a constant target as well, unless a parameter is seen to forbid splits.
    """
    rounds, train = history.rounds, history.curves.train
    never = len(rounds) == history.root_run and rounds[0].number == 0 and max(history.peak, rounds[-1].largest) == 0
    known = (train is not None and bool(train.values)) or _held_back(history)
    return never and known and not names.sampled(history.parameters) and not _learned(history)


def _learned(history: History) -> bool:
    """Whether nothing is left to learn."""
    train = history.curves.train
    if names.one_class(history.parameters, history.base):
        return True
    if train is not None and train.values and train.sign > 0 and train.first >= 0:
        return train.last <= 1e-12 or (train.last <= LEARNED * train.first and len(train.values) > 1)
    first, last = history.rounds[0].cover, history.rounds[-1].cover
    return bool(first > 0 and last < SETTLED * first)


def _to_blame(history: History) -> bool:
    """Whether splits were refused before much was learnt.

    That is: the loss fell by less than a tenth of the first round's, or a quarter where a parameter forbids splits;
    without a loss, no tree ever split, or a parameter forbids splits and fewer than ten rounds had any.
    """
    train, held_back = history.curves.train, _held_back(history)
    if train is not None and len(train.values) > 1:
        return train.gained < (HELD if held_back else LITTLE) * abs(train.first)
    split = len(history.rounds) - history.root_run
    return split == 0 or (held_back and split < RUN)


def _held_back(history: History) -> bool:
    return bool(names.restraints(history.library, history.parameters))


def _finding(history: History, severity: Severity, action: Action, why: str) -> Finding:
    train, rounds = history.curves.train, history.rounds
    evidence = [
        Evidence(name="rounds_without_split", value=history.root_run),
        Evidence(name="rounds", value=len(rounds)),
        Evidence(name="largest_leaf", value=rounds[-1].extreme),
        Evidence(name="largest_before", value=history.peak),
    ]
    if train is not None and train.values:
        evidence.append(Evidence(name=f"first_training_{train.metric}", value=train.sign * train.first))
        evidence.append(Evidence(name=f"training_{train.metric}", value=train.sign * train.last))
    forbids = severity is not Severity.INFO
    return Finding(
        kind="stagnating_trees",
        severity=severity,
        step=rounds[-1].number,
        source=history.source,
        action=action,
        premise=why,
        implies=(
            "every split is refused, by a parameter or for want of hessian: rounds are spent and nothing is learnt"
            if forbids
            else "no gain is left: further rounds add nothing"
        ),
        expected_effect=(
            "with splits allowed again the loss falls further; else fewer rounds give the same model"
            if forbids
            else "stopping here gives the same model"
        ),
        evidence=tuple(evidence),
        prescriptions=_prescriptions(history) if forbids else (),
    )


def _prescriptions(history: History) -> tuple[Prescription, ...]:
    """The parameters that forbid splits; where all are at their defaults, the one that asks for hessian."""
    library, parameters = history.library, history.parameters
    found = [
        Prescription(parameter=name, current=value, proposed=least, why="it forbids splits; this is the default")
        for name, value, least in names.restraints(library, parameters)
    ]
    if found:
        return tuple(found)
    name = {"xgboost": "min_child_weight", "lightgbm": "min_sum_hessian_in_leaf"}.get(library, "l2_leaf_reg")
    why = "hessians far from the target are tiny and their sum stays below it; scaling the target helps as well"
    few = Prescription(
        parameter="min_data_in_leaf", current=names.number(parameters.get("min_data_in_leaf")), proposed=1,
        why="with few rows no leaf can hold as many",
    )  # fmt: skip
    hessian = Prescription(parameter=name, current=names.number(parameters.get(name)), proposed=0.0, why=why)
    further = {"lightgbm": (few,), "xgboost": (SCALE, BASE)}.get(library, ())
    return (*further, hessian) if hessian.current != hessian.proposed else further
