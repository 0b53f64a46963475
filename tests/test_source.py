"""The torch source: which gradients it sees, by which names, with which norms, and what a verdict does to a step."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

from dynguard import Action, FlowManager
from dynguard.errors import ClosedError, SetupError
from dynguard.torch import statistics
from dynguard.torch.names import clean, named_parameters

Watch = Callable[..., FlowManager]
F = nn.functional


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def backward(model: nn.Module, *, width: int = 4) -> torch.Tensor:
    loss = model(torch.randn(6, width)).pow(2).mean()
    loss.backward()
    return loss


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    return [t.detach().clone() for t in [*model.parameters(), *state]]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# -- norms


def reference(gradient: torch.Tensor | None) -> float:
    """L2 norm in float64 by plain arithmetic."""
    if gradient is None:
        return 0.0
    full = gradient.to_dense() if gradient.layout is not torch.strided else gradient
    values = torch.view_as_real(full).flatten() if full.is_complex() else full.flatten()
    return math.hypot(*values.detach().tolist())


def make_gradients() -> dict[str, list[torch.Tensor | None]]:
    torch.manual_seed(1)
    row = torch.sparse_coo_tensor(
        torch.tensor([[1, 1, 2]]), torch.tensor([[1.0, 2], [3, 4], [5, 6]]), (4, 2), check_invariants=True
    )
    return {
        "float32": [torch.randn(3, 4), torch.randn(5)],
        "none": [torch.randn(3), None, torch.randn(2)],
        "all none": [None, None],
        "fp16 whose square overflows": [torch.full((300,), 60000.0, dtype=torch.float16)],
        "bf16": [torch.randn(7).bfloat16(), torch.randn(3).bfloat16()],
        "double 1e200": [torch.full((3,), 1e200, dtype=torch.float64), torch.ones(2)],
        "complex": [torch.randn(3, dtype=torch.complex64), torch.randn(2)],
        "sparse with duplicates": [row, torch.ones(2)],
        "empty": [torch.zeros(0), torch.ones(3)],
        "scalar": [torch.tensor(-3.0)],
        "mixed": [torch.randn(3).half(), torch.randn(4).bfloat16(), torch.randn(5), torch.randn(2).double(), None, row],
    }


@pytest.mark.parametrize("name", make_gradients())
def test_norms_are_those_of_plain_arithmetic(name: str) -> None:
    gradients = make_gradients()[name]
    plain = name in ("float32", "none", "bf16", "fp16 whose square overflows", "sparse with duplicates")
    for flag in {False, plain}:
        norms = statistics.norms(gradients, plain=flag)
        assert norms.dtype in (torch.float32, torch.float64)
        assert norms.tolist() == pytest.approx([reference(g) for g in gradients], rel=1e-5)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
            st.lists(st.floats(-6e4, 6e4), max_size=6),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_norms_and_extremes_of_any_finite_gradients(spec: list[tuple[torch.dtype, list[float]]]) -> None:
    # The square of what is below 1e-19 is nothing in float32.
    gradients = [torch.tensor(values, dtype=torch.float64).to(dtype) for dtype, values in spec]
    numbers = statistics.Statistics(gradients)
    assert numbers.norms.tolist() == pytest.approx([reference(g) for g in gradients], rel=1e-4, abs=1e-18)
    largest = [max((abs(float(v)) for v in g), default=0.0) for g in gradients]
    assert numbers.max_abs.tolist() == pytest.approx(largest, rel=1e-6)
    assert float(numbers.global_norm) == pytest.approx(
        math.hypot(*(reference(g) for g in gradients)), rel=1e-4, abs=1e-18
    )


def test_non_finite_entries_show_in_the_norm_of_their_layer_alone() -> None:
    gradients = [torch.ones(3), torch.tensor([1.0, math.nan]), torch.tensor([math.inf, 1.0])]
    one, nan, inf = statistics.norms(gradients, plain=True).tolist()
    assert one == pytest.approx(math.sqrt(3))
    assert math.isnan(nan)
    assert inf == math.inf


def test_the_scale_of_a_fused_optimizer_is_taken_out() -> None:
    numbers = statistics.Statistics([torch.full((4,), 1024.0)], scale=torch.tensor(512.0))
    assert numbers.norms.tolist() == [4.0]
    assert numbers.max_abs.tolist() == [2.0]


def test_rms_ratio_and_cosine_against_closed_forms() -> None:
    gradient, last = torch.tensor([3.0, 4.0]), torch.tensor([4.0, -3.0])
    numbers = statistics.Statistics(
        [gradient, None], moments=lambda: [torch.tensor([9.0, 4.0]), None], previous=[last, None]
    )
    assert numbers.rms_ratio.tolist()[0] == pytest.approx(math.sqrt((1 + 4) / 2))
    assert numbers.cosine.tolist()[0] == pytest.approx(0.0, abs=1e-7)
    assert math.isnan(numbers.rms_ratio.tolist()[1])


# -- names


def test_names_are_those_of_the_model_in_its_order(watch: Watch, probe: Any) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(list(reversed(list(model.parameters()))), lr=0.1)
    watch(model, optimizer, plugins=[probe])
    backward(model)
    optimizer.step()
    assert probe.names == [tuple(name for name, _ in model.named_parameters())]


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = torch.compile(nn.Linear(4, 2), backend="eager")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.b(self.a(x))
        return out


def test_wrappers_do_not_show_in_names() -> None:
    plain = ["a.weight", "a.bias", "b.weight", "b.bias"]
    for wrap in (lambda m: m, lambda m: torch.compile(m, backend="eager"), nn.DataParallel):
        assert [name for name, _ in named_parameters(wrap(Wrapped()))] == plain
    assert clean("layers._orig_mod.0._checkpoint_wrapped_module.weight") == "layers.0.weight"


def test_a_module_that_is_really_called_module_keeps_its_name() -> None:
    holder = nn.ModuleDict({"module": nn.Linear(2, 2)})
    assert [name for name, _ in named_parameters(holder)] == ["module.weight", "module.bias"]


def test_a_tied_weight_counts_once(watch: Watch, probe: Any) -> None:
    model = nn.ModuleDict({"emb": nn.Embedding(5, 4), "out": nn.Linear(4, 5, bias=False)})
    model["out"].weight = model["emb"].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch(model, optimizer, plugins=[probe])
    model["out"](model["emb"](torch.tensor([1, 2]))).pow(2).sum().backward()
    optimizer.step()
    assert probe.names == [("emb.weight",)]


def test_several_models_are_prefixed_by_their_keys(watch: Watch, probe: Any) -> None:
    models = {"g": nn.Linear(2, 2, bias=False), "d": nn.Linear(2, 1, bias=False)}
    optimizers = {
        "gen": torch.optim.SGD(models["g"].parameters(), lr=0.1),
        "dis": torch.optim.Adam(models["d"].parameters()),
    }
    watch(models, optimizers, plugins=[probe])
    models["d"](models["g"](torch.randn(3, 2))).sum().backward()
    optimizers["dis"].step()
    optimizers["gen"].step()
    optimizers["gen"].step()
    assert probe.names == [("d.weight",), ("g.weight",), ("g.weight",)]
    assert probe.sources == ["dis", "gen", "gen"]
    assert probe.steps == [0, 0, 1]


# -- which gradients


def test_frozen_and_unused_parameters_have_norm_zero_and_keep_their_place(watch: Watch, probe: Any) -> None:
    model = mlp()
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch(model, optimizer, plugins=[probe])
    backward(model)
    expected = [reference(p.grad) for p in model.parameters()]
    optimizer.step()
    assert probe.norms[0] == pytest.approx(expected, rel=1e-5)
    assert probe.norms[0][1] == 0


def test_only_the_gradient_at_the_optimizers_step_is_judged_under_accumulation(watch: Watch, probe: Any) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    flow = watch(model, optimizer, plugins=[probe])
    for _ in range(3):
        for _ in range(4):
            flow.observe(loss=backward(model))
        total = [reference(p.grad) for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        assert probe.norms[-1] == pytest.approx(total, rel=1e-5)
    assert probe.steps == [0, 1, 2]
    assert probe.micro == [4, 4, 4]


def test_sparse_embedding_gradients(watch: Watch, probe: Any) -> None:
    model = nn.Embedding(10, 3, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    watch(model, optimizer, plugins=[probe, "spike"])
    model(torch.tensor([1, 1, 2])).pow(2).sum().backward()
    assert model.weight.grad is not None
    expected = reference(model.weight.grad)
    optimizer.step()
    assert probe.norms[0] == pytest.approx([expected], rel=1e-5)


def test_parameter_groups_added_later_are_watched_and_appended(watch: Watch, probe: Any) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    watch(model, optimizer, plugins=[probe, "spike"])
    backward(model)
    optimizer.step()
    optimizer.add_param_group({"params": list(model[0].parameters())})
    extra = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [extra]})
    backward(model)
    optimizer.step()
    assert probe.names[0] == ("2.weight", "2.bias")
    assert probe.names[1] == ("2.weight", "2.bias", "0.weight", "0.bias", "group2.param0")
    assert probe.norms[1][:4] == pytest.approx(
        [reference(p.grad) for p in (*model[2].parameters(), *model[0].parameters())]
    )


def test_an_optimizer_made_anew_for_the_same_model_is_still_watched(watch: Watch, probe: Any) -> None:
    model = mlp()
    first = torch.optim.SGD(model.parameters(), lr=0.1)
    watch(model, first, plugins=[probe])
    backward(model)
    first.step()
    second = torch.optim.Adam(model.parameters(), lr=0.1)
    backward(model)
    second.step()
    other = mlp()
    stranger = torch.optim.SGD(other.parameters(), lr=0.1)
    backward(other)
    stranger.step()
    assert probe.steps == [0, 1]


# -- closures


@pytest.mark.parametrize("by_keyword", [False, True])
def test_a_closure_is_judged_after_its_backward_and_its_loss_returned(
    watch: Watch, probe: Any, by_keyword: bool
) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch(model, optimizer, plugins=[probe])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        return backward(model)

    loss = optimizer.step(closure=closure) if by_keyword else optimizer.step(closure)
    assert probe.losses == [pytest.approx(loss.item())]
    assert probe.norms[0] == pytest.approx([reference(p.grad) for p in model.parameters()], rel=1e-5)


def test_lbfgs_judges_one_step_and_can_skip_it(watch: Watch, make_probe: Any) -> None:
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5)
    probe = make_probe(fire_at={1: Action.SKIP})
    watch(model, optimizer, plugins=[probe])
    x = torch.randn(6, 4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) - 1).pow(2).mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step(closure)
    assert same(before, [p.detach() for p in model.parameters()])
    optimizer.step(closure)
    assert not same(before, [p.detach() for p in model.parameters()])
    assert probe.steps == [0, 1, 2]


# -- verdicts

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adamw capturable-free foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_skip_leaves_weights_and_optimizer_state_bit_for_bit(watch: Watch, make_probe: Any, name: str) -> None:
    model = mlp()
    optimizer = OPTIMIZERS[name](model.parameters())
    probe = make_probe(fire_at={2: Action.SKIP})
    flow = watch(model, optimizer, plugins=[probe])
    for step in range(5):
        backward(model)
        gradients = [p.grad for p in model.parameters()]
        before = snapshot(model, optimizer)
        optimizer.step()
        assert same(before, snapshot(model, optimizer)) == (step == 2)
        assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))  # as the user left them
        optimizer.zero_grad()
    assert [(i.step, i.action) for i in flow.interventions] == [(2, Action.SKIP)]
    assert [i.step for i in probe.interventions] == [2]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, when its compiler is imported
def test_a_compiled_step_is_guarded(watch: Watch, make_probe: Any) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    flow = watch(model, optimizer, plugins=["spike", "health", make_probe(fire_at={2: Action.SKIP})])
    step = torch.compile(optimizer.step, backend="eager")
    moved = []
    for _ in range(4):
        backward(model)
        before = [p.detach().clone() for p in model.parameters()]
        step()
        moved.append(not same(before, [p.detach() for p in model.parameters()]))
        optimizer.zero_grad()
    assert moved == [True, True, False, True]
    assert flow.plugins == ("health", "probe", "spike")


class Careless(torch.optim.Optimizer):
    """An optimizer of somebody's own that does not look whether a gradient is there."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                state.setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                p.add_(state["mean"], alpha=-0.1)


