"""``health``: every slow fault is told with its cause, and every healthy look-alike in silence."""

from __future__ import annotations

import importlib.util
import math
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as schedulers

from dynguard import Finding, FlowManager, Severity
from dynguard.arrays import as_on_device
from dynguard.testing import check_plugin, count_reads, gradient_event
from dynguard_plugins.stability.health import Health
from dynguard_plugins.stability.health_clip import before_unscale, is_round
from dynguard_plugins.stability.health_layers import Layers

Watch = Callable[..., FlowManager]
Hook = Callable[[int], None]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors: more threads only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["cpu", "device"])
def place(request: pytest.FixtureRequest) -> Iterator[str]:
    """Both ways that the numbers take: those that share the host's memory, and those that have to be read."""
    with as_on_device() if request.param == "device" else nullcontext():
        yield request.param


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def batches(steps: int, seed: int = 0) -> Iterator[tuple[int, Tensor, Tensor]]:
    g = torch.Generator().manual_seed(seed)
    for step in range(steps):
        x = torch.randn(16, 8, generator=g)
        yield step, x, x[:, :1] + 0.1 * torch.randn(16, 1, generator=g)


def train(
    model: nn.Module,
    optimizer: Any,
    steps: int,
    *,
    before: Hook = lambda step: None,
    backward: Hook = lambda step: None,
    after: Hook = lambda step: None,
    loss: Callable[[int, Tensor, Tensor], Tensor] | None = None,
    set_to_none: bool = True,
) -> None:
    """A plain loop with hooks before the forward pass, after backward() and after the step."""
    for step, x, y in batches(steps):
        before(step)
        (F.mse_loss(model(x), y) if loss is None else loss(step, x, y)).backward()
        backward(step)
        optimizer.step()
        after(step)
        optimizer.zero_grad(set_to_none=set_to_none)


def told(flow: FlowManager) -> list[Finding]:
    """All findings, those of the last step too."""
    flow.close()
    return [f for f in flow.findings if f.detector == "health"]


def number(finding: Finding, name: str) -> float:
    value = finding.value(name)
    assert isinstance(value, int | float)
    return value


def loud(flow: FlowManager) -> list[str]:
    return [f"{f.kind}: {f.premise}" for f in told(flow) if f.severity > Severity.INFO]


# -- the contract


@pytest.mark.parametrize("arrays", ["torch", "numpy"])
def test_it_obeys_the_contract(arrays: Any) -> None:
    check_plugin(Health, arrays=arrays)


def test_a_clean_step_reads_nothing_of_its_own(watch: Watch) -> None:
    seen = []
    for plugins in ([], ["health"]):
        model = mlp()
        optimizer = torch.optim.Adam(model.parameters())
        flow = watch(model, optimizer, plugins=plugins)
        with count_reads() as reads:
            train(model, optimizer, 60)
        flow.close()
        seen.append(len(reads))
    assert seen[0] == seen[1] > 0


# -- lr_jump


def decaying(optimizer: Any) -> Any:
    return schedulers.LambdaLR(optimizer, lambda step: max(0.01, 0.5 * (1 + math.cos(math.pi * min(step, 60) / 60))))


REMADE: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": decaying,
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 70),
    "StepLR": lambda o: schedulers.StepLR(o, 30, 0.2),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.95),
}


@pytest.mark.parametrize("name", REMADE)
def test_a_scheduler_made_anew_at_resume_is_told(watch: Watch, name: str) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    flow = watch(model, optimizer, plugins=["health"])
    holder = [REMADE[name](optimizer)]

    def resume(step: int) -> None:
        if step == 65:
            optimizer.param_groups[0].pop("initial_lr")
            optimizer.param_groups[0]["lr"] = 0.05
            holder[0] = REMADE[name](optimizer)

    train(model, optimizer, 80, before=resume, after=lambda step: holder[0].step())
    (finding,) = told(flow)
    assert (finding.kind, finding.severity, finding.step) == ("lr_jump", Severity.WARNING, 65)
    assert (finding.value("scheduler"), finding.value("last_epoch")) == (name, 0)
    assert finding.value("lr_after") == pytest.approx(0.05)
    assert finding.value("ratio") == pytest.approx(0.05 / number(finding, "lr_before"))
    assert finding.prescriptions[0].parameter == "last_epoch"


