"""``feature_dominance``: one feature owns the gain, and what it taught does not hold on validation."""

from __future__ import annotations

from dynguard import Action, Evidence, Finding, Prescription, Severity
from dynguard_plugins.rounding import short
from dynguard_plugins.trees import names
from dynguard_plugins.trees.curves import Curve
from dynguard_plugins.trees.history import History

SHARE = 0.9
FEATURES = 3  # with fewer, one must have most
LEARNED = 0.1  # how much better training must have got, as a share of the first loss
HELD = 0.1  # which part of that must show on validation
STEEP = 0.5  # learning rates beyond which the first round alone may overfit
LOOKS = (3, 4, 5, 7, 9, 14, 19, 29, 49, 99)  # indices of the rounds after which a look is taken


def hhi(values: dict[int, float]) -> float:
    """Herfindahl-Hirschman index sum of squared shares: 1 where one has all, 1/n where n share evenly."""
    total = sum(values.values())
    return sum((value / total) ** 2 for value in values.values()) if total > 0 else 0.0


def feature_dominance(history: History) -> Finding | None:
    """One feature has 90 % of the gain, training gets better and validation does not follow: a leak, or an identifier.

    One real feature may well have all of the gain; then validation gets better with training and this is silent. What
    tells a leak is that, within the same rounds, validation gains less than a tenth of what training does. Cost: O(1)
    a round, O(features used) at ten of the rounds.
    """
    if len(history.rounds) - 1 not in LOOKS or len(history.names) < FEATURES:
        return None
    feature, share = _leader(history)
    if share < SHARE or not _apart(history) or not history.first_time("feature_dominance"):
        return None
    return _finding(history, feature, share, leak=True)


def concentrated(history: History) -> Finding | None:
    """Information at the end: one feature has nearly all of the gain, and nothing speaks against it."""
    if len(history.rounds) < LOOKS[1] or len(history.names) < FEATURES:
        return None
    feature, share = _leader(history)
    if share < SHARE or not history.first_time("feature_dominance"):
        return None
    return _finding(history, feature, share, leak=False)


def _leader(history: History) -> tuple[int, float]:
    gain = history.sums.gain
    total = sum(gain.values())
    feature = max(gain, key=lambda name: gain[name], default=-1)
    return feature, gain[feature] / total if total > 0 else 0.0


def _apart(history: History) -> bool:
    """Whether training got better and validation did not follow, from the first round to the newest."""
    train, validation = history.curves.train, history.curves.validation
    rate = names.rate(history.parameters)
    if not _alike(train, validation) or (rate is not None and rate > STEEP):
        return False
    assert train is not None
    assert validation is not None
    learned, held = train.first - train.last, validation.first - validation.last
    return train.first < validation.first and learned > LEARNED * abs(train.first) and held < HELD * learned


def _alike(train: Curve | None, validation: Curve | None) -> bool:
    return bool(train and validation and train.metric == validation.metric and len(train.values) > 1
                and len(validation.values) == len(train.values))  # fmt: skip


def _finding(history: History, feature: int, share: float, *, leak: bool) -> Finding:
    sums, name = history.sums, history.name(feature)
    train, validation = history.curves.train, history.curves.validation
    evidence = [
        Evidence(name="gain_share", value=short(share)),
        Evidence(name="split_share", value=short(sums.splits[feature] / sum(sums.splits.values()))),
        Evidence(name="cover_share", value=short(sums.cover[feature] / max(sum(sums.cover.values()), 1e-300))),
        Evidence(name="hhi_of_gain", value=short(hhi(sums.gain))),
        Evidence(name="hhi_of_splits", value=short(hhi(sums.splits))),
        Evidence(name="thresholds", value=len(history.thresholds.get(feature, ())), unit="distinct"),
        Evidence(name="features", value=len(history.names)),
    ]
    for curve, what in ((train, "training"), (validation, "validation")):
        if curve is not None and curve.values:
            evidence.append(Evidence(name=f"first_{what}_{curve.metric}", value=curve.sign * curve.first))
            evidence.append(Evidence(name=f"{what}_{curve.metric}", value=curve.sign * curve.last))
    implies = (
        "it knows the target in the training data alone: a leak, or an identifier whose order follows the target"
        if leak
        else "either it decides the target, or it leaks it; a validation set of later or other rows tells which"
    )
    return Finding(
        kind="feature_dominance",
        severity=Severity.WARNING if leak else Severity.INFO,
        step=history.rounds[-1].number,
        subject=name,
        source=history.source,
        action=Action.WARN,
        premise=f"{name} has {share:.1%} of the gain"
        + (", training gets better and validation does not follow" if leak else ""),
        implies=implies,
        expected_effect="without it training is worse and validation better, if it leaks",
        evidence=tuple(evidence),
        prescriptions=(Prescription(parameter="features", current=name, proposed="leave out", why=implies),)
        if leak
        else (),
    )
