"""How often a clean step reads the device: once by default, never when reads are deferred; and what deferring keeps."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dynguard import Action, FlowManager
from dynguard.arrays import as_on_device
from dynguard.torch import reading

Watch = Callable[..., FlowManager]
READING = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim", "unique_consecutive")
METHODS = ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__", "__array__")


class Waits(TorchDispatchMode):
    """Counts what would make the host wait for a device, taking the CPU for one: operators and methods that read."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.where: list[str] = []
        self.inside = False
        self.home: dict[int, torch.Tensor] = {}  # what was sent home, held so that no address comes again

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in READING:
            self.saw(name, args[0])
        if name == "copy_" and (kwargs or {}).get("non_blocking", len(args) > 2 and args[2]):
            self.home[args[0].data_ptr()] = args[0]
        return func(*args, **(kwargs or {}))

    def saw(self, name: str, tensor: torch.Tensor) -> None:
        if not self.inside and tensor.data_ptr() not in self.home:
            self.count += 1
            self.where.append(name)


@contextmanager
def counting() -> Iterator[Waits]:
    waits = Waits()
    before = {name: vars(torch.Tensor).get(name) for name in METHODS}

    def stand_in(name: str, method: Any) -> Any:
        def counted(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            waits.saw(name, self)
            outer, waits.inside = waits.inside, True
            try:
                result = method(self, *args, **kwargs)
            finally:
                waits.inside = outer
            if isinstance(result, torch.Tensor):
                waits.home[result.data_ptr()] = result  # a copy at home may be looked at as often as one likes
            return result

        return counted

    for name in METHODS:
        setattr(torch.Tensor, name, stand_in(name, getattr(torch.Tensor, name)))
    try:
        with as_on_device(), waits:
            yield waits
    finally:
        for name, method in before.items():
            if method is None:
                delattr(torch.Tensor, name)
            else:
                setattr(torch.Tensor, name, method)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, flow: FlowManager | None, steps: int, spoil: Any = None
) -> list[bool]:
    """Train; whether each step moved any weight."""
    moved = []
    for step in range(steps):
        torch.manual_seed(step)
        x = torch.randn(16, 6)
        loss = (model(x) - x[:, :1]).square().mean()
        if flow is not None:
            flow.observe(loss=loss)
        optimizer.zero_grad()
        loss.backward()
        if spoil is not None:
            spoil(step, model)
        with torch.no_grad():
            before = [p.clone() for p in model.parameters()]
        optimizer.step()
        moved.append(any(bool((a != b).any()) for a, b in zip(before, model.parameters(), strict=True)))
    return moved