def test_a_resume_in_another_process_is_told_too(watch: Watch, place: str) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    flow = watch(model, optimizer, plugins=["health"])
    schedule = decaying(optimizer)
    train(model, optimizer, 70, after=lambda step: schedule.step())
    state = pickle.loads(pickle.dumps(flow.state_dict()))
    flow.close()
    again = torch.optim.SGD(model.parameters(), lr=0.05)
    flow = watch(model, again, plugins=["health"])
    flow.load_state_dict(state)
    schedule = decaying(again)
    train(model, again, 10, after=lambda step: schedule.step())
    assert [(f.kind, f.severity, f.step) for f in told(flow)] == [("lr_jump", Severity.WARNING, 70)]


def test_an_optimizer_made_anew_without_its_state_is_told(watch: Watch) -> None:
    model = mlp()
    holder = [torch.optim.Adam(model.parameters(), lr=0.01)]
    flow = watch(model, holder[0], plugins=["health"])
    for step, x, y in batches(60):
        if step == 50:
            holder[0] = torch.optim.Adam(model.parameters(), lr=0.01)
        if step < 50:
            holder[0].param_groups[0]["lr"] = 0.01 * 0.9**step
        F.mse_loss(model(x), y).backward()
        holder[0].step()
        holder[0].zero_grad()
    (finding,) = told(flow)
    assert (finding.kind, finding.severity, finding.step) == ("lr_jump", Severity.WARNING, 50)
    assert "no state" in finding.premise


ASKED: dict[str, Callable[[Any], Any]] = {
    "warm restarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 20, eta_min=1e-5),
    "one cycle": lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=200, pct_start=0.02),
    "second phase": lambda o: schedulers.SequentialLR(
        o, [schedulers.ExponentialLR(o, 0.8), schedulers.ExponentialLR(o, 0.95)], milestones=[30]
    ),
    "cyclic": lambda o: schedulers.CyclicLR(o, 1e-5, 0.05, step_size_up=1, step_size_down=20),
    "chained": lambda o: schedulers.ChainedScheduler([schedulers.CosineAnnealingWarmRestarts(o, 20, eta_min=1e-6)]),
}


@pytest.mark.parametrize("name", ASKED)
def test_jumps_that_a_schedule_asks_for_are_silent(watch: Watch, name: str) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    flow = watch(model, optimizer, plugins=["health"])
    schedule = ASKED[name](optimizer)
    train(model, optimizer, 110, after=lambda step: schedule.step())
    assert told(flow) == []