def test_an_optimizer_that_expects_every_gradient_is_skipped_by_undoing_its_step(watch: Watch, make_probe: Any) -> None:
    model = mlp()
    optimizer = Careless(model.parameters())
    watch(model, optimizer, plugins=[make_probe(fire_at={0: Action.SKIP, 3: Action.SKIP})])
    for step in range(6):
        backward(model)
        before = snapshot(model, optimizer)
        counts = [s["count"] for s in optimizer.state.values()]
        optimizer.step()
        assert same(before, snapshot(model, optimizer)) == (step in (0, 3))
        assert (counts == [s["count"] for s in optimizer.state.values()]) == (step in (0, 3))
        optimizer.zero_grad()


@pytest.mark.parametrize("at", [20, 120, 200])
def test_a_guard_goes_on_when_parameters_join_late(watch: Watch, at: int) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model[2].parameters(), lr=1e-3)
    flow = watch(model, optimizer, plugins=["spike", "health"])
    for step in range(300):
        if step == at:
            optimizer.add_param_group({"params": list(model[0].parameters())})
        optimizer.zero_grad()
        backward(model)
        if step == 290:
            model[0].weight.grad[0, 0] = math.nan
        optimizer.step()
    assert [(i.step, i.subject) for i in flow.interventions if i.action is Action.SKIP] == [(290, "0.weight")]


