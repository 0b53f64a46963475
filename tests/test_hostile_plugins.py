"""Whatever a plugin does, training ends with the same weights, bit for bit, as without it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dynguard import Finding, FlowManager, Section, Signal, hookimpl

STEPS = 30


def train(plugins: list[Any] | None, **options: Any) -> tuple[list[torch.Tensor], FlowManager | None]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    flow = None if plugins is None else FlowManager(model, optimizer, plugins=plugins, **options)
    for _ in range(STEPS):
        x = torch.randn(16, 4)
        loss = (model(x) - x[:, :1]).pow(2).mean()
        if flow is not None:
            flow.observe(loss=loss, batch=x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if flow is not None:
        flow.close()
    return [t.detach().clone() for t in (*model.parameters(), *model.buffers())], flow


class RaisesEverywhere:
    @hookimpl
    def on_run_start(self, run: Any) -> None:
        raise RuntimeError("start")

    @hookimpl
    def on_run_end(self, run: Any, error: Any) -> None:
        raise RuntimeError("end")

    @hookimpl
    def on_loss(self, event: Any) -> None:
        raise SystemExit(1)

    @hookimpl
    def on_gradients(self, event: Any) -> None:
        raise MemoryError

    @hookimpl
    def on_parameters(self, event: Any) -> None:
        raise RecursionError

    @hookimpl
    def diagnose(self) -> Any:
        raise StopIteration

    @hookimpl
    def summarize(self) -> Any:
        raise ArithmeticError

    @hookimpl
    def write(self, record: Any) -> None:
        raise OSError(28, "No space left on device")

    @hookimpl
    def flush(self, timeout: float) -> None:
        raise OSError(28, "No space left on device")

    @hookimpl
    def close(self, timeout: float) -> None:
        raise OSError(28, "No space left on device")

    def state_dict(self) -> Any:
        raise ValueError


class Answers:
    """A detector that answers with anything."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self.make = make

    @hookimpl
    def on_loss(self, event: Any) -> Any:
        return self.make(event.loss)

    @hookimpl
    def on_gradients(self, event: Any) -> Any:
        return self.make(event.norms)

    @hookimpl
    def on_parameters(self, event: Any) -> Any:
        return self.make(event.norms)

    @hookimpl
    def diagnose(self) -> Any:
        return self.make(torch.ones(2))

    @hookimpl
    def summarize(self) -> Any:
        return self.make(torch.ones(2))


def explodes() -> Any:
    yield Finding(kind="loss_spike")
    raise KeyError("half-way")


def fails_to_learn(_: Any) -> None:
    raise ZeroDivisionError


NONSENSE: dict[str, Callable[[Any], Any]] = {
    "a word": lambda x: "spike!",
    "a number": lambda x: 3,
    "a tensor": lambda x: x,
    "a lambda": lambda x: lambda: None,
    "a list of signals": lambda x: [Signal(x, x > 0, list)],
    "fired is a word": lambda x: Signal(1.0, "yes", list),
    "fired is None": lambda x: Signal(1.0, None, list),
    "fired is a matrix": lambda x: Signal(1.0, torch.ones(3, 3, dtype=torch.bool), list),
    "fired is NaN": lambda x: Signal(1.0, torch.tensor(math.nan), lambda: [Finding(kind="x", action="skip")]),
    "fired is on meta": lambda x: Signal(1.0, torch.ones(2, device="meta", dtype=torch.bool), list),
    "score is a word": lambda x: Signal("high", x > 0, list),
    "score is complex": lambda x: Signal(torch.tensor(1j), x > 0, list),
    "score is empty": lambda x: Signal(torch.ones(0), torch.ones(0, dtype=torch.bool), list),
    "explain is not callable": lambda x: Signal(1.0, True, None),  # type: ignore[arg-type]
    "explain yields words": lambda x: Signal(1.0, True, lambda: ["bad"]),
    "explain raises half-way": lambda x: Signal(1.0, True, explodes),
    "explain returns None": lambda x: Signal(1.0, True, lambda: None),
    "learn raises": lambda x: Signal(1.0, False, list, learn=fails_to_learn),
    "action is a word": lambda x: Signal(1.0, True, list, action="explode"),  # type: ignore[arg-type]
}


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def plain() -> list[torch.Tensor]:
    return train(None)[0]