def test_a_schedule_by_epochs_is_silent(watch: Watch) -> None:
    """In its first epoch it is at last_epoch=0 after many steps, and at 1 when it jumps."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    flow = watch(model, optimizer, plugins=["health"])
    schedule = schedulers.LambdaLR(optimizer, lambda epoch: (0.01, 1.0, 0.02, 0.5)[min(epoch, 3)])
    train(model, optimizer, 110, after=lambda step: schedule.step() if step % 25 == 24 else None)
    assert told(flow) == []


def test_restarts_by_hand_are_an_aside_once(watch: Watch) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    flow = watch(model, optimizer, plugins=["health"])

    def restart(step: int) -> None:
        optimizer.param_groups[0]["lr"] = 0.05 * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step % 30) / 30)))

    train(model, optimizer, 130, before=restart)
    assert [(f.kind, f.severity, f.step) for f in told(flow)] == [("lr_jump", Severity.INFO, 30)]


def test_first_steps_new_groups_and_rates_on_a_device_are_silent(watch: Watch) -> None:
    model, extra = mlp(), nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    capturable = torch.optim.Adam(extra.parameters(), lr=torch.tensor(1e-6), capturable=False)
    flow = watch([model, extra], [optimizer, capturable], plugins=["health"])
    for step, x, y in batches(40):
        if step == 3:
            optimizer.param_groups[0]["lr"] = 0.05
        if step == 20:
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 1.0})
            capturable.param_groups[0]["lr"] = torch.tensor(1e-2)
        (F.mse_loss(model(x), y) + F.mse_loss(extra(x), y)).backward()
        for o in (optimizer, capturable):
            o.step()
            o.zero_grad()
    assert told(flow) == []


def test_a_jump_by_hand_beyond_all_rates_so_far_is_told(watch: Watch) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    flow = watch(model, optimizer, plugins=["health"])

    def rates(step: int) -> None:
        optimizer.param_groups[0]["lr"] = 0.05 if step == 40 else 1e-3 * 0.95**step

    train(model, optimizer, 50, before=rates)
    assert [(f.kind, f.severity, f.step) for f in told(flow)] == [("lr_jump", Severity.WARNING, 40)]


def test_the_group_that_jumps_is_named(watch: Watch, place: str) -> None:
    model = mlp()
    optimizer = torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[2].parameters()}], lr=0.01)
    flow = watch(model, optimizer, plugins=["health"])

    def rates(step: int) -> None:
        optimizer.param_groups[1]["lr"] = 0.1 if step == 40 else 1e-3 * 0.95**step

    train(model, optimizer, 50, before=rates)
    (finding,) = told(flow)
    assert (finding.kind, finding.subject, finding.step) == ("lr_jump", "param_groups[1]", 40)
    assert finding.severity is Severity.INFO  # a layer that joins the training looks the same


# -- clip_saturated


@pytest.mark.parametrize("max_norm", [1.0, 0.37])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_a_clip_before_unscale_is_told(watch: Watch, place: str, max_norm: float, kind: Any) -> None:
    model = mlp()
    optimizer = kind(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=10**6)
    flow = watch(model, optimizer, plugins=["health"])
    for _, x, y in batches(30):
        scaler.scale(F.mse_loss(model(x), y)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    (finding,) = told(flow)
    assert (finding.kind, finding.severity) == ("clip_saturated", Severity.WARNING)
    assert finding.step <= 16
    assert "before scaler.unscale_" in finding.premise
    assert (finding.value("loss_scale"), finding.value("max_norm")) == (2.0**14, pytest.approx(max_norm, rel=1e-3))
    assert finding.prescriptions[0].parameter == "scaler.unscale_(optimizer)"


def test_a_clip_before_unscale_by_hand_is_known_by_its_norm(watch: Watch, place: str) -> None:
    """No GradScaler to be found: loss scaling by hand."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    flow = watch(model, optimizer, plugins=["health"])

    def unscale(step: int) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for p in model.parameters():
            p.grad /= 2.0**12

    train(model, optimizer, 30, backward=unscale, loss=lambda step, x, y: F.mse_loss(model(x), y) * 2.0**12)
    (finding,) = told(flow)
    assert (finding.kind, finding.severity) == ("clip_saturated", Severity.WARNING)
    assert finding.value("global_norm") == pytest.approx(0.5 / 2**12, rel=1e-3)


