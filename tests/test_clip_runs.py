"""The clip guard in a run: all kinds of gradients, agc by its paper, torch's own clipping, spike beside it, options."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dynguard import Action, FlowManager
from dynguard.errors import OptionError
from dynguard.events import GradientEvent
from dynguard.testing import call, check_plugin, count_reads
from dynguard.torch.statistics import Statistics
from dynguard_plugins.stability.clip import Clip

Watch = Callable[..., FlowManager]
RULES = ("norm", "zclip", "adagc", "autoclip", "agc")


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
        event = event_of([torch.full((4,), 0.5), torch.full((4,), 1.0)], step=t)
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
