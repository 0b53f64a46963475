"""Going back: kept buffers, the ring of verified snapshots, non-finite state. torch itself is the reference."""

from __future__ import annotations

import copy
import logging
import math
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, MultiStepLR, OneCycleLR, SequentialLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from dynguard.errors import SetupError
from dynguard.torch.buffers import Buffers
from dynguard.torch.copies import look
from dynguard.torch.recovery import nonfinite_state
from dynguard.torch.slots import Slot
from dynguard.torch.snapshots import Snapshots

Make = Callable[[Any], Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adam foreach amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True, amsgrad=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, history_size=2),
}


class Net(nn.Module):
    """Linear, BatchNorm and dropout, with a tied weight and a causal mask of minus infinities."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.b = nn.Linear(8, 6)
        self.c = nn.Linear(6, 8)
        self.c.weight = self.a.weight
        self.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1))
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c(self.b(self.drop(torch.tanh(self.norm(self.a(x))))))
        return out


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    torch.manual_seed(0)
    yield
    torch.set_rng_state(before[0])
    random.setstate(before[1])
    np.random.set_state(before[2])


def step(model: nn.Module, optimizer: Optimizer, seed: int) -> float:
    """One step on the batch of that seed; dropout draws from torch's global generator."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(16, 6, generator=generator)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).pow(2).mean()
        loss.backward()
        return loss

    return optimizer.step(closure).item()  # type: ignore[call-overload, no-any-return]


def everything(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    return [copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()["state"])]


def equal(a: Any, b: Any) -> bool:
    """Bitwise, through containers; NaN equals NaN."""
    if isinstance(a, Tensor):
        if not isinstance(b, Tensor) or a.dtype != b.dtype or a.shape != b.shape:
            return False
        bits = [t.contiguous().view(-1).view(torch.uint8) for t in (a, b)]
        return torch.equal(*bits)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def ring(model: nn.Module, *optimizers: Optimizer, **options: Any) -> Snapshots:
    return Snapshots({"": model}, lambda: optimizers, **options)


def verified(snapshots: Snapshots, at: int) -> bool:
    finite = bool(snapshots.take(at))
    snapshots.confirm(finite)
    return finite


# -- snapshots: what comes back


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("before", [0, 3], ids=["state made later", "state there"])
def test_everything_comes_back_bit_for_bit_and_in_place(name: str, before: int) -> None:
    model = Net()
    optimizer = OPTIMIZERS[name](model.parameters())
    for i in range(before):
        step(model, optimizer, i)
    snapshots = ring(model, optimizer)
    assert verified(snapshots, before)
    reference = everything(model, optimizer)
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    places = [t.data_ptr() for t in model.state_dict().values()]
    for i in range(3):
        step(model, optimizer, 10 + i)
    assert not equal(everything(model, optimizer), reference)
    for p, g in zip(model.parameters(), gradients, strict=True):
        p.grad = g
    with torch.no_grad():
        model.a.weight.fill_(math.nan)
        model.norm.running_var.fill_(math.nan)
    assert snapshots.roll_back() == before
    assert equal(everything(model, optimizer), reference)
    assert [t.data_ptr() for t in model.state_dict().values()] == places
    assert equal([p.grad for p in model.parameters()], gradients)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("before", [0, 2])
def test_training_after_a_rollback_is_the_training_that_went_on_from_there(name: str, before: int) -> None:
    model = Net()
    optimizer = OPTIMIZERS[name](model.parameters())
    for i in range(before):
        step(model, optimizer, i)
    snapshots = ring(model, optimizer, restore_rng=True)
    verified(snapshots, before)
    losses = [step(model, optimizer, 10 + i) for i in range(4)]
    reference = everything(model, optimizer)
    for i in range(3):
        step(model, optimizer, 50 + i)
    snapshots.roll_back()
    assert [step(model, optimizer, 10 + i) for i in range(4)] == losses
    assert equal(everything(model, optimizer), reference)


def test_optimizer_state_is_written_in_place_and_lists_of_tensors_keep_apart() -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer, 0)
    snapshots = ring(model, optimizer)
    verified(snapshots, 1)
    moment = optimizer.state[model.b.weight]["exp_avg"]
    value = moment.clone()
    step(model, optimizer, 1)
    optimizer.state[model.b.weight]["later"] = torch.ones(2)
    del optimizer.state[model.b.bias]["exp_avg_sq"]
    optimizer.state[model.b.bias]["step"] = optimizer.state[model.b.weight]["step"]  # two that are one now
    snapshots.roll_back()
    assert optimizer.state[model.b.weight]["exp_avg"] is moment
    assert torch.equal(moment, value)
    assert set(optimizer.state[model.b.weight]) == {"step", "exp_avg", "exp_avg_sq"}
    assert optimizer.state[model.b.bias]["exp_avg_sq"].shape == (6,)
    assert optimizer.state[model.b.bias]["step"] is not optimizer.state[model.b.weight]["step"]