@pytest.mark.parametrize("unscaled", [True, False])
def test_a_clip_in_the_right_place_is_an_aside_at_most(watch: Watch, place: str, unscaled: bool) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, enabled=unscaled)
    flow = watch(model, optimizer, plugins=["health"])
    for _, x, y in batches(70):
        scaler.scale(F.mse_loss(model(x), y)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    (finding,) = told(flow)
    assert (finding.kind, finding.severity) == ("clip_saturated", Severity.INFO)
    assert finding.value("global_norm") == pytest.approx(0.05, rel=1e-3)


def test_a_clip_that_stalls_the_run_is_told(watch: Watch, place: str) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    flow = watch(model, optimizer, plugins=["health"])
    train(model, optimizer, 30, backward=lambda step: nn.utils.clip_grad_norm_(model.parameters(), 1e-5) and None)
    (finding,) = told(flow)
    assert (finding.kind, finding.severity) == ("clip_saturated", Severity.WARNING)
    weights = math.sqrt(sum(float(p.detach().square().sum()) for p in model.parameters()))
    assert finding.value("relative_update") == pytest.approx(0.01 * 1e-5 / weights, rel=0.12)


def test_a_gradient_that_stands_still_is_no_clip(watch: Watch) -> None:
    """The same batch again and again at a tiny learning rate: every number is constant, not the total alone."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    flow = watch(model, optimizer, plugins=["health"])
    _, x, y = next(batches(1))
    train(model, optimizer, 70, loss=lambda step, *_: F.mse_loss(model(x), y) * 1e-5)
    assert told(flow) == []


def test_which_numbers_people_write_and_what_scaling_makes_of_them() -> None:
    assert all(is_round(v) for v in (1.0, 0.1, 0.05, 12.0, 2.5, 0.125, 6.25, 1e-3))
    assert not any(is_round(v) for v in (1 / 65536, 0.37123, 1.037, 0.0, math.nan, math.inf))
    for max_norm in (0.1, 0.5, 1.0, 2.5, 5.0, 10.0):
        for power in (12, 16, 20):
            found = before_unscale(max_norm / 2.0**power)
            assert found is not None
            product, scale = found
            assert product / scale == pytest.approx(max_norm / 2.0**power)
    assert all(before_unscale(v) is None for v in (1.0, 0.5, 0.05, 1e-4, 0.37123, 3.3e-3, 0.0))


# -- zombie_layer, dead_layer


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.main, self.aux = nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x: Tensor, on: bool) -> Tensor:
        return self.main(x) + (self.aux(x**2) if on else 0)  # type: ignore[no-any-return]  # torch's modules are untyped


def branch(flow_of: Watch, use: Callable[[int], bool], steps: int, kind: Any, **options: Any) -> FlowManager:
    """Trains with a branch that is used where ``use(step)``."""
    set_to_none = options.pop("set_to_none", False)
    model = Branch()
    optimizer = kind(model.parameters(), **{"lr": 1e-2, **options})
    flow = flow_of(model, optimizer, plugins=["health"])
    train(
        model, optimizer, steps, set_to_none=set_to_none,
        loss=lambda step, x, y: F.mse_loss(model(x, use(step)), y),
    )  # fmt: skip
    return flow


def test_a_branch_that_momentum_moves_is_told(watch: Watch, place: str) -> None:
    flow = branch(watch, lambda step: step < 20, 60, torch.optim.Adam)
    (finding,) = told(flow)
    assert (finding.kind, finding.severity, finding.subject) == ("zombie_layer", Severity.WARNING, "aux")
    assert 24 <= finding.step <= 35
    assert "stale momentum" in finding.premise
    assert finding.confidence is not None
    assert finding.confidence > 1 - 1e-6
    assert finding.prescriptions[0].parameter == "set_to_none"


def test_a_branch_that_weight_decay_shrinks_is_told_as_that(watch: Watch, place: str) -> None:
    flow = branch(watch, lambda step: step < 20, 60, torch.optim.SGD, weight_decay=0.01)
    (finding,) = told(flow)
    assert finding.kind == "zombie_layer"
    assert "weight decay" in finding.premise


def test_a_branch_without_a_gradient_rests_in_silence(watch: Watch, place: str) -> None:
    flow = branch(watch, lambda step: step < 20, 150, torch.optim.Adam, set_to_none=True)
    assert told(flow) == []


def test_a_branch_that_stands_still_is_dead_after_fifty_steps(watch: Watch, place: str) -> None:
    flow = branch(watch, lambda step: step < 20, 100, torch.optim.SGD)
    (finding,) = told(flow)
    assert (finding.kind, finding.severity, finding.subject) == ("dead_layer", Severity.WARNING, "aux")
    assert 69 <= finding.step <= 75


@pytest.mark.parametrize(
    "use", [lambda step: step % 8 == 0, lambda step: hash((step, 7)) % 10 == 0], ids=["in turn", "at random"]
)
def test_a_branch_that_is_used_now_and_then_is_silent(watch: Watch, place: str, use: Any) -> None:
    assert told(branch(watch, use, 400, torch.optim.Adam)) == []


def test_a_loss_that_is_met_leaves_no_layer_dead(watch: Watch) -> None:
    """A hinge loss is flat where every margin is kept: all gradients are zero, no layer is singled out."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    flow = watch(model, optimizer, plugins=["health"])
    train(
        model, optimizer, 200, set_to_none=False,
        loss=lambda step, x, y: F.relu(0.02 - model(x) * x[:, :1].sign()).mean() * (step < 20 or step % 50 == 0),
    )  # fmt: skip
    assert told(flow) == []


def test_dead_units_from_the_start_are_told_where_they_cut_the_model(watch: Watch, place: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    with torch.no_grad():
        model[2].bias.fill_(-100.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    flow = watch(model, optimizer, plugins=["health"])
    train(model, optimizer, 115)
    (finding,) = told(flow)
    assert (finding.kind, finding.severity, finding.subject) == ("dead_layer", Severity.WARNING, "0.weight")
    assert finding.value("layers") == 5


def test_a_term_of_zero_for_a_layer_that_is_not_used_is_an_aside(watch: Watch, place: str) -> None:
    """``loss + 0 * parameter.sum()`` is how people keep distributed training content."""
    model, spare = mlp(), nn.Linear(3, 3)
    both = nn.ModuleDict({"model": model, "spare": spare})
    optimizer = torch.optim.Adam(both.parameters(), lr=0.01)
    flow = watch(both, optimizer, plugins=["health"])
    zero = lambda: sum(0.0 * p.sum() for p in spare.parameters())  # noqa: E731 - short
    train(both, optimizer, 150, loss=lambda step, x, y: F.mse_loss(model(x), y) + zero())
    assert [(f.kind, f.severity) for f in told(flow)] == [("dead_layer", Severity.INFO)]


def test_a_zero_initialised_adapter_is_silent(watch: Watch, place: str) -> None:
    """LoRA: the down-projection has a gradient of zero until the up-projection, zero at first, has moved."""
    torch.manual_seed(0)
    down, up, base = nn.Linear(8, 2, bias=False), nn.Linear(2, 1, bias=False), nn.Linear(8, 1)
    nn.init.zeros_(up.weight)
    model = nn.ModuleDict({"down": down, "up": up})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    flow = watch(model, optimizer, plugins=["health"])

    def warm_up(step: int) -> None:
        optimizer.param_groups[0]["lr"] = 0.0 if step < 60 else 1e-2

    train(
        model, optimizer, 130, before=warm_up,
        loss=lambda step, x, y: F.mse_loss(base(x).detach() + up(down(x)), y),
    )  # fmt: skip
    assert told(flow) == []


@pytest.mark.parametrize("seed", range(5))
def test_rows_of_zeros_at_random_do_not_surprise(seed: int) -> None:
    """Layers used at rates from 2% to 90%: no suspicion in 100,000 layer-steps."""
    rng = np.random.default_rng(seed)
    layers, rates = Layers(5, 50), np.linspace(0.02, 0.9, 50)
    for _ in range(2000):
        norms = (rng.random(50) < rates).astype(np.float32)
        if layers.see(norms, [1] * 50, int(np.count_nonzero(norms))):
            assert layers.suspects() == []


# -- moved_frozen


@pytest.mark.parametrize("stale", [False, True], ids=["zeroed", "left"])
def test_a_frozen_layer_that_the_optimizer_moves_is_told(watch: Watch, place: str, stale: bool) -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    flow = watch(model, optimizer, plugins=["health"])

    def freeze(step: int) -> None:
        if step == 20:
            model[0].requires_grad_(False)

    for step, x, y in batches(90):
        F.mse_loss(model(x), y).backward()
        freeze(step)
        optimizer.step()
        for p in model.parameters():
            if p.requires_grad or not stale:
                p.grad.zero_()  # type: ignore[union-attr]  # every parameter had a gradient once
    (finding,) = told(flow)
    assert (finding.kind, finding.severity, finding.subject) == ("moved_frozen", Severity.WARNING, "0")
    assert finding.step <= 20 + 32 + 10


def test_frozen_layers_that_rest_are_silent(watch: Watch, place: str) -> None:
    model = mlp()
    model[2].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    flow = watch(model, optimizer, plugins=["health"])
    train(model, optimizer, 80, before=lambda step: model[0].requires_grad_(step < 20 or step > 70) and None,
          loss=lambda step, x, y: F.mse_loss(model(x.requires_grad_()), y))  # fmt: skip
    assert told(flow) == []


def test_a_discriminator_that_is_frozen_while_it_is_stepped_is_silent(watch: Watch) -> None:
    """Its gradient was made before it was frozen for the generator's pass, and is fresh at every step."""
    generator, critic = mlp(0), nn.Linear(1, 1)
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-3) for m in (generator, critic)]
    flow = watch([generator, critic], optimizers, plugins=["health"])
    for _, x, y in batches(150):
        critic.requires_grad_(True)
        (critic(generator(x).detach()).mean() - critic(y).mean()).square().backward()
        critic.requires_grad_(False)
        critic(generator(x)).mean().square().backward()
        for o in optimizers:
            o.step()
            o.zero_grad(set_to_none=False)
    assert told(flow) == []


# -- lost_updates


def low(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)).to(dtype)