def test_clip_scales_to_the_limit_and_steps(watch: Watch, make_probe: Any) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    watch(model, optimizer, plugins=[make_probe(fire_at={0: Action.CLIP})])
    backward(model)
    for p in model.parameters():
        assert p.grad is not None
        p.grad.mul_(1e4)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    moved = [float((p.detach() - b).norm()) for p, b in zip(model.parameters(), before, strict=True)]
    assert moved == pytest.approx([1.0] * 4, rel=1e-4)


def test_raise_carries_findings_and_interventions_and_keeps_the_weights(watch: Watch, make_probe: Any) -> None:
    from dynguard import GradientSpikeError

    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    watch(model, optimizer, plugins=[make_probe(fire_at={0: Action.RAISE})], strict=False)
    backward(model)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(GradientSpikeError, match="step 0") as caught:
        optimizer.step()
    assert same(before, [p.detach() for p in model.parameters()])
    assert [f.kind for f in caught.value.findings] == ["grad_spike"] * 4
    assert [i.action for i in caught.value.interventions] == [Action.RAISE]


def test_observe_mode_changes_nothing(watch: Watch, make_probe: Any) -> None:
    weights = []
    for mode in (None, "observe"):
        model = mlp()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        flow = None
        if mode:
            actions = {1: Action.SKIP, 2: Action.RAISE, 3: Action.CLIP}
            flow = watch(model, optimizer, plugins=[make_probe(fire_at=actions)], mode=mode)
        torch.manual_seed(3)
        for _ in range(5):
            backward(model)
            optimizer.step()
            optimizer.zero_grad()
        weights.append([p.detach().clone() for p in model.parameters()])
    assert same(*weights)
    assert flow is not None
    assert [(i.action, i.carried_out) for i in flow.interventions] == [
        (Action.SKIP, False), (Action.RAISE, False), (Action.CLIP, False),
    ]  # fmt: skip


