"""The clip guard: each rule against its paper's equations, written out here; what it touches, learns and keeps."""

from __future__ import annotations

import contextlib
import json
import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynguard import Action, FlowManager, Intervention
from dynguard.events import GradientEvent
from dynguard.testing import call, count_reads, gradient_event
from dynguard.torch.statistics import Statistics
from dynguard_plugins.stability.clip import Clip

Watch = Callable[..., FlowManager]
Rows = Sequence[Sequence[float]]
RULES = ("norm", "zclip", "adagc", "autoclip", "agc")
LEARNING: dict[str, dict[str, Any]] = {
    "zclip": {"warmup": 10}, "adagc": {"warmup": 10, "max_norm": 2.0}, "autoclip": {"history": 30, "percentile": 35},
}  # fmt: skip
NAMES = ("a", "b", "c")


# -- driving a rule by hand


def gradients_of(norms: Sequence[float], like: str) -> dict[str, Any]:
    """One gradient of two entries per layer, with that norm; NaN and infinity as one entry."""
    rows = {
        name: [norm * 0.6, norm * 0.8] if math.isfinite(norm) else [norm, 1.0]
        for name, norm in zip(NAMES, norms, strict=False)
    }
    if like == "numpy":
        return {name: np.array(row, dtype=np.float32) for name, row in rows.items()}
    return {name: torch.tensor(row) for name, row in rows.items()}


def adjust(clip: Clip, *events: GradientEvent, on_device: bool = False) -> None:
    """Call the hook; ``on_device`` it takes CPU tensors for ones on a device, and must not read them."""
    with count_reads() if on_device else contextlib.nullcontext() as reads:
        for event in events:
            call(clip, "adjust_gradients", event=event)
    assert reads is None or reads.places == []


def event_of(gradients: Sequence[torch.Tensor | None], *, scale: Any = None, **more: Any) -> GradientEvent:
    """An event of tensors with the statistics of a run."""
    more = {"step": 0, "names": tuple(f"layer{i}.weight" for i in range(len(gradients)))} | more
    return GradientEvent(
        source="", statistics=Statistics(gradients, scale=scale), gradients=gradients, scale=scale, **more
    )


def drive(clip: Clip, rows: Rows, rejected: Sequence[bool] = (), *, first: int = 0, like: str = "torch") -> np.ndarray:
    """(steps, layers) norms after each step.

    ``rejected[t]`` says at step t + 1 that step t was taken back. ``like`` is ``numpy``, ``torch``, or ``device``:
    tensors that must not be read.
    """
    flags = [*rejected, *[False] * (first + len(rows))]
    events = []
    for t, norms in enumerate(rows, first):
        was: Any = t > 0 and flags[t - 1]
        gradients = gradients_of(norms, like)
        if like == "numpy":
            events.append(gradient_event(t, gradients=gradients, rejected=was))
        else:
            was = torch.tensor(was) if like == "device" else was
            weights = [torch.ones(2)] * len(gradients)
            events.append(
                event_of(list(gradients.values()), step=t, names=tuple(gradients), rejected=was, parameters=weights)
            )
    adjust(clip, *events, on_device=like == "device")
    return np.array([[math.hypot(*map(float, g)) for g in event.gradients] for event in events])


def step(clip: Clip, number: int, norms: Sequence[float], *, rejected: bool = False) -> list[float]:
    """The norms after one step."""
    flags = [False] * (number - 1) + [rejected]
    return list(drive(clip, [norms], flags, first=number)[0])


def history(*, steps: int = 160, seed: int = 0) -> tuple[list[list[float]], list[bool]]:
    """Log-normal norms of three layers with spikes, NaN, infinity, zeros, a shift of level and rejected steps."""
    rng = np.random.default_rng(seed)
    rows = np.exp(rng.normal([0.0, -2.0, 1.0], 0.2, (steps, 3)))
    rows[90:] *= 1.5
    rows[[28, 40, 41, -40]] *= 50.0
    rows[70, 1] *= 300.0
    rows[50, 0] = math.nan
    rows[3, 2] = math.inf
    rows[[7, 60], 1] = 0.0
    rows[61] = 0.0
    rejected = [t in (8, 40, 75, 76, 121) for t in range(steps)]
    return rows.tolist(), rejected


def finite(value: float) -> bool:
    return 0.0 < value < math.inf


# -- the papers, written out