def in_dtype(model: nn.Module, dtype: torch.dtype) -> Callable[[int, Tensor, Tensor], Tensor]:
    return lambda step, x, y: F.mse_loss(model(x.to(dtype)).float(), y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_updates_that_vanish_in_rounding_are_told(watch: Watch, place: str, dtype: torch.dtype) -> None:
    model = low(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-7)
    flow = watch(model, optimizer, plugins=["health"])
    start = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, 80, loss=in_dtype(model, dtype))
    moved = sum(int((a != b).sum()) for a, b in zip(start, model.parameters(), strict=True))
    assert moved < 0.05 * sum(p.numel() for p in start)  # that is the fault
    (finding,) = told(flow)
    assert (finding.kind, finding.severity, finding.subject) == ("lost_updates", Severity.WARNING, "")
    assert number(finding, "changed_share") < 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_updates_that_arrive_are_silent(watch: Watch, place: str, dtype: torch.dtype) -> None:
    model = low(dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3 if dtype is torch.bfloat16 else 1e-9, eps=1e-6)
    flow = watch(model, optimizer, plugins=["health"])
    train(model, optimizer, 200, loss=in_dtype(model, dtype))
    assert told(flow) == []


def test_stochastic_rounding_loses_nothing(watch: Watch) -> None:
    """Each update changes about 4% of the entries, other ones every time."""
    model = low(torch.bfloat16)

    class Stochastic(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            """Sign descent of one 25th of the last digit, rounded at random."""
            with torch.no_grad():
                for p in self.param_groups[0]["params"]:
                    digit = torch.maximum(p.abs() / 128, torch.tensor(1e-6))
                    p -= digit * p.grad.sign() * (torch.rand_like(p, dtype=torch.float32) < 0.04)

    optimizer = Stochastic(model.parameters(), lr=1e-3)
    flow = watch(model, optimizer, plugins=["health"])
    train(model, optimizer, 200, loss=in_dtype(model, torch.bfloat16))
    assert told(flow) == []


def test_the_end_of_a_schedule_may_stand_still(watch: Watch) -> None:
    model = low(torch.bfloat16)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-6)
    flow = watch(model, optimizer, plugins=["health"])
    schedule = schedulers.LambdaLR(optimizer, lambda step: 1.0 if step < 30 else 1e-5)
    train(model, optimizer, 300, loss=in_dtype(model, torch.bfloat16), after=lambda step: schedule.step())
    assert loud(flow) == []


