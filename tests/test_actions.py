"""The arbiter: one verdict from many findings, bounded skipping, escalation."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from dynguard import Action, Finding, Severity
from dynguard.actions import Arbiter, Policy

ORDER = ["proceed", "warn", "clip", "skip", "rollback", "raise"]


def finding(kind: str = "grad_spike", action: Action = Action.SKIP, **more: object) -> Finding:
    return Finding(kind=kind, action=action, **more)  # type: ignore[arg-type]


def test_actions_are_ordered_by_how_far_they_go() -> None:
    assert [a.value for a in sorted(set(Action))] == ORDER
    for low, high in itertools.pairwise(Action):
        assert low < high
        assert high > low
        assert low <= high
        assert not high <= low
    assert [a.intervenes for a in Action] == [False, False, True, True, True, True]


def test_severities_are_ordered() -> None:
    assert [s.value for s in sorted(set(Severity))] == ["info", "warning", "error", "critical"]


@given(st.lists(st.sampled_from(list(Action)), min_size=1))
def test_the_farthest_action_wins_and_only_that_one(actions: list[Action]) -> None:
    verdict = Arbiter(Policy()).decide([finding(action=a) for a in actions], can_roll_back=True)
    assert verdict.action.value == ORDER[max(ORDER.index(a.value) for a in actions)]


def test_nothing_found_is_proceed() -> None:
    assert Arbiter(Policy()).decide([]).action is Action.PROCEED


def test_finite_spikes_in_a_row_become_the_new_regime() -> None:
    arbiter = Arbiter(Policy(max_consecutive_skips=3))
    actions = [arbiter.decide([finding()]).action for _ in range(8)]
    assert actions == [Action.SKIP] * 3 + [Action.CLIP] * 3 + [Action.PROCEED, Action.SKIP]


@pytest.mark.parametrize("kind", ["nan_grad", "inf_grad", "nan_loss", "inf_loss"])
def test_non_finite_steps_in_a_row_are_never_accepted(kind: str) -> None:
    arbiter = Arbiter(Policy(max_consecutive_skips=2, exhausted="accept"))
    actions = [arbiter.decide([finding(kind)]).action for _ in range(3)]
    assert actions == [Action.SKIP, Action.SKIP, Action.RAISE]
    arbiter = Arbiter(Policy(max_consecutive_skips=2))
    actions = [arbiter.decide([finding(kind)], can_roll_back=True).action for _ in range(3)]
    assert actions == [Action.SKIP, Action.SKIP, Action.ROLLBACK]


def test_a_clean_step_ends_the_row() -> None:
    arbiter = Arbiter(Policy(max_consecutive_skips=2))
    for _ in range(10):
        assert arbiter.decide([finding("nan_grad")]).action is Action.SKIP
        arbiter.clean()


def test_empty_batches_may_be_skipped_for_ever() -> None:
    arbiter = Arbiter(Policy(max_consecutive_skips=2))
    assert {arbiter.decide([finding("empty_batch")]).action for _ in range(9)} == {Action.SKIP}


@pytest.mark.parametrize(("exhausted", "action"), [("raise", Action.RAISE), ("rollback", Action.ROLLBACK)])
def test_the_policy_says_what_follows_too_many_skips(exhausted: str, action: Action) -> None:
    arbiter = Arbiter(Policy(max_consecutive_skips=1, exhausted=exhausted))  # type: ignore[arg-type]
    assert arbiter.decide([finding()], can_roll_back=True).action is Action.SKIP
    assert arbiter.decide([finding()], can_roll_back=True).action is action


def test_a_rollback_without_a_snapshot_skips_and_says_so() -> None:
    verdict = Arbiter(Policy()).decide([finding(action=Action.ROLLBACK)])
    assert verdict.action is Action.SKIP
    assert "no snapshot" in verdict.reason


def test_a_rollback_is_not_followed_by_another_at_once() -> None:
    arbiter = Arbiter(Policy(cooldown=3))
    asks = [finding("nonfinite_param", action=Action.ROLLBACK)]
    actions = [arbiter.decide(asks, can_roll_back=True).action for _ in range(5)]
    assert actions == [Action.ROLLBACK] + [Action.SKIP] * 3 + [Action.ROLLBACK]
    for _ in range(3):
        arbiter.clean()
    assert arbiter.decide(asks, can_roll_back=True).action is Action.ROLLBACK


def test_observe_mode_says_what_it_would_have_done() -> None:
    arbiter = Arbiter(Policy(mode="observe"))
    verdict = arbiter.decide([finding(action=Action.RAISE)])
    assert (verdict.action, verdict.carried_out) == (Action.RAISE, False)


def test_a_wrong_policy_is_refused() -> None:
    with pytest.raises(ValidationError):
        Policy(max_consecutive_skips=0)
    with pytest.raises(ValidationError):
        Policy(mode="guess")  # type: ignore[arg-type]
