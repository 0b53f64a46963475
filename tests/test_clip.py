"""The clip guard: each rule against its paper's equations, written out here; what it touches, learns and keeps."""

from __future__ import annotations

import contextlib
import copy
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
from torch import nn

from dynguard import Action, FlowManager, Intervention
from dynguard.errors import OptionError
from dynguard.events import GradientEvent
from dynguard.testing import call, check_plugin, count_reads, gradient_event
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


def adjust(clip: Clip, event: GradientEvent, *, on_device: bool = False) -> None:
    """Call the hook; ``on_device`` it takes CPU tensors for ones on a device, and must not read them."""
    with count_reads() if on_device else contextlib.nullcontext() as reads:
        call(clip, "adjust_gradients", event=event)
    assert reads is None or reads.places == []


def step(clip: Clip, number: int, norms: Sequence[float], *, like: str = "torch", rejected: Any = False) -> list[float]:
    """The norms after one step. ``like`` is ``numpy``, ``torch``, or ``device``: tensors that must not be read."""
    was = torch.tensor(rejected) if like == "device" else rejected
    event = gradient_event(number, gradients=gradients_of(norms, like), rejected=was)
    adjust(clip, event, on_device=like == "device")
    return [math.hypot(*map(float, g)) for g in event.gradients]


def drive(clip: Clip, rows: Rows, rejected: Sequence[bool] = (), *, first: int = 0, like: str = "torch") -> np.ndarray:
    """(steps, layers) norms after each step; ``rejected[t]`` says at step t + 1 that step t was taken back."""
    flags = [*rejected, *[False] * (first + len(rows))]
    return np.array([
        step(clip, t, norms, like=like, rejected=t > 0 and flags[t - 1]) for t, norms in enumerate(rows, first)
    ])  # fmt: skip


def history(*, steps: int = 160, seed: int = 0) -> tuple[list[list[float]], list[bool]]:
    """Log-normal norms of three layers with spikes, NaN, infinity, zeros, a shift of level and rejected steps."""
    rng = np.random.default_rng(seed)
    rows = np.exp(rng.normal([0.0, -2.0, 1.0], 0.2, (steps, 3)))
    rows[90:] *= 1.5
    rows[[28, 40, 41, 120]] *= 50.0
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
    rows = [[1.0 + 0.01 * (t % 7), 0.5, 2.0] for t in range(40)]
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
        event = gradient_event(t, gradients={name: g.clone() for name, g in before.items()})
        adjust(clip, event, on_device=on_device)
        for was, now in zip(before.values(), event.gradients, strict=True):
            assert torch.equal(was.isnan(), now.isnan())
            good = ~was.isnan()
            assert (now.abs() <= was.abs())[good].all()
            assert (now * was >= 0)[good & was.isfinite()].all()


# -- norm and torch's own


def odd_gradients() -> dict[str, list[torch.Tensor | None]]:
    torch.manual_seed(3)
    return {
        "float32": [torch.randn(3, 4), torch.randn(5)],
        "small": [torch.randn(3, 4) * 1e-3, torch.randn(5) * 1e-3],
        "none": [torch.randn(3), None, torch.randn(2)],
        "all none": [None, None],
        "zero": [torch.zeros(3), torch.zeros(2)],
        "empty and scalar": [torch.zeros(0), torch.tensor(-3.0), torch.ones(3)],
        "double": [torch.randn(4).double() * 1e3, torch.randn(3).double()],
        "mixed": [torch.randn(3).double(), torch.randn(4, 2), None],
        "complex": [torch.randn(3, dtype=torch.complex64), torch.randn(2, dtype=torch.complex64)],
        "transposed": [torch.randn(6, 4).t(), torch.randn(4, 8)[:, ::2]],
    }