# -- stray_step


def test_a_step_on_used_gradients_is_told_once(watch: Watch, place: str) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    flow = watch(model, optimizer, plugins=["health"])
    train(model, optimizer, 40, after=lambda step: optimizer.step())
    (finding,) = told(flow)
    assert (finding.kind, finding.severity) == ("stray_step", Severity.WARNING)
    assert finding.step <= 5


def test_one_slip_is_not_told(watch: Watch) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    flow = watch(model, optimizer, plugins=["health"])
    train(model, optimizer, 40, after=lambda step: optimizer.step() if step == 20 else None)
    assert told(flow) == []


@pytest.mark.parametrize("set_to_none", [True, False])
def test_equal_gradients_of_new_passes_are_silent(watch: Watch, set_to_none: bool) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    flow = watch(model, optimizer, plugins=["health"])
    _, x, y = next(batches(1))
    train(model, optimizer, 40, set_to_none=set_to_none, loss=lambda step, *_: F.mse_loss(model(x), y))
    assert told(flow) == []


def test_closures_and_accumulation_are_silent(watch: Watch) -> None:
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    flow = watch(model, optimizer, plugins=["health"])
    for _, x, y in batches(30):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
    assert told(flow) == []
    flow.close()
    plain = torch.optim.SGD(model.parameters(), lr=1e-3)
    flow = watch(model, plain, plugins=["health"])
    for step, x, y in batches(40):
        F.mse_loss(model(x), y).backward()
        plain.step()
        if step % 4 == 3:
            plain.zero_grad()
    assert told(flow) == []