def zclip_by_the_paper(
    rows: Rows, rejected: Sequence[bool], *, decay: float = 0.97, z_threshold: float = 2.5, warmup: int = 25
) -> np.ndarray:
    start: list[float] = []
    mean = deviation = 0.0
    out = []
    for row, undone in zip(rows, rejected, strict=True):
        g = math.sqrt(sum(n * n for n in row))
        clipped = g
        if len(start) == warmup and finite(g):
            z = (g - mean) / deviation
            if z > z_threshold:
                clipped = mean + z_threshold**2 / z * deviation
        out.append([n * clipped / g if finite(g) else n for n in row])
        if not finite(g) or undone:
            continue
        if len(start) < warmup:
            start.append(clipped)
            mean, deviation = float(np.mean(start)), float(np.std(start))
        else:
            mean = decay * mean + (1 - decay) * clipped
            deviation = math.sqrt(decay * deviation**2 + (1 - decay) * (clipped - mean) ** 2)
    return np.array(out)


def adagc_by_the_paper(
    rows: Rows, rejected: Sequence[bool], *, ratio: float = 1.05, decay: float = 0.98, warmup: int = 100,
    max_norm: float = 1.0,
) -> np.ndarray:  # fmt: skip
    gamma, seen = [math.inf] * 3, [0] * 3
    out = []
    for row, undone in zip(rows, rejected, strict=True):
        g = math.sqrt(sum(n * n for n in row))
        after = []
        for i, n in enumerate(row):
            if seen[i] < warmup:
                h = min(max_norm / g, 1.0) if finite(g) else 1.0
            else:
                h = min(ratio * gamma[i] / n, 1.0) if finite(n) else 1.0
            after.append(h * n)
        out.append(after)
        for i, n in enumerate(after):
            if finite(n) and finite(g) and not undone:
                gamma[i] = min(gamma[i], n) if seen[i] < warmup else decay * gamma[i] + (1 - decay) * n
                seen[i] += 1
    return np.array(out)


def autoclip_by_the_paper(
    rows: Rows, rejected: Sequence[bool], *, percentile: float = 10.0, history: int = 10_000
) -> np.ndarray:
    kept: list[float] = []
    out = []
    for row, undone in zip(rows, rejected, strict=True):
        g = math.sqrt(sum(n * n for n in row))
        if not finite(g):
            out.append(list(row))
            continue
        h = min(np.percentile([*kept, g], percentile) / g, 1.0)
        out.append([h * n for n in row])
        if not undone:
            kept = [*kept, g][-history:]
    return np.array(out)


def norm_by_the_paper(rows: Rows, rejected: Sequence[bool], *, max_norm: float = 1.0) -> np.ndarray:
    out = []
    for row in rows:
        g = math.sqrt(sum(n * n for n in row))
        h = max_norm / g if finite(g) and g > max_norm else 1.0
        out.append([h * n for n in row])
    return np.array(out)


PAPERS: dict[str, Callable[..., np.ndarray]] = {
    "norm": norm_by_the_paper,
    "zclip": zclip_by_the_paper,
    "adagc": adagc_by_the_paper,
    "autoclip": autoclip_by_the_paper,
}


def is_touched(rows: Rows, after: np.ndarray) -> np.ndarray:
    before = np.array(rows)
    return (after < before * (1 - 1e-3)).any(axis=1)


@pytest.mark.parametrize("like", ["numpy", "torch", "device"])
@pytest.mark.parametrize("rule", PAPERS)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_rule_does_what_its_paper_says(rule: str, like: str, seed: int) -> None:
    rows, rejected = history(seed=seed)
    after = drive(Clip(rule=rule), rows, rejected, like=like)
    expected = PAPERS[rule](rows, rejected)
    np.testing.assert_allclose(after, expected, rtol=2e-4)
    assert 3 < is_touched(rows, after).sum() < len(rows)


@pytest.mark.parametrize("like", ["torch", "device"])
@pytest.mark.parametrize("rule", LEARNING)
def test_a_rule_follows_its_options(rule: str, like: str) -> None:
    rows, rejected = history(seed=2)
    options = LEARNING[rule]
    if rule == "autoclip" and like == "device":  # a slot of the ring is used up by what is not kept
        rejected = [False] * len(rows)
        rows = [row if all(map(finite, row)) else [1.0, 1.0, 1.0] for row in rows]
    after = drive(Clip(rule=rule, **options), rows, rejected, like=like)
    np.testing.assert_allclose(after, PAPERS[rule](rows, rejected, **options), rtol=2e-4)


@pytest.mark.parametrize("rule", ["zclip", "autoclip"])
def test_an_absolute_limit_can_be_put_on_top_of_a_learned_one(rule: str) -> None:
    rows, rejected = history(seed=3)
    learned = np.array(PAPERS[rule](rows, rejected))
    total = np.sqrt((learned**2).sum(axis=1, keepdims=True))
    with np.errstate(all="ignore"):
        expected = learned * np.where(np.isfinite(total) & (total > 2.5), 2.5 / total, 1.0)
    np.testing.assert_allclose(drive(Clip(rule=rule, max_norm=2.5), rows, rejected), expected, rtol=2e-4)