def event_of(gradients: Sequence[torch.Tensor | None], *, scale: Any = None, **more: Any) -> GradientEvent:
    names = tuple(f"layer{i}.weight" for i in range(len(gradients)))
    return GradientEvent(
        step=0, source="", names=names, statistics=Statistics(gradients, scale=scale), gradients=gradients,
        scale=scale, **more,
    )  # fmt: skip


def dense_copy(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None else gradient.to_dense().clone() if gradient.is_sparse else gradient.clone()


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("max_norm", [0.1, 1.0, 1e4])
@pytest.mark.parametrize("name", odd_gradients())
def test_norm_agrees_with_torch(name: str, max_norm: float, on_device: bool) -> None:
    gradients = odd_gradients()[name]
    parameters = []
    for gradient in gradients:
        parameter = nn.Parameter(torch.zeros(()) if gradient is None else torch.zeros_like(gradient))
        parameter.grad = dense_copy(gradient)
        parameters.append(parameter)
    torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    event = event_of(gradients)
    adjust(Clip(max_norm=max_norm), event, on_device=on_device)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None:
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("rule", ["norm", "adagc"])
@pytest.mark.parametrize("on_device", [False, True])
def test_sparse_and_half_gradients_are_scaled_in_place(rule: str, on_device: bool) -> None:
    twice = torch.sparse_coo_tensor(
        torch.tensor([[1, 1, 2]]), torch.tensor([[3.0, 0], [0, 4], [5, 6]]), (4, 2), check_invariants=True
    )
    half = torch.full((9,), 2.0, dtype=torch.float16)
    brain = torch.full((4,), 3.0, dtype=torch.bfloat16)
    gradients = [twice, half, brain]
    before = [(g.to_dense() if g.is_sparse else g.clone()).double() for g in gradients]
    total = math.sqrt(sum(float(g.square().sum()) for g in before))
    event = event_of(gradients)
    adjust(Clip(rule=rule), event, on_device=on_device)
    assert not twice.is_coalesced()
    for was, now in zip(before, gradients, strict=True):
        torch.testing.assert_close(now.to_dense().double(), was / total, rtol=8e-3, atol=0)


def test_gradients_still_multiplied_by_a_loss_scale_are_judged_without_it() -> None:
    scale = torch.tensor(1024.0)
    gradients = [torch.full((4,), 2.0 * 1024), torch.full((9,), 1.0 * 1024)]
    adjust(Clip(max_norm=2.5), event_of(gradients, scale=scale))
    assert [float(g.norm()) / 1024 for g in gradients] == pytest.approx([2.0, 1.5], rel=1e-5)  # 2.5 of hypot(4, 3)


@pytest.mark.parametrize("rule", ["norm", "zclip", "adagc", "autoclip"])
def test_on_the_host_nothing_is_touched_that_needs_no_clipping(rule: str) -> None:
    options = {"norm": {"max_norm": 100.0}, "adagc": {"max_norm": 100.0}, "autoclip": {"percentile": 100}}
    clip = Clip(rule=rule, **options.get(rule, {}))
    for t in range(30):
        event = gradient_event(t, gradients=gradients_of([1.0, 2.0, 3.0], "torch"))
        versions = [g._version for g in event.gradients]
        adjust(clip, event)
        assert [g._version for g in event.gradients] == versions


# -- agc


def agc_by_the_paper(weight: np.ndarray, gradient: np.ndarray, ratio: float = 0.01, eps: float = 1e-3) -> np.ndarray:
    """Row by row (equation 3), vectors as a whole."""
    out = gradient.astype(np.complex128 if np.iscomplexobj(gradient) else np.float64).copy()
    units = [out] if sum(n > 1 for n in out.shape) <= 1 else list(out)
    weights = [weight] if len(units) == 1 else list(weight)
    for g, w in zip(units, weights, strict=True):
        limit = ratio * max(float(np.linalg.norm(w.ravel())), eps)
        size = float(np.linalg.norm(g.ravel()))
        if size > limit:
            g *= limit / size
    return out


SHAPES = {
    "embed.weight": (7, 3), "conv.weight": (5, 2, 3, 3), "conv.bias": (5,), "gain": (), "one.weight": (6, 1),
    "wave.weight": (4, 3), "half.weight": (8, 4), "double.weight": (3, 3), "head.weight": (2, 6), "head.bias": (2,),
}  # fmt: skip


def agc_case() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    torch.manual_seed(5)
    kinds = {"wave.weight": torch.complex64, "half.weight": torch.float16, "double.weight": torch.float64}
    weights, gradients = [], []
    for name, shape in SHAPES.items():
        dtype = kinds.get(name, torch.float32)
        weights.append(torch.randn(shape, dtype=dtype))
        gradients.append(torch.randn(shape, dtype=dtype) * (0.02 * torch.rand(shape[:1] + (1,) * (len(shape) - 1))))
        gradients[-1] = gradients[-1].to(dtype)
    weights[1][2] = 0.0  # a channel that starts at zero
    return weights, gradients


def agc_event(weights: Sequence[Any], gradients: Sequence[Any], scale: Any = None) -> GradientEvent:
    event = event_of(gradients, scale=scale, parameters=[nn.Parameter(w) for w in weights])
    event.names = tuple(SHAPES)
    return event


@pytest.mark.parametrize("scale", [None, 512.0])
@pytest.mark.parametrize("on_device", [False, True])
def test_agc_clips_unit_by_unit_but_not_the_last_layer(on_device: bool, scale: float | None) -> None:
    weights, gradients = agc_case()
    factor = scale or 1.0
    before = [g.clone() for g in gradients]
    scaled = [g * factor for g in gradients]
    event = agc_event(weights, scaled, None if scale is None else torch.tensor(scale))
    adjust(Clip(rule="agc"), event, on_device=on_device)
    changed = 0
    for name, weight, was, now in zip(SHAPES, weights, before, scaled, strict=True):
        expected = was.numpy() if name.startswith("head") else agc_by_the_paper(weight.numpy(), was.numpy())
        np.testing.assert_allclose(now.numpy() / factor, expected, rtol=2e-3 if name == "half.weight" else 1e-5)
        changed += not np.allclose(expected, was.numpy(), rtol=1e-3)
    assert changed >= 6


@pytest.mark.parametrize("on_device", [False, True])
def test_agc_sums_the_lookups_of_a_row_before_it_measures_it(on_device: bool) -> None:
    weight = nn.Parameter(torch.tensor([[3.0, 4.0], [0.6, 0.8], [0.0, 0.0]]))
    rows = torch.tensor([[0, 1, 0, 2]])
    values = torch.tensor([[0.3, 0.0], [1e-4, 0.0], [0.0, 0.4], [1.0, 0.0]])
    sparse = torch.sparse_coo_tensor(rows, values, (3, 2), check_invariants=True)
    event = event_of([sparse], parameters=[weight])
    adjust(Clip(rule="agc", exclude=()), event, on_device=on_device)
    # row 0: 0.5 against 5 x 0.01; row 1 is small enough; row 2 has no weight, so eps x 0.01
    expected = torch.tensor([[0.03, 0.04], [1e-4, 0.0], [1e-5, 0.0]])
    torch.testing.assert_close(sparse.to_dense(), expected)


def test_agc_leaves_alone_what_it_is_told_to() -> None:
    weights, gradients = agc_case()
    before = [g.clone() for g in gradients]
    adjust(Clip(rule="agc", ratio=1e-6, exclude=("conv.*", "gain")), agc_event(weights, gradients))
    same = [name for name, was, now in zip(SHAPES, before, gradients, strict=True) if torch.equal(was, now)]
    assert same == ["conv.weight", "conv.bias", "gain"]


@pytest.mark.parametrize("names", [("body.0.weight", "body.0.bias", "norm.weight"), ("w", "v", "g")])
def test_agc_takes_the_module_of_the_last_matrix_for_the_classifier(names: tuple[str, str, str]) -> None:
    gradients = [torch.ones(3, 3), torch.ones(3), torch.ones(3)]
    event = event_of(gradients, parameters=[nn.Parameter(torch.ones_like(g)) for g in gradients])
    event.names = names
    adjust(Clip(rule="agc"), event)
    left = [name for name, g in zip(names, gradients, strict=True) if torch.equal(g, torch.ones_like(g))]
    assert left == (["body.0.weight", "body.0.bias"] if names[0] != "w" else ["w"])


# -- state


@pytest.mark.parametrize("like", ["torch", "device"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("at", [4, 41, 76, 122])
def test_a_resumed_run_clips_as_one_that_never_stopped(rule: str, at: int, like: str) -> None:
    rows, rejected = history()
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


@pytest.mark.parametrize("rule", LEARNING)
def test_a_regime_that_was_accepted_starts_a_new_baseline(rule: str) -> None:
    rows = [[1.0 + 0.01 * (t % 7), 0.5, 2.0] for t in range(30)]
    clip = Clip(rule=rule, **LEARNING[rule])
    drive(clip, rows)
    call(clip, "on_intervention", intervention=Intervention(step=30, action=Action.PROCEED))
    again = drive(clip, rows, first=30)
    np.testing.assert_array_equal(again, drive(Clip(rule=rule, **LEARNING[rule]), rows))


@pytest.mark.parametrize("rule", LEARNING)
def test_a_step_that_was_rolled_back_is_not_learned(rule: str) -> None:
    rows = [[1.0 + 0.01 * (t % 7), 0.5, 2.0] for t in range(30)]
    clip, other = (Clip(rule=rule, **LEARNING[rule]) for _ in range(2))
    drive(clip, [*rows, [500.0, 500.0, 500.0]])
    drive(other, rows)
    call(clip, "on_intervention", intervention=Intervention(step=30, action=Action.ROLLBACK))
    after = step(clip, 31, [90.0, 90.0, 90.0])
    assert after == pytest.approx(step(other, 30, [90.0, 90.0, 90.0]), rel=1e-6)


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))


def train(
    model: nn.Module, batches: Sequence[Any], before: Callable[[], object], **options: Any
) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **options)
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        before()
        optimizer.step()
    return optimizer