# -- state, and healthy runs


def test_the_state_survives_a_resume_and_nothing_is_told_twice(watch: Watch) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    flow = watch(model, optimizer, plugins=["health"])
    train(model, optimizer, 20, after=lambda step: optimizer.step())
    state = pickle.loads(pickle.dumps(flow.state_dict()))
    assert [f.kind for f in told(flow)] == ["stray_step"]
    flow = watch(model, optimizer, plugins=["health"])
    flow.load_state_dict(state)
    train(model, optimizer, 20, after=lambda step: optimizer.step())
    assert told(flow) == []


def test_what_the_last_step_showed_is_told_at_the_end() -> None:
    health = Health()
    with as_on_device():
        for step in range(20):
            gradients = {"a": torch.tensor([1.0]) / 2**16, "b": torch.zeros(1)}
            signal = health.on_gradients(gradient_event(step, gradients=gradients, lr=1e-3))
            assert signal is not None
            assert signal.learn is not None
            signal.learn(signal.score.tolist())
    assert [f.kind for f in health.diagnose()] == ["clip_saturated"]
    assert list(health.diagnose()) == []


@pytest.fixture(scope="module")
def zoo() -> ModuleType:
    path = Path(__file__).parents[1] / "benchmarks" / "zoo.py"
    spec = importlib.util.spec_from_file_location("health_zoo", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["health_zoo"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kind", ["regression", "gan", "factorisation"])
def test_healthy_runs_are_silent(watch: Watch, zoo: ModuleType, kind: str) -> None:
    run = zoo.make(kind, 1)
    one = len(run.models) == 1
    flow = watch(*((d[""] if one else d) for d in (run.models, run.optimizers)), plugins=["health"])
    for step in range(350):
        run.set_rate(step)
        for name, loss in run.phases(run.batch(step)):
            run.optimizers[name].zero_grad()
            loss.backward()
            run.optimizers[name].step()
    assert loud(flow) == []