def test_random_streams_go_back_only_where_wanted() -> None:
    for wanted in (True, False):
        model = Net()
        snapshots = ring(model, torch.optim.SGD(model.parameters(), lr=0.1), restore_rng=wanted)
        verified(snapshots, 1)
        draws = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        snapshots.roll_back()
        again = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        assert (again == draws) is wanted


def test_tied_and_shared_tensors_are_copied_once() -> None:
    model = Net()
    model.register_buffer("same_mask", model.mask)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    snapshots = Snapshots({"one": model, "two": nn.ModuleList([model.a])}, lambda: [optimizer])
    verified(snapshots, 1)
    bytes_of_all = sum(t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()])
    assert snapshots.bytes == bytes_of_all


def test_parameters_that_only_an_optimizer_knows_come_back() -> None:
    model, extra = Net(), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([*model.parameters(), extra], lr=0.1)
    snapshots = ring(model, optimizer)
    verified(snapshots, 1)
    extra.data.zero_()
    snapshots.roll_back()
    assert extra.tolist() == [1, 1, 1]


def test_hyperparameters_stay_and_the_optimizers_own_numbers_go_back() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.01)
    optimizer.param_groups[0]["weight_sum"] = 3.0  # as schedule-free optimizers count
    snapshots = ring(model, optimizer)
    verified(snapshots, 1)
    optimizer.param_groups[0].update(lr=0.02, weight_decay=0.5, weight_sum=math.nan)
    snapshots.roll_back()
    group = optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["weight_sum"]) == (0.02, 0.5, 3.0)


def test_a_pending_graph_survives_a_rollback() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    snapshots = ring(model, optimizer)
    verified(snapshots, 1)
    loss = model.eval()(torch.ones(2, 6)).sum()
    snapshots.roll_back()
    loss.backward()
    assert model.a.weight.grad is not None


def test_a_parameter_that_grew_stays_and_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    snapshots = ring(model, torch.optim.SGD(model.parameters(), lr=0.1))
    verified(snapshots, 1)
    model[1].weight = nn.Parameter(torch.zeros(3, 2))
    model[0].weight.data.zero_()
    snapshots.roll_back()
    assert model[1].weight.shape == (3, 2)
    assert model[0].weight.abs().sum() > 0
    assert "1.weight" in caplog.text


def test_buffers_that_a_module_binds_anew_or_drops_come_back_without_touching_the_new_tensor() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("last", torch.ones(2))
    model.register_buffer("later", None)
    snapshots = ring(model, torch.optim.SGD(model.parameters(), lr=0.1))
    verified(snapshots, 1)
    batch = torch.full((2,), 7.0)
    model.last, model.later = batch, torch.ones(1)
    snapshots.roll_back()
    assert model.last.tolist() == [1, 1]
    assert model.later is None
    assert batch.tolist() == [7, 7]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
def test_other_dtypes_and_layouts(dtype: torch.dtype) -> None:
    model = nn.Conv2d(2, 3, 3)
    model.weight = nn.Parameter(torch.randn(3, 2, 3, 3, dtype=dtype).to(memory_format=torch.channels_last))
    model.register_buffer("wide", torch.ones(1).expand(4))
    model.register_buffer("thin", torch.eye(3).to_sparse())
    model.register_buffer("none", torch.zeros(0))
    model.register_buffer("index", torch.arange(3))
    snapshots = ring(model, torch.optim.SGD(model.parameters(), lr=0.1))
    reference = copy.deepcopy(model.weight.data)
    assert verified(snapshots, 1)
    model.weight.data.zero_()
    model.index.zero_()
    model.thin = torch.zeros(3, 3).to_sparse()
    snapshots.roll_back()
    assert equal(model.weight.data, reference)
    assert model.weight.is_contiguous(memory_format=torch.channels_last)
    assert model.index.tolist() == [0, 1, 2]
    assert torch.equal(model.thin.to_dense(), torch.eye(3))