# -- poison


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("rule", LEARNING)
def test_what_is_not_finite_is_left_alone_and_forgotten(rule: str, poison: float) -> None:
    rows = [[1.0 + 0.01 * (t % 7), 0.5, 2.0] for t in range(40)]
    options = LEARNING[rule] | ({"max_norm": 100.0} if rule == "adagc" else {})
    clean = Clip(rule=rule, **options)
    drive(clean, rows)
    poisoned = Clip(rule=rule, **options)
    mixed = [*rows[:20], [poison, 0.5, 2.0], *rows[20:]]
    after = drive(poisoned, mixed)
    assert after[20][1:].tolist() == pytest.approx([0.5, 2.0])
    tail = [[90.0, 0.5, 200.0]]
    np.testing.assert_allclose(drive(poisoned, tail, first=41), drive(clean, tail, first=40), rtol=1e-6)


@pytest.mark.parametrize("like", ["torch", "device"])
@pytest.mark.parametrize("rule", LEARNING)
def test_a_rejected_step_never_enters_a_baseline(rule: str, like: str) -> None:
    rows = [[1.0 + 0.06 * (t * 0.618 % 1), 0.5, 2.0] for t in range(40)]
    tail = [[90.0, 0.5, 200.0]]

    def after(extra: Rows, *, rejected: bool = False) -> np.ndarray:
        clip = Clip(rule=rule, **LEARNING[rule] | ({"history": 100} if rule == "autoclip" else {}))
        drive(clip, [*rows, *extra], like=like)
        flags = [False] * 40 + [rejected]
        return drive(clip, tail, flags, first=40 + len(extra), like=like)

    expected = after([])
    for odd in ([900.0, 900.0, 900.0], [1.06, 0.5, 2.0]):
        np.testing.assert_allclose(after([odd], rejected=True), expected, rtol=1e-6)
    assert not np.allclose(after([[1.06, 0.5, 2.0]]), expected, rtol=1e-6)


@pytest.mark.parametrize("rule", LEARNING)
def test_a_skip_in_between_rejects_itself_and_not_the_step_before(rule: str) -> None:
    rows, _ = history(seed=4)
    rows = [row for row in rows if all(map(finite, row))]
    gap, none = Clip(rule=rule, **LEARNING[rule]), Clip(rule=rule, **LEARNING[rule])
    drive(none, rows[:50])
    drive(gap, rows[:50])
    # step 50 was skipped, so the guard isn't called; at step 51 the last step was rejected
    assert step(gap, 51, rows[50], rejected=True) == pytest.approx(step(none, 50, rows[50]), rel=1e-6)


@pytest.mark.parametrize("like", ["torch", "device"])
def test_a_step_without_gradients_does_not_starve_a_layer(like: str) -> None:
    clip = Clip(rule="adagc", warmup=5, max_norm=100.0)
    drive(clip, [[1.0, 0.0, 2.0]] * 20, like=like)
    after = drive(clip, [[1.0, 3.0, 2.0]] * 10, first=20, like=like)
    np.testing.assert_allclose(after, [[1.0, 3.0, 2.0]] * 10, rtol=1e-5)
    assert drive(clip, [[1.0, 30.0, 2.0]], first=30, like=like)[0, 1] == pytest.approx(1.05 * 3.0, rel=1e-4)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(RULES),
    st.booleans(),
    st.lists(
        st.tuples(*[st.one_of(st.floats(0, 2.0**90), st.sampled_from([math.nan, math.inf, 0.0, 1e-44, 3e38]))] * 3),
        min_size=1,
        max_size=25,
    ),
)
def test_no_gradient_ever_grows_turns_or_becomes_nan(
    rule: str, on_device: bool, rows: list[tuple[float, float, float]]
) -> None:
    short = {"warmup": 2} if rule in ("zclip", "adagc") else {"exclude": ()} if rule == "agc" else {}
    clip = Clip(rule=rule, **LEARNING.get(rule, {}) | short)
    for t, norms in enumerate(rows):
        before = gradients_of(norms, "torch")
        weights = [torch.ones(2)] * 3
        event = event_of([g.clone() for g in before.values()], step=t, names=NAMES, parameters=weights)
        adjust(clip, event, on_device=on_device)
        for was, now in zip(before.values(), event.gradients, strict=True):
            assert torch.equal(was.isnan(), now.isnan())
            good = ~was.isnan()
            assert (now.abs() <= was.abs())[good].all()
            assert (now * was >= 0)[good & was.isfinite()].all()


# -- state