def batches(count: int, *, size: float = 3.0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 4, generator=generator), size * torch.randn(8, 2, generator=generator)) for _ in range(count)
    ]


@pytest.fixture
def flow_of(watch: Watch) -> Callable[..., tuple[FlowManager, torch.optim.Optimizer]]:
    def make(model: nn.Module, *, plugins: Any, **options: Any) -> tuple[FlowManager, torch.optim.Optimizer]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return watch(model, optimizer, plugins=plugins, **options), optimizer

    return make


def run(model: nn.Module, optimizer: torch.optim.Optimizer, data: Sequence[Any], max_norm: float | None = None) -> None:
    for x, y in data:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()


def test_a_guarded_run_with_clip_is_the_users_run_with_torchs_clipping(flow_of: Any) -> None:
    data = batches(40)
    plain, guarded = mlp(), mlp()
    run(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9), data, max_norm=0.5)
    flow, optimizer = flow_of(guarded, plugins=["spike", ("clip", {"max_norm": 0.5})])
    run(guarded, optimizer, data)
    assert flow.findings == []
    for a, b in zip(plain.parameters(), guarded.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert not torch.equal(next(plain.parameters()), next(mlp().parameters()))


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_gets_a_run_through_bad_batches_together_with_spike(flow_of: Any, rule: str) -> None:
    data = batches(80)
    data[30] = (data[30][0].clone().fill_(math.nan), data[30][1])
    data[50] = (data[50][0], data[50][1] * 1e4)
    model = mlp()
    flow, optimizer = flow_of(model, plugins=["spike", ("clip", {"rule": rule})])
    run(model, optimizer, data)
    assert [i.step for i in flow.interventions] == [30, 50]
    assert all(p.isfinite().all() for p in model.parameters())
    (section,) = [s for s in flow.summarize() if s.title == "Gradient clipping"]
    assert section.text.startswith(f"Rule {rule}")
    ((source, steps, clipped, least),) = section.tables[0].rows
    assert (source, steps) == ("", 78)
    assert 0 < clipped <= steps
    assert 0 < least < 1


def test_a_clean_step_with_clip_reads_the_device_no_oftener_than_without(flow_of: Any) -> None:
    counts = []
    for plugins in (
        ["spike"],
        ["spike", ("clip", {"rule": "zclip", "warmup": 3})],
        ["spike", ("clip", {"rule": "adagc"})],
    ):
        model = mlp()
        _, optimizer = flow_of(model, plugins=plugins)
        run(model, optimizer, batches(5))
        nn.functional.mse_loss(model(torch.ones(3, 4)), torch.ones(3, 2)).backward()
        with count_reads() as reads:
            optimizer.step()
        counts.append(len(reads))
    assert counts == [counts[0]] * 3


def test_gradients_that_the_verdict_has_clipped_are_measured_again(flow_of: Any, make_probe: Any) -> None:
    model = mlp()
    probe = make_probe(fire_at={2: Action.CLIP})  # clips each of the four gradients to norm 1
    _, optimizer = flow_of(model, plugins=[probe, ("clip", {"max_norm": 1.5})])
    total = []
    for x, y in batches(4, size=500.0):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        total.append(math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)))
    assert min(probe.norms[2]) > 1.0  # so that step 2 comes to 2 by the verdict, and to 1.5 by the guard
    assert total == pytest.approx([1.5] * 4, rel=1e-4)