class Words(nn.Module):
    """A table and what stands on it."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.body = nn.Embedding(4000, 6), net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(self.table((x[:, :3].abs() * 500).long()).mean(1))
        return out


@pytest.mark.parametrize("make", [net, Words])
@pytest.mark.parametrize(("reads", "expected"), [("step", 1), ("deferred", 0)])
def test_host_reads_of_a_clean_step(watch: Watch, make: Callable[[], nn.Module], reads: str, expected: int) -> None:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    with counting() as waits:
        flow = watch(model, optimizer, plugins=["default", "-console", "-history"], reads=reads, snapshot_every=50)
        counts = []
        for step in range(240):
            x = torch.randn(16, 6)
            loss = (model(x) - x[:, :1]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            waits.count, waits.where = 0, []
            flow.observe(loss=loss)
            optimizer.step()
            counts.append((waits.count, step, tuple(waits.where)))
    assert flow.findings == [] or {f.severity.value for f in flow.findings} == {"info"}
    # The step that makes the optimizer's state is never left to the device: fused SGD would keep garbage.
    wrong = [c for c in counts[1:] if c[0] != expected]
    assert not wrong, wrong[:5]


def nan_at(step: int) -> Callable[[int, nn.Module], None]:
    def spoil(now: int, model: Any) -> None:
        if now == step:
            with torch.no_grad():
                model[0].weight.grad[1, 2] = math.nan

    return spoil


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad])
def test_a_deferred_skip_happens_on_the_device_and_is_told_a_step_later(watch: Watch, make: Any) -> None:
    model = net()
    optimizer = make(model.parameters(), lr=1e-2, fused=True)
    flow = watch(model, optimizer, reads="deferred")
    known: list[int] = []

    def spoil(step: int, m: nn.Module) -> None:
        known.append(len(flow.interventions))
        nan_at(20)(step, m)

    moved = train(model, optimizer, flow, 30, spoil)
    assert [i for i, m in enumerate(moved) if not m] == [20]
    assert [(i.step, i.action) for i in flow.interventions] == [(20, Action.SKIP)]
    assert known[21] == 0  # the step after has not been taken yet
    assert known[22] == 1
    assert [f.subject for f in flow.findings if f.kind == "nan_grad"] == ["0.weight"]
    assert all(torch.isfinite(t).all() for t in (*model.parameters(), *model.buffers()))
    for state in optimizer.state.values():
        assert all(torch.isfinite(t).all() for t in state.values())
    assert not hasattr(optimizer, "found_inf")


def test_a_deferred_run_without_faults_equals_an_unguarded_one_bit_for_bit(watch: Watch) -> None:
    ends = []
    for guarded in (False, True):
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        flow = watch(model, optimizer, reads="deferred") if guarded else None
        train(model, optimizer, flow, 60)
        ends.append([t.detach().clone() for t in (*model.parameters(), *model.buffers())])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_a_first_step_that_is_dropped_leaves_no_garbage_in_fused_sgd(watch: Watch) -> None:
    """torch's fused SGD allocates the momentum of a first step without filling it, and found_inf leaves it so."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, fused=True)
    flow = watch(model, optimizer, reads="deferred")
    junk = [torch.full((n,), 1e30) for n in (16, 96, 16) for _ in range(200)]
    del junk
    moved = train(model, optimizer, flow, 20, nan_at(0))
    assert moved == [False] + [True] * 19
    assert max(float(p.detach().abs().max()) for p in model.parameters()) < 100


def test_a_new_regime_is_accepted_in_deferred_mode_too(watch: Watch) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, fused=True)
    flow = watch(model, optimizer, reads="deferred", max_consecutive_skips=3)

    def spoil(step: int, m: nn.Module) -> None:
        if step >= 150:
            for p in m.parameters():
                assert p.grad is not None
                p.grad.mul_(1000)

    moved = train(model, optimizer, flow, 200, spoil)
    assert sum(not m for m in moved) <= 10
    assert all(moved[-30:])


def test_gradients_do_not_outlive_their_step_for_the_sake_of_a_deferred_read(watch: Watch) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    watch(model, optimizer, plugins=["spike", "health"], reads="deferred")
    for _ in range(5):
        model(torch.randn(8, 6)).square().mean().backward()
        grads = [weakref.ref(p.grad) for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
        assert not any(r() is not None for r in grads)


def test_the_last_steps_fault_is_told_at_close(watch: Watch) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    flow = watch(model, optimizer, reads="deferred")
    train(model, optimizer, flow, 10, nan_at(9))
    flow.close()
    assert [(i.step, i.action) for i in flow.interventions] == [(9, Action.SKIP)]


def test_an_optimizer_that_can_not_defer_keeps_the_read_and_says_so(
    watch: Watch, caplog: pytest.LogCaptureFixture
) -> None:
    model = net()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    flow = watch(model, optimizer, reads="deferred")
    assert "fused" in caplog.text
    train(model, optimizer, flow, 10, nan_at(5))
    assert [(i.step, i.action) for i in flow.interventions] == [(5, Action.SKIP)]


def test_a_dry_run_defers_and_drops_nothing(watch: Watch) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, fused=True)
    flow = watch(model, optimizer, reads="deferred", mode="observe")

    def spoil(step: int, m: Any) -> None:
        if step == 30:
            m[0].weight.grad.mul_(1e4)

    assert all(train(model, optimizer, flow, 40, spoil))
    flow.close()
    assert [(i.step, i.action, i.carried_out) for i in flow.interventions] == [(30, Action.SKIP, False)]


def test_the_read_is_one_copy_however_many_detectors_there_are(
    watch: Watch, make_probe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    real = reading.to_host
    monkeypatch.setattr(reading, "to_host", lambda packed: calls.append(1) or real(packed))
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    flow = watch(model, optimizer, plugins=["spike", *[make_probe() for _ in range(5)]])
    train(model, optimizer, flow, 7)
    assert len(calls) == 7