def test_a_scheduler_built_on_the_guarded_optimizer_is_untouched(watch: Watch) -> None:
    rates = []
    for guarded in (False, True):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
        if guarded:
            watch(model, optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # the scheduler warns when it does not see the step
            for _ in range(5):
                backward(model)
                optimizer.step()
                scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates[0] == rates[1]


# -- life cycle


def test_model_and_optimizer_can_be_copied_and_pickled_while_watched_and_hold_no_hook_after(watch: Watch) -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    hooks_before = dict(_global_optimizer_pre_hooks)
    flow = watch(model, optimizer)
    backward(model)
    optimizer.step()
    for thing in (model, optimizer):
        copy.deepcopy(thing)
        pickle.loads(pickle.dumps(thing))
    twin = copy.deepcopy(optimizer)
    assert not twin._optimizer_step_pre_hooks
    flow.close()
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert dict(_global_optimizer_pre_hooks) == hooks_before
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())
    steps = flow.step
    backward(model)
    optimizer.step()
    assert flow.step == steps


def test_a_closed_manager_says_so_and_may_be_closed_twice(watch: Watch) -> None:
    model = mlp()
    flow = watch(model, torch.optim.SGD(model.parameters(), lr=0.1))
    flow.close()
    flow.close()
    with pytest.raises(ClosedError, match="closed"):
        flow.observe(loss=1.0)