def test_a_resumed_flow_brings_the_baseline_along(flow_of: Any) -> None:
    data = batches(30)
    plugins = ["spike", ("clip", {"rule": "adagc", "warmup": 5})]
    whole = mlp()
    _, optimizer = flow_of(whole, plugins=plugins)
    run(whole, optimizer, data)
    part = mlp()
    flow, optimizer = flow_of(part, plugins=plugins)
    run(part, optimizer, data[:17])
    saved = copy.deepcopy((flow.state_dict(), part.state_dict(), optimizer.state_dict()))
    flow.close()
    later = mlp(seed=9)
    flow, optimizer = flow_of(later, plugins=plugins)
    flow.load_state_dict(saved[0])
    later.load_state_dict(saved[1])
    optimizer.load_state_dict(saved[2])
    run(later, optimizer, data[17:])
    for a, b in zip(whole.parameters(), later.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


# -- options and contract


@pytest.mark.parametrize("arrays", ["torch", "numpy"])
@pytest.mark.parametrize("rule", RULES)
def test_the_contract_is_kept(rule: str, arrays: Any) -> None:
    check_plugin(Clip, options={"rule": rule}, arrays=arrays)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"rule": "nrom"}, "'zclip'"),
        ({"max_norm": 0.0}, "greater than 0"),
        ({"max_norm": math.nan}, "greater than 0"),
        ({"rule": "zclip", "decay": 1.0}, "less than 1"),
        ({"rule": "autoclip", "percentile": 101}, "less than or equal to 100"),
        ({"rule": "norm", "warmup": 5}, "'warmup' is not one of rule 'norm', which has: max_norm"),
        ({"rule": "agc", "max_norm": 1.0}, "which has: ratio, eps, exclude"),
        ({"warmpu": 5}, "Did you mean 'warmup'"),
    ],
)
def test_a_wrong_option_is_told(options: dict[str, Any], told: str) -> None:
    with pytest.raises(OptionError, match="plugin 'Clip'") as error:
        Clip(**options)
    assert told in str(error.value)