def test_a_plugin_that_raises_in_every_hook(plain: list[torch.Tensor]) -> None:
    weights, flow = train([RaisesEverywhere()], parameters_every=1, diagnose_every=1)
    assert flow is not None
    assert same(weights, plain)
    assert flow.plugins == ()
    assert "plugin_failed" in [f.kind for f in flow.findings]
    assert flow.interventions == []


@pytest.mark.parametrize("name", NONSENSE)
def test_a_plugin_that_answers_nonsense(name: str, plain: list[torch.Tensor]) -> None:
    weights, flow = train([Answers(NONSENSE[name])], parameters_every=1, diagnose_every=10, max_failures=5)
    assert flow is not None
    assert same(weights, plain)
    assert flow.interventions == []
    assert flow.step == STEPS


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_does_not_blind_the_other_detectors(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with FlowManager(model, optimizer, plugins=[Answers(NONSENSE[name]), "spike"], max_failures=10**6) as flow:
        model(torch.full((2, 4), math.nan)).sum().backward()
        optimizer.step()
    assert [i.detector for i in flow.interventions] == ["spike"]
    assert all(torch.isfinite(p).all() for p in model.parameters())


class HangsInClose:
    @hookimpl
    def write(self, record: Any) -> None:
        """Fine."""

    @hookimpl
    def close(self, timeout: float) -> None:
        time.sleep(30)


class HangsInWrite:
    @hookimpl
    def write(self, record: Any) -> None:
        time.sleep(30)


@pytest.mark.parametrize("plugin", [HangsInClose, HangsInWrite])
def test_a_sink_that_hangs_is_left_behind_at_the_deadline(plugin: Any, plain: list[torch.Tensor]) -> None:
    began = time.monotonic()
    weights, _ = train([plugin(), "memory"], close_timeout=1.0)
    assert time.monotonic() - began < 15
    assert same(weights, plain)


class Floods:
    """A detector that reports thousands of findings at every step."""

    @hookimpl
    def on_gradients(self, event: Any) -> Signal:
        return Signal(1.0, True, lambda: (Finding(kind="grad_spike", subject=f"s{i}") for i in range(3000)))


class Slow:
    @hookimpl
    def write(self, record: Any) -> None:
        time.sleep(0.001)


def test_a_flood_of_findings_fills_no_memory_and_is_counted(plain: list[torch.Tensor]) -> None:
    weights, flow = train([Floods(), Slow()], close_timeout=1.0)
    assert flow is not None
    assert same(weights, plain)
    assert len(flow.findings) <= 10_000
    dropped = [f for f in flow.findings if f.kind == "sink_dropped"]
    assert dropped
    assert dropped[0].subject == "slow"
    assert int(dropped[0].value("dropped_records")) > 10_000  # type: ignore[arg-type]


class Meddles:
    """A plugin that throws away what it is shown: the event is its own copy of the lists, not the optimizer's."""

    @hookimpl
    def on_gradients(self, event: Any) -> None:
        event.gradients.clear()
        event.names = ()
        event.learning_rates = ()


def test_a_detector_that_wrecks_its_event_wrecks_no_training(plain: list[torch.Tensor]) -> None:
    weights, _ = train([Meddles(), "spike"], max_failures=1000)
    assert same(weights, plain)


def test_a_section_and_findings_of_a_good_plugin_still_arrive_beside_a_bad_one() -> None:
    class Good:
        @hookimpl
        def diagnose(self) -> Any:
            return [Finding(kind="stagnation", subject="w")]

        @hookimpl
        def summarize(self) -> Section:
            return Section(title="Good")

    _, flow = train([Good(), RaisesEverywhere()], diagnose_every=10)
    assert flow is not None
    assert "stagnation" in [f.kind for f in flow.findings]