def test_a_lazy_module_is_taken_up_once_it_is_made() -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    snapshots = ring(model, torch.optim.SGD(model.parameters(), lr=0.1))
    buffers = Buffers({"": model})
    verified(snapshots, 0)
    model(torch.randn(4, 2))
    buffers.keep()
    verified(snapshots, 1)
    kept = copy.deepcopy(model.state_dict())
    model(torch.full((4, 2), math.nan))
    assert buffers.nonfinite() == ["1.running_mean", "1.running_var"]
    model[0].weight.data.zero_()
    buffers.restore()
    snapshots.roll_back()
    assert equal(dict(model.state_dict()), dict(kept))


# -- snapshots: tracked things


def make_ema(model: nn.Module) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)


class DictEma:
    """As EMA classes outside torch are made: a state dict of tensors that are alive."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = [p.detach().clone() for p in model.parameters()]
        self.updates = 0

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow, self.updates = state["shadow"], state["updates"]


def test_an_ema_comes_back_in_place_or_by_its_own_means() -> None:
    model = Net()
    snapshots = ring(model, torch.optim.SGD(model.parameters(), lr=0.1))
    module, other = make_ema(model), DictEma(model)
    snapshots.track("ema", module)
    snapshots.track("other", other)
    assert verified(snapshots, 1)
    reference = copy.deepcopy(module.state_dict()), copy.deepcopy(other.state_dict())
    place = module.module.a.weight.data_ptr()
    for _ in range(2):  # the copies must not be given away with the first rollback
        module.module.a.weight.data.fill_(math.nan)
        module.n_averaged += 5
        other.shadow[0].fill_(math.nan)
        other.updates = 9
        snapshots.roll_back()
        assert equal(dict(module.state_dict()), dict(reference[0]))
        assert module.module.a.weight.data_ptr() == place
        assert equal(other.state_dict(), reference[1])
        verified(snapshots, 2)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: CosineAnnealingLR(o, 20),
        lambda o: MultiStepLR(o, [2, 4], 0.1),
        lambda o: OneCycleLR(o, 0.1, total_steps=30),
        lambda o: SequentialLR(o, [CosineAnnealingLR(o, 5), CosineAnnealingLR(o, 20)], [3]),
    ],
    ids=["cosine", "multistep", "onecycle", "sequential"],
)
def test_a_scheduler_goes_back_with_its_learning_rates(make: Callable[[Optimizer], Any]) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = make(optimizer)

    def go(count: int) -> list[tuple[float, float]]:
        rates = []
        for i in range(count):
            step(model, optimizer, i)
            scheduler.step()
            rates.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
        return rates

    go(2)
    snapshots = ring(model, optimizer)
    snapshots.track("scheduler", scheduler)
    verified(snapshots, 2)
    rates = go(6)
    snapshots.roll_back()
    assert go(6) == rates


def test_a_grad_scaler_goes_back_and_is_not_read() -> None:
    model = Net()
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=3)
    scaler.scale(torch.ones(()))  # makes its tensors
    snapshots = ring(model, torch.optim.SGD(model.parameters(), lr=0.1))
    snapshots.track("scaler", scaler)
    scaler.get_scale = None  # type: ignore[method-assign, assignment] # which would read the device
    assert verified(snapshots, 1)
    del scaler.get_scale
    place = scaler._scale
    scaler.update(0.0)
    assert scaler.get_scale() == 0
    snapshots.roll_back()
    assert scaler._scale is place
    assert scaler.get_scale() == 512
    assert scaler.state_dict()["growth_interval"] == 3


@pytest.mark.parametrize("enabled", [True, False])
def test_a_grad_scaler_that_was_not_used_yet(enabled: bool) -> None:
    model = Net()
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0, enabled=enabled)
    snapshots = ring(model, torch.optim.SGD(model.parameters(), lr=0.1))
    snapshots.track("scaler", scaler)
    verified(snapshots, 1)
    scaler.scale(torch.ones(()))
    snapshots.roll_back()
    assert scaler.get_scale() == (512 if enabled else 1)


def test_a_tracked_thing_that_fails_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def state_dict(self) -> dict[str, Any]:
            raise KeyError("mine")

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError

    class Refusing(DictEma):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise ValueError("not today")

    model = Net()
    snapshots = ring(model, torch.optim.SGD(model.parameters(), lr=0.1))
    snapshots.track("ema", Broken())
    snapshots.track("other", Refusing(model))
    assert verified(snapshots, 1)
    assert verified(snapshots, 2)
    assert caplog.text.count("ema is not part of the snapshots") == 1
    model.b.weight.data.zero_()
    snapshots.roll_back()
    assert model.b.weight.abs().sum() > 0
    assert "not today" in caplog.text
    with pytest.raises(SetupError, match=r"ema=int.*state_dict"):
        snapshots.track("ema", 3)


# -- snapshots: which count


def poison_parameter(model: Net, optimizer: Optimizer, value: float) -> None:
    model.b.weight.data[0, 0] = value


def poison_buffer(model: Net, optimizer: Optimizer, value: float) -> None:
    model.norm.running_var[0] = value


def poison_mask(model: Net, optimizer: Optimizer, value: float) -> None:
    model.mask[0, 0] = math.nan


def poison_state(model: Net, optimizer: Optimizer, value: float) -> None:
    optimizer.state[model.b.weight]["exp_avg_sq"][0, 0] = value


def poison_number(model: Net, optimizer: Optimizer, value: float) -> None:
    optimizer.param_groups[0]["d"] = math.nan


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("poison", [poison_parameter, poison_buffer, poison_mask, poison_state, poison_number])
def test_a_poisoned_snapshot_never_counts(poison: Callable[..., None], value: float) -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    snapshots = ring(model, optimizer)
    step(model, optimizer, 0)
    assert not snapshots.can_roll_back
    finite = snapshots.take(1)
    assert finite.shape == ()
    assert finite.dtype == torch.bool
    assert not snapshots.can_roll_back  # not before it is confirmed
    snapshots.confirm(bool(finite))
    assert snapshots.can_roll_back
    reference = everything(model, optimizer)
    poison(model, optimizer, value)
    assert not verified(snapshots, 2)
    assert snapshots.state_dict()["steps"] == [1]
    assert snapshots.state_dict()["rejected"] == 1
    assert snapshots.roll_back() == 1
    assert equal(everything(model, optimizer), reference)


def test_finite_values_whose_norm_overflows_count() -> None:
    model = nn.Linear(100, 100)
    nn.init.constant_(model.weight, 3e38)
    assert torch.linalg.vector_norm(model.weight).isinf()
    assert verified(ring(model, torch.optim.SGD(model.parameters(), lr=0.1)), 1)
    double = nn.Linear(3, 3, dtype=torch.float64)
    nn.init.constant_(double.weight, -1e300)
    assert verified(ring(double, torch.optim.SGD(double.parameters(), lr=0.1)), 1)


def test_look_against_plain_comparison() -> None:
    nan, inf = math.nan, math.inf
    cases = [[1.0], [nan], [inf, 1.0], [-inf, 1.0], [inf, nan], [nan, -inf], [], [6e4, -6e4]]
    dtypes = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
    tensors = [torch.tensor(case, dtype=dtype) for dtype in dtypes for case in cases]
    tensors += [torch.tensor(nan), torch.tensor(-inf), torch.tensor(2.0)]
    tensors += [torch.tensor([1.0, nan]).to(torch.float8_e5m2), torch.tensor([[0.0, nan]]).to_sparse()]
    found_nan, found_inf = look(tensors)
    for tensor, is_nan, is_inf in zip(tensors, found_nan.tolist(), found_inf.tolist(), strict=True):
        plain = tensor.to_dense() if tensor.layout is not torch.strided else tensor
        wide = torch.view_as_real(plain) if plain.is_complex() else plain.double()
        assert is_nan == bool(wide.isnan().any()), tensor
        if not is_nan:
            assert is_inf == bool(wide.isinf().any()), tensor


def test_no_host_read_while_a_snapshot_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer, 0)
    snapshots = ring(model, optimizer)

    def read(*args: Any) -> Any:
        raise AssertionError("read")

    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "numpy", "cpu"):
        monkeypatch.setattr(Tensor, name, read)
    snapshots.take(1)
    monkeypatch.undo()
    assert snapshots.state_dict()["off"] == ""
    assert snapshots.state_dict()["taken"] == 1


def filled(snapshots: Snapshots, model: nn.Linear, *steps: int) -> None:
    for at in steps:
        nn.init.constant_(model.weight, at)
        verified(snapshots, at)


def test_the_newest_snapshot_first_then_older_ones_unless_there_was_progress() -> None:
    model = nn.Linear(2, 2)
    snapshots = ring(model, torch.optim.SGD(model.parameters(), lr=0.1), keep=3)
    filled(snapshots, model, 1, 2, 3, 4)
    assert snapshots.state_dict()["steps"] == [2, 3, 4]
    for expected in (4, 3, 2):
        assert snapshots.can_roll_back
        assert snapshots.roll_back() == expected
        assert model.weight[0, 0].item() == expected
    assert not snapshots.can_roll_back
    with pytest.raises(RuntimeError, match="can_roll_back"):
        snapshots.roll_back()
    filled(snapshots, model, 7)
    assert snapshots.roll_back() == 7
    assert snapshots.state_dict()["rollbacks"] == 4


def test_an_unconfirmed_snapshot_is_dropped_by_a_rollback_and_by_the_next_one() -> None:
    model = nn.Linear(2, 2)
    snapshots = ring(model, torch.optim.SGD(model.parameters(), lr=0.1))
    filled(snapshots, model, 1)
    snapshots.take(2)
    assert snapshots.roll_back() == 1
    snapshots.confirm(True)
    assert snapshots.state_dict()["steps"] == [1]
    snapshots.take(3)
    snapshots.take(4)
    snapshots.confirm(True)
    snapshots.confirm(True)
    assert snapshots.state_dict()["steps"] == [1, 4]


@pytest.mark.parametrize("keep", [1, 2, 4])
def test_memory_is_used_again(keep: int) -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer, 0)
    snapshots = ring(model, optimizer, keep=keep)

    def places() -> set[int]:
        return {tensor.data_ptr() for slot in snapshots._slots for tensor in slot.memory.values() if tensor.numel()}

    for i in range(keep + 1):
        verified(snapshots, i)
    before, size = places(), snapshots.bytes
    for i in range(2 * keep + 3):
        step(model, optimizer, i)
        snapshots.take(100 + i)
        snapshots.confirm(i % 3 > 0)
        assert places() == before
        assert snapshots.bytes == size
    assert len(snapshots.state_dict()["steps"]) == keep


def one_size(model: nn.Module, *optimizers: Optimizer) -> int:
    snapshots = ring(model, *optimizers)
    verified(snapshots, 1)
    return snapshots.bytes


def test_a_ring_that_is_too_big_shrinks_and_then_is_off(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dynguard")
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    size = one_size(model, optimizer)
    assert size == 4 * (64 * 64 + 64)
    small = ring(model, optimizer, keep=3, max_bytes=3 * size)
    filled(small, model, 1, 2, 3, 4)
    assert small.bytes == 3 * size
    small.take(5)
    assert small.state_dict()["steps"] == [3, 4]
    small.confirm(False)
    assert small.roll_back() == 4
    assert not caplog.records
    off = ring(model, optimizer, max_bytes=2 * size - 1)
    assert off.due(1)
    assert bool(off.take(1))
    off.confirm(True)
    assert not off.due(10)
    assert not off.can_roll_back
    assert off.bytes == 0
    off.take(50)
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert f"max_bytes={2 * size}" in caplog.text


def test_what_can_not_be_copied_switches_snapshots_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dynguard")
    model = Net()
    snapshots = ring(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def full(*args: Any) -> None:
        raise RuntimeError("no memory left")

    monkeypatch.setattr(Slot, "fill", full)
    assert bool(snapshots.take(1))
    snapshots.confirm(True)
    assert not snapshots.can_roll_back
    assert not snapshots.due(10)
    assert "no memory left" in caplog.text


def test_a_tensor_that_can_not_be_looked_at_switches_snapshots_off_before_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dynguard")

    def refuse(*args: Any) -> None:
        raise NotImplementedError("aminmax of this subclass")

    monkeypatch.setattr(torch, "aminmax", refuse)
    model = Net()
    snapshots = ring(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert not snapshots.due(1)
    assert len(caplog.records) == 1


def test_when_a_snapshot_is_due() -> None:
    model = nn.Linear(2, 2)
    snapshots = ring(model, torch.optim.SGD(model.parameters(), lr=0.1), every=50)
    taken = []
    for at in range(1, 201):
        if snapshots.due(at) and at not in (100, 101):  # steps that were skipped
            taken.append(at)
            verified(snapshots, at)
    assert taken == [1, 10, 25, 50, 102, 150, 200]
    snapshots.roll_back()
    assert [at for at in range(210, 310) if snapshots.due(at) and verified(snapshots, at)] == [220, 235, 250, 300]
    assert not ring(model, torch.optim.SGD(model.parameters(), lr=0.1), every=0).due(50)
    every = ring(model, torch.optim.SGD(model.parameters(), lr=0.1), every=1)
    assert [at for at in range(1, 5) if every.due(at) and verified(every, at)] == [1, 2, 3, 4]
    with pytest.raises(SetupError, match="keep=0"):
        ring(model, keep=0)


# -- snapshots: the file


def test_the_newest_snapshot_is_in_the_file_as_torch_would_save_it(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler, ema = MultiStepLR(optimizer, [2, 9]), make_ema(model)
    snapshots = ring(model, optimizer, directory=tmp_path / "new" / "folder")
    snapshots.track("scheduler", scheduler)
    snapshots.track("ema", ema)
    for i in range(3):
        step(model, optimizer, i)
        scheduler.step()
    snapshots.take(3)
    reference = everything(model, optimizer)
    snapshots.confirm(True)
    step(model, optimizer, 4)
    snapshots.close()
    folder = tmp_path / "new" / "folder"
    assert [file.name for file in folder.iterdir()] == ["snapshot.pt"]
    saved = torch.load(folder / "snapshot.pt", weights_only=True)
    fresh = Net()
    again = torch.optim.AdamW(fresh.parameters())
    fresh.load_state_dict(saved["models"][""])
    again.load_state_dict(saved["optimizers"][0])
    assert saved["step"] == 3
    assert equal(everything(fresh, again), reference)
    assert again.param_groups[0]["lr"] == pytest.approx(0.001)
    make_ema(fresh).load_state_dict(saved["tracked"]["ema"])
    assert saved["tracked"]["scheduler"]["last_epoch"] == 3
    torch.set_rng_state(saved["random"]["torch"])


def test_a_place_that_can_not_be_written_to_is_logged_once_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    model = Net()
    snapshots = ring(model, torch.optim.SGD(model.parameters(), lr=0.1), directory=tmp_path / "file" / "folder")
    for i in (1, 2, 3):
        verified(snapshots, i)
        snapshots.close()
    assert snapshots.state_dict()["failed_writes"] == 3
    assert len(caplog.records) == 1
    assert "file/folder" in caplog.text
    assert snapshots.roll_back() == 3


def test_a_disk_that_fills_up_leaves_the_last_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    snapshots = ring(model, torch.optim.SGD(model.parameters(), lr=0.1), directory=tmp_path)
    verified(snapshots, 1)
    snapshots.close()

    def full(payload: Any, file: Any) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    verified(snapshots, 2)
    snapshots.close()
    assert snapshots.state_dict()["failed_writes"] == 1
    assert [file.name for file in tmp_path.iterdir()] == ["snapshot.pt"]
    assert torch.load(tmp_path / "snapshot.pt", weights_only=True)["step"] == 1


def test_a_slot_that_is_being_written_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, save = threading.Event(), torch.save

    def slow(payload: Any, file: Any) -> None:
        assert go_on.wait(60)
        save(payload, file)

    monkeypatch.setattr(torch, "save", slow)
    model = nn.Linear(2, 2)
    snapshots = ring(model, torch.optim.SGD(model.parameters(), lr=0.1), keep=1, directory=tmp_path)
    filled(snapshots, model, 1, 2)
    filled(snapshots, model, 3)  # no place: one is being written, the other is the newest
    assert snapshots.state_dict()["steps"] == [2]
    assert snapshots.state_dict()["passed_over"] == 1
    go_on.set()
    snapshots.close(60)
    saved = torch.load(tmp_path / "snapshot.pt", weights_only=True)
    assert saved["step"] == 1
    assert saved["models"][""]["weight"].tolist() == [[1, 1], [1, 1]]
    filled(snapshots, model, 4)
    snapshots.close(60)
    assert snapshots.state_dict()["steps"] == [4]
    assert torch.load(tmp_path / "snapshot.pt", weights_only=True)["step"] == 4


# -- buffers


def test_what_a_bad_forward_wrote_into_batchnorm_is_undone() -> None:
    model = Net()
    buffers = Buffers({"net": model})
    model(torch.randn(5, 6))
    buffers.keep()
    kept = {name: b.clone() for name, b in model.named_buffers()}
    assert buffers.restore() == []
    model(torch.full((5, 6), math.nan))
    assert buffers.nonfinite() == ["net.norm.running_mean", "net.norm.running_var"]
    place = model.norm.running_mean
    names = ["net.norm.running_mean", "net.norm.running_var", "net.norm.num_batches_tracked"]
    assert buffers.restore() == names
    assert equal(dict(model.named_buffers()), kept)
    assert model.norm.running_mean is place
    assert buffers.restore() == buffers.nonfinite() == []
    model(torch.randn(5, 6))
    buffers.keep()
    assert buffers.restore() == []
    assert not torch.equal(model.norm.running_mean, kept["norm.running_mean"])


@pytest.mark.parametrize("drop", [True, False])
def test_buffers_go_back_where_a_flag_on_the_device_says_so(drop: bool) -> None:
    model = Net()
    buffers = Buffers({"": model})
    kept = {name: b.clone() for name, b in model.named_buffers()}
    model(torch.full((5, 6), math.nan))
    written = {name: b.clone() for name, b in model.named_buffers()}
    buffers.restore_where(torch.tensor(drop))
    assert equal(dict(model.named_buffers()), kept if drop else written)


class Holder(nn.Module):
    def __init__(self, **buffers: Tensor | None) -> None:
        super().__init__()
        for name, value in buffers.items():
            self.register_buffer(name, value)


def test_buffers_of_all_kinds() -> None:
    shared = torch.arange(3.0)
    model = nn.ModuleList([Holder(count=torch.tensor(3), s=shared, none=None), Holder(s=shared, x=torch.ones(2))])
    buffers = Buffers({"": model})
    model[0].count += 1
    shared.add_(1)
    model[0].none = torch.ones(1)
    batch = torch.full((2,), math.inf)
    model[1].x = batch
    late = Holder(y=torch.tensor([math.nan]))
    model.append(late)
    assert buffers.nonfinite() == ["1.x", "2.y"]
    assert buffers.restore() == ["0.count", "0.s", "0.none", "1.x"]
    assert model[0].count == 3
    assert shared.tolist() == [0, 1, 2]
    assert model[0].s is model[1].s is shared
    assert model[0].none is None
    assert model[1].x.tolist() == [1, 1]
    assert batch.tolist() == [math.inf, math.inf]  # the module's new tensor may be somebody else's
    assert buffers.restore() == []
    buffers.keep()
    late.y.zero_()
    assert buffers.restore() == ["2.y"]
    assert late.y.isnan().all()


def test_a_shared_buffer_that_one_module_binds_anew() -> None:
    shared = torch.zeros(2)
    model = nn.ModuleList([Holder(s=shared), Holder(s=shared)])
    buffers = Buffers({"": model})
    model[0].s = torch.ones(2)
    buffers.keep()
    model[0].s.fill_(5)
    shared.fill_(6)
    assert buffers.restore() == ["0.s", "1.s"]
    assert [m.s.tolist() for m in model] == [[1, 1], [0, 0]]


def test_a_buffer_that_changes_shape_or_dtype() -> None:
    model = Holder(grows=torch.ones(2), moves=torch.ones(2))
    buffers = Buffers({"": model})
    model.grows = torch.zeros(5)
    model.moves = torch.zeros(2, dtype=torch.float64)
    assert buffers.restore() == ["grows", "moves"]
    assert model.grows.tolist() == [1, 1]
    assert model.moves.tolist() == [1, 1]
    assert model.moves.dtype == torch.float64  # the model was moved: the buffer stays where it is
    buffers.keep()
    model.grows.resize_(7).zero_()
    model.moves.zero_()
    assert buffers.restore() == ["grows", "moves"]
    assert model.grows.tolist() == model.moves.tolist() == [1, 1]


def test_inference_tensors_and_pending_graphs() -> None:
    with torch.inference_mode():
        made = torch.ones(2)
    model = Holder(made=made, used=torch.ones(2))
    buffers = Buffers({"": model})
    weight = torch.ones(2, requires_grad=True)
    loss = (weight * model.used).sum()
    assert buffers.restore() == []
    with torch.inference_mode():
        made.fill_(math.nan)
    assert buffers.nonfinite() == ["made"]
    assert buffers.restore() == ["made"]
    assert made.tolist() == [1, 1]
    loss.backward()
    model.used.data.fill_(4)  # past the version counter, as a rollback writes
    buffers.keep(everything=True)
    model.used.zero_()
    buffers.restore()
    assert model.used.tolist() == [4, 4]


def test_a_mask_is_not_poison_but_a_new_infinity_is() -> None:
    model = Holder(mask=torch.tensor([0.0, -math.inf]), plain=torch.zeros(2))
    buffers = Buffers({"": model})
    model.mask = torch.tensor([0.0, -math.inf])
    assert buffers.nonfinite() == []
    model.mask[0] = math.inf
    model.plain[1] = -math.inf
    assert buffers.nonfinite() == ["mask", "plain"]


def test_unchanged_buffers_are_not_copied_and_shadow_memory_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.ModuleList([Holder(still=torch.ones(3)), Holder(moves=torch.ones(3)), Holder(bound=torch.ones(3))])
    buffers = Buffers({"": model})
    copied: list[int] = []
    fused = torch._foreach_copy_

    def spy(targets: Any, sources: Any, **options: Any) -> None:
        copied.extend(t.data_ptr() for t in targets)
        fused(targets, sources, **options)

    monkeypatch.setattr(torch, "_foreach_copy_", spy)
    buffers.keep()
    assert copied == []
    rounds = []
    for i in range(3):
        model[1].moves.fill_(i)
        model[2].bound = torch.full((3,), float(i))
        buffers.keep()
        rounds.append(copied.copy())
        copied.clear()
    assert len(rounds[0]) == 2
    assert rounds[0] == rounds[1] == rounds[2]
    model[1].moves.fill_(9)
    buffers.restore()
    assert model[1].moves.tolist() == [2, 2, 2]


def test_models_without_buffers_and_modules_that_are_replaced() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    buffers = Buffers({"": model})
    for _ in range(3):
        buffers.keep()
    assert buffers.restore() == buffers.nonfinite() == []
    model.append(nn.BatchNorm1d(2))
    for _ in range(16):  # a model without buffers is looked through now and then
        buffers.keep()
    model(torch.full((3, 2), math.nan))
    assert buffers.nonfinite() == ["1.running_mean", "1.running_var"]
    assert len(buffers.restore()) == 3
    assert model[1].running_mean.tolist() == [0, 0]


# -- which state is non-finite


def test_non_finite_parameters_and_optimizer_state_by_name() -> None:
    model = nn.ModuleDict({"emb": nn.Embedding(3, 2), "fc": nn.Linear(2, 2), "mask": nn.Linear(1, 1)})
    model["mask"].weight.requires_grad_(False).fill_(-math.inf)
    extra = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.Adam([extra, *reversed(list(model.parameters()))])
    for p in [*model["emb"].parameters(), *model["fc"].parameters(), extra]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    models = {"": model}
    assert nonfinite_state(models, optimizer) == []
    with torch.no_grad():
        model["fc"].weight[0, 0] = math.inf
        model["emb"].weight[0, 0] = math.nan
        extra.fill_(math.nan)
    optimizer.state[model["fc"].weight]["exp_avg_sq"][0, 0] = math.inf
    optimizer.state[model["fc"].bias]["decay"] = math.nan
    assert nonfinite_state(models, optimizer) == [
        "emb.weight", "fc.weight", "optimizer0.group0.param0", "exp_avg_sq of fc.weight", "decay of fc.bias",
    ]  # fmt: skip


# -- sharded and on a device


def test_shards_of_a_dtensor_come_back() -> None:
    dist = torch.distributed
    if not dist.is_available():
        pytest.skip("no torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = Net()
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        step(model, optimizer, 0)
        snapshots = ring(model, optimizer)
        assert verified(snapshots, 1)

        def values() -> list[Tensor]:
            state = [v for s in optimizer.state.values() for v in s.values()]
            full = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in [*model.parameters(), *state]]
            return [t.detach().clone() for t in full]

        reference = values()
        step(model, optimizer, 1)
        del optimizer.state[model.b.weight]["exp_avg"]
        snapshots.roll_back()
        assert type(optimizer.state[model.b.weight]["exp_avg"]) is type(model.b.weight.data)
        optimizer.state[model.b.weight] = {  # in the order of the reference
            key: optimizer.state[model.b.weight][key] for key in ("step", "exp_avg", "exp_avg_sq")
        }
        assert equal(values(), reference)
        step(model, optimizer, 2)
        with torch.no_grad():
            model.b.weight.to_local().fill_(math.nan)
        assert not verified(snapshots, 2)
        assert nonfinite_state({"": model}, optimizer) == ["b.weight"]
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("room", [0, 10**6], ids=["staged", "in the stream of the training"])
def test_on_cuda_the_copies_are_those_of_the_moment(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from dynguard.torch import slots

    monkeypatch.setattr(slots, "ROOM", room)
    model = nn.Sequential(nn.Linear(2048, 2048), nn.BatchNorm1d(2048)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x = torch.randn(64, 2048, device="cuda")
    snapshots = ring(model, optimizer, restore_rng=True)
    for i in range(8):
        model(x).pow(2).mean().backward()
        optimizer.step()
        finite = snapshots.take(i)
        if i == 5:
            reference = everything(model, optimizer)
        if i < 6:
            snapshots.confirm(bool(finite))
    assert finite.is_cuda
    assert all(t.is_pinned() for slot in snapshots._slots for t in slot.memory.values() if t.ndim)
    draws = torch.rand(3, device="cuda")
    model[0].weight.data.fill_(math.nan)
    assert snapshots.roll_back() == 5
    assert equal(everything(model, optimizer), reference)
    assert torch.equal(torch.rand(3, device="cuda"), draws)  # nothing was drawn between the snapshot and these
