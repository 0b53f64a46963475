"""Faults planted in real training: in one place, at one step, and gone afterwards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dynguard import Action, Finding, FlowManager, Signal, hookimpl
from dynguard.testing import bad_batch, poison_gradient, scale_gradient

NAN, INF = math.nan, math.inf


def hooks_left(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    own = [len(p._backward_hooks or ()) for p in model.parameters()]
    return sum(own) + len(optimizer._optimizer_step_post_hooks) + len(optimizer._optimizer_step_pre_hooks)


def seen_gradients(fault: Any, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> list[list[float]]:
    seen = []
    with fault:
        for _ in range(steps):
            model(torch.ones(1, 4)).sum().backward()
            seen.append([float(p.grad.abs().max()) for p in model.parameters()])  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
    return seen


def one_layer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 2)  # the gradient of the sum of outputs is 1 for every weight and bias, at every step
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def test_a_scaled_gradient_hits_one_parameter_at_the_named_steps_and_leaves_no_hook() -> None:
    model, optimizer = one_layer()
    fault = scale_gradient(model, "weight", 1000.0, step=(1, 3), optimizer=optimizer)
    assert seen_gradients(fault, model, optimizer) == [[1, 1], [1000, 1], [1, 1], [1000, 1]]
    assert fault.hits == [1, 3]
    assert hooks_left(model, optimizer) == 0


def test_a_fault_in_a_loop_that_dies_leaves_no_hook() -> None:
    model, optimizer = one_layer()
    with pytest.raises(KeyError), poison_gradient(model, "bias", step=0, optimizer=optimizer):
        raise KeyError
    assert hooks_left(model, optimizer) == 0


def test_a_used_fault_starts_afresh() -> None:
    model, optimizer = one_layer()
    fault = scale_gradient(model, "bias", 7.0, step=1, optimizer=optimizer)
    for _ in range(2):
        assert [step[1] for step in seen_gradients(fault, model, optimizer, 3)] == [1, 7, 1]


@pytest.mark.parametrize(("index", "at"), [(0, (0, 0)), (5, (1, 1)), (-1, (1, 3)), ((1, 2), (1, 2))])
def test_a_poisoned_gradient_is_bad_at_one_entry(index: Any, at: tuple[int, int]) -> None:
    model, _ = one_layer()
    with poison_gradient(model, "weight", index=index, value=-INF) as fault:
        fault.arm()
        model(torch.ones(1, 4)).sum().backward()
        expected = torch.ones(2, 4)
        expected[at] = -INF
        assert torch.equal(model.weight.grad, expected)  # type: ignore[arg-type]
        model.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
    assert torch.equal(model.weight.grad, torch.ones(2, 4))  # type: ignore[arg-type]  # armed for one pass only
    assert fault.hits == [0]


def test_a_poisoned_sparse_gradient_stays_sparse() -> None:
    table = nn.Embedding(10, 2, sparse=True)
    with poison_gradient(table, "weight", index=(1, 0)) as fault:
        fault.arm()
        table(torch.tensor([3, 8, 8])).sum().backward()
    gradient = table.weight.grad.coalesce()  # type: ignore[union-attr]
    assert gradient.indices().tolist() == [[3, 8]]
    assert torch.isnan(gradient.values()).tolist() == [[False, False], [True, False]]


def test_every_backward_of_an_accumulated_step_is_hit() -> None:
    model, optimizer = one_layer()
    with scale_gradient(model, "weight", 10.0, step=1, optimizer=optimizer) as fault:
        for _ in range(2):
            for _ in range(3):
                model(torch.ones(1, 4)).sum().backward()
            top = float(model.weight.grad.max())  # type: ignore[operator,union-attr]
            optimizer.step()
            optimizer.zero_grad()
    assert (top, fault.hits) == (30.0, [1, 1, 1])


def test_names_may_leave_out_the_prefixes_of_wrappers() -> None:
    model = nn.Sequential()
    model.add_module("module", nn.Linear(4, 2))
    fault = scale_gradient(model, "weight", 2.0)
    with fault:
        fault.arm()
        model(torch.ones(1, 4)).sum().backward()
    assert fault.hits == [0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m, o: scale_gradient(m, "wieght", 2.0), "Did you mean 'weight'"),
        (lambda m, o: scale_gradient(m, "bias", 2.0), "frozen"),
        (lambda m, o: scale_gradient(m, "weight", 2.0, step=1), "needs both step= and optimizer="),
        (lambda m, o: scale_gradient(m, "weight", 2.0, optimizer=o), "needs both step= and optimizer="),
        (lambda m, o: poison_gradient(m, "weight", index=8), "no entry 8"),
        (lambda m, o: poison_gradient(m, "weight", index=(2, 0)), r"no entry \(2, 0\)"),
    ],
)
def test_a_fault_that_can_not_be_planted_is_refused(make: Callable[[Any, Any], Any], message: str) -> None:
    model, optimizer = one_layer()
    model.bias.requires_grad_(False)  # type: ignore[operator,union-attr]
    with pytest.raises(ValueError, match=message):
        make(model, optimizer)


def test_flow_manager_sees_a_planted_fault_where_and_when_it_was_planted() -> None:
    class Limit:
        @hookimpl
        def on_gradients(self, event: Any) -> Signal:
            bad = ~(event.norms < 1e4)
            return Signal(bad.sum(), bad, lambda: self.explain(event, bad), Action.SKIP)

        def explain(self, event: Any, bad: Any) -> Iterator[Finding]:
            names = [name for name, hit in zip(event.names, bad.tolist(), strict=True) if hit]
            return iter([Finding(kind="grad_spike", action=Action.SKIP, subject=name) for name in names])

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with (
        FlowManager(model, optimizer, plugins=[Limit()], strict=True) as flow,
        scale_gradient(model, "2.weight", 1e9, step=2, optimizer=optimizer),
        poison_gradient(model, "0.bias", index=3, step=4, optimizer=optimizer),
    ):
        for _ in range(6):
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [(f.step, f.subject) for f in flow.findings] == [(2, "2.weight"), (4, "0.bias")]
    assert [done.step for done in flow.interventions] == [2, 4]
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_a_bad_batch_is_a_copy_and_only_its_numbers_are_spoiled() -> None:
    inputs, labels = torch.ones(2, 3), torch.tensor([0, 1])
    batches = [{"x": inputs, "more": [labels, np.ones(2)]} for _ in range(3)]
    spoiled = bad_batch(batches, at=1, scale=10.0, value=NAN)
    got = list(spoiled)
    assert (len(spoiled), spoiled.hits) == (3, [1])
    assert got[0] is batches[0]
    assert torch.isnan(got[1]["x"]).nonzero().tolist() == [[0, 0]]
    assert got[1]["x"][1].tolist() == [10.0, 10.0, 10.0]
    assert got[1]["more"][0] is labels
    assert math.isnan(got[1]["more"][1][0])
    assert inputs.tolist() == [[1.0] * 3] * 2


def test_one_part_of_a_batch_may_be_spoiled() -> None:
    batches = [(torch.ones(2), torch.ones(2))]
    ((x, y),) = bad_batch(batches, at=0, scale=5.0, part=1)
    assert (x.tolist(), y.tolist()) == ([1.0, 1.0], [5.0, 5.0])


def test_batches_are_counted_over_epochs() -> None:
    loader = bad_batch([np.ones(1), np.ones(1)], at=[1, 2], scale=3.0)
    assert [float(batch[0]) for _ in range(2) for batch in loader] == [1.0, 3.0, 3.0, 1.0]


def test_a_fault_that_would_change_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="batch 0 has no floating-point array in its part 'y'"):
        list(bad_batch([{"x": np.ones(1), "y": np.ones(1, dtype=int)}], at=0, scale=2.0, part="y"))