@pytest.mark.parametrize("like", ["torch", "device"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("at", [4, 41, 76])
def test_a_resumed_run_clips_as_one_that_never_stopped(rule: str, at: int, like: str) -> None:
    rows, rejected = history(steps=100)
    options = LEARNING.get(rule, {})
    if rule == "agc":
        options = {"exclude": ()}
    whole, first, second = (Clip(rule=rule, **options) for _ in range(3))
    expected = drive(whole, rows, rejected, like=like)
    drive(first, rows[:at], rejected, like=like)
    state = first.state_dict()
    second.load_state_dict(pickle.loads(pickle.dumps(state)))
    assert second.state_dict() == state
    json.dumps(state)
    np.testing.assert_array_equal(drive(second, rows[at:], rejected, first=at, like=like), expected[at:])
    assert second.state_dict() == whole.state_dict()


@pytest.mark.parametrize("rule", LEARNING)
def test_a_run_may_move_to_a_device_and_back(rule: str) -> None:
    rows, rejected = history()
    options = LEARNING[rule] | ({"history": 1000} if rule == "autoclip" else {})
    expected = PAPERS[rule](rows, rejected, **options)
    clip = Clip(rule=rule, **options)
    parts = [
        drive(clip, rows[a:b], rejected, first=a, like=like)
        for a, b, like in ((0, 45, "torch"), (45, 100, "device"), (100, 160, "numpy"))
    ]
    np.testing.assert_allclose(np.concatenate(parts), expected, rtol=3e-4)


@pytest.mark.parametrize("like", ["numpy", "torch", "device"])
def test_a_layer_that_joins_late_leaves_the_others_as_they_are(like: str) -> None:
    clip = Clip(rule="adagc", warmup=5, max_norm=100.0)
    drive(clip, [[1.0, 2.0]] * 20, like=like)
    after = drive(clip, [[10.0, 2.0, 7.0], [1.0, 20.0, 7.0]], first=20, like=like)
    assert after[0].tolist() == pytest.approx([1.05, 2.0, 7.0], rel=1e-4)
    assert after[1, 1] == pytest.approx(2.1, rel=1e-3)


def test_adagc_finds_its_layers_by_name() -> None:
    clip = Clip(rule="adagc", warmup=5, max_norm=100.0)
    for t in range(10):
        step(clip, t, [1.0, 2.0, 4.0])
    other = Clip(rule="adagc", warmup=5, max_norm=100.0)
    other.load_state_dict(clip.state_dict())
    event = gradient_event(
        10, gradients={"c": torch.tensor([50.0]), "new": torch.tensor([9.0]), "a": torch.tensor([50.0])}
    )
    adjust(other, event)
    assert [float(g) for g in event.gradients] == pytest.approx([4 * 1.05, 9.0, 1.05])


def test_the_state_of_another_rule_is_left_aside(caplog: pytest.LogCaptureFixture) -> None:
    clip = Clip(rule="zclip", warmup=2)
    clip.load_state_dict(Clip(rule="autoclip").state_dict())
    assert "starts afresh" in caplog.text
    assert clip.state_dict() == Clip(rule="zclip").state_dict()


def test_sources_do_not_share_a_baseline() -> None:
    clip = Clip(rule="zclip", warmup=3)
    for t in range(6):
        for source, norm in (("g", 1.0 + 0.1 * (t % 2)), ("d", 100.0 + t % 2)):
            adjust(clip, gradient_event(t, norms={"w": norm}, source=source))
    event = gradient_event(6, norms={"w": 50.0}, source="g")
    adjust(clip, event)
    assert float(event.gradients[0][0]) < 2.0
    event = gradient_event(6, norms={"w": 100.5}, source="d")
    adjust(clip, event)
    assert float(event.gradients[0][0]) == 100.5


# -- what the verdict does


@pytest.mark.parametrize("like", ["torch", "device"])
@pytest.mark.parametrize("rule", LEARNING)
def test_a_regime_that_was_accepted_starts_a_new_baseline(rule: str, like: str) -> None:
    rows = [[1.0 + 0.01 * (t % 7), 0.5, 2.0] for t in range(30)]
    clip = Clip(rule=rule, **LEARNING[rule])
    drive(clip, rows, like=like)
    call(clip, "on_intervention", intervention=Intervention(step=30, action=Action.PROCEED))
    again = drive(clip, rows, first=30, like=like)
    np.testing.assert_array_equal(again, drive(Clip(rule=rule, **LEARNING[rule]), rows, like=like))


@pytest.mark.parametrize("rule", LEARNING)
def test_a_step_that_was_rolled_back_is_not_learned(rule: str) -> None:
    rows = [[1.0 + 0.01 * (t % 7), 0.5, 2.0] for t in range(30)]
    clip, other = (Clip(rule=rule, **LEARNING[rule]) for _ in range(2))
    drive(clip, [*rows, [500.0, 500.0, 500.0]])
    drive(other, rows)
    call(clip, "on_intervention", intervention=Intervention(step=30, action=Action.ROLLBACK))
    after = step(clip, 31, [90.0, 90.0, 90.0])
    assert after == pytest.approx(step(other, 30, [90.0, 90.0, 90.0]), rel=1e-6)
