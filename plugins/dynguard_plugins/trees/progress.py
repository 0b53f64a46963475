"""``slow_progress``: training gets better so slowly, and so steadily, that the rounds can't be enough."""

from __future__ import annotations

from dynguard import Action, Evidence, Finding, Prescription, Severity
from dynguard_plugins.rounding import short
from dynguard_plugins.trees import names
from dynguard_plugins.trees.history import History

LEAST_ROUNDS = 50
LITTLE = 0.01  # of the first loss, over all rounds
ORDINARY = 0.1  # learning rate
STEADY = 0.8  # pace of the second half over that of the first: it does not level off


def slow_progress(history: History) -> Finding | None:
    """All rounds together made training better by less than 1 %, at a pace that does not level off.

    A loss that levels off has found what there is to find; one that falls on at the same pace has too small a learning
    rate, or too strong a penalty, for its number of rounds. Cost: O(1).
    """
    train = history.curves.train
    if train is None or train.sign < 0 or len(train.values) < LEAST_ROUNDS or train.first <= 0:
        return None
    middle = train.values[len(train.values) // 2]
    early, late = train.first - middle, middle - train.last
    share = (early + late) / train.first
    if not (0 < share < LITTLE and early > 0 and late > STEADY * early) or history.root_run:
        return None
    if not history.first_time("slow_progress"):
        return None
    rate = names.rate(history.parameters)
    needed = int(len(train.values) * 0.5 / share)
    return Finding(
        kind="slow_progress",
        severity=Severity.WARNING,
        step=history.newest,
        source=history.source,
        action=Action.WARN,
        premise=f"{len(train.values)} rounds made {train.metric} on {train.data} better by {share:.2%}, steadily",
        implies=f"at this pace half of it takes about {needed} rounds",
        expected_effect="longer steps, or a weaker penalty, reach the same loss in fewer rounds",
        evidence=(
            Evidence(name="gained_share", value=short(share)),
            Evidence(name="pace_of_second_half", value=short(late / early)),
            Evidence(name="rounds_to_half", value=needed, unit="rounds"),
            Evidence(name="learning_rate", value=short(rate)),
        ),
        prescriptions=(_prescription(history.library, rate),),
    )  # fmt: skip


def _prescription(library: str, rate: float | None) -> Prescription:
    if rate is None or rate < ORDINARY:
        name = names.RATE.get(library, "learning_rate")
        return Prescription(parameter=name, current=rate, proposed=ORDINARY, why="longer steps; or a weaker penalty")
    why = "the steps are as long as usual: the loss's own scale (huber's, a penalty's) does not fit the target's"
    return Prescription(parameter="target", proposed="scaled to variance 1", why=why)