def test_two_managers_on_one_optimizer_are_refused_until_the_first_is_closed(watch: Watch) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = watch(model, optimizer)
    with pytest.raises(SetupError, match="already watched"):
        watch(model, optimizer)
    first.close()
    watch(model, optimizer)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: (nn.ReLU(), torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1)), "no parameters"),
        (lambda: (m := nn.Linear(2, 2, device="meta"), torch.optim.SGD(m.parameters(), lr=1)), "meta"),
        (lambda: (nn.Linear(2, 2), torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1)), "not the model's"),
        (lambda: (nn.Linear(2, 2), None), "optimizer is None"),
        (lambda: (nn.Linear(2, 2), "adam"), "torch.optim.Optimizer"),
        (lambda: ("model", torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1)), "torch.nn.Module"),
        (lambda: (nn.Linear(2, 2), []), "optimizer is empty"),
    ],
)
def test_bad_input_is_one_clear_error_and_leaves_no_hook(build: Callable[[], Any], message: str) -> None:
    hooks = dict(_global_optimizer_pre_hooks)
    model, optimizer = build()
    with pytest.raises(SetupError) as caught:
        FlowManager(model, optimizer, plugins=["spike"])
    assert message in str(caught.value)
    assert dict(_global_optimizer_pre_hooks) == hooks


def test_losses_of_any_sort_are_taken_and_the_graph_is_not_kept(watch: Watch, probe: Any) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    flow = watch(model, optimizer, plugins=[probe])
    for loss in (torch.tensor(2.0, dtype=torch.bfloat16), torch.tensor([1.0, 3.0]), 2.0, 2, None):
        flow.observe(loss=loss)
        backward(model)
        optimizer.step()
    assert probe.losses == [2.0, 2.0, 2.0, 2.0, None]
    with pytest.raises(TypeError, match="number"):
        flow.observe(loss="low")


def test_two_optimizers_stepping_after_one_loss_both_see_it(watch: Watch, probe: Any) -> None:
    model = mlp()
    optimizers = [torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 2)]
    flow = watch(model, optimizers, plugins=[probe])
    for value in (1.0, 2.0):
        backward(model)
        flow.observe(loss=value)
        for optimizer in optimizers:
            optimizer.step()
    assert probe.losses == [1.0, 1.0, 2.0, 2.0]
    assert probe.sources == ["optimizer0", "optimizer1"] * 2
