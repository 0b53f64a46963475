"""A run resumed from a checkpoint is judged as one that never stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dynguard import FlowManager
from dynguard.errors import SetupError

Watch = Callable[..., FlowManager]
FAULTS = {230: 30.0, 231: 30.0, 260: 4.0, 300: 1e6, 320: 6.0}


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: Any, optimizer: torch.optim.Optimizer, flow: FlowManager, first: int, last: int) -> None:
    for step in range(first, last):
        x = torch.randn(16, 5, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - x[:, :1]).square().mean()
        flow.observe(loss=loss)
        optimizer.zero_grad()
        loss.backward()
        if step in FAULTS:
            model[0].weight.grad.mul_(FAULTS[step])
        optimizer.step()


def told(flow: FlowManager, since: int) -> list[Any]:
    found = [(f.step, f.kind, f.subject, [e.value for e in f.evidence], f.confidence) for f in flow.findings]
    return [t for t in (*found, *[(i.step, i.action, i.reason) for i in flow.interventions]) if t[0] >= since]


@pytest.mark.parametrize("stop_at", [7, 100, 215, 231])
def test_verdicts_after_a_resume_are_those_of_a_run_that_never_stopped(
    watch: Watch, tmp_path: Path, stop_at: int
) -> None:
    model, optimizer = parts()
    whole = watch(model, optimizer)
    train(model, optimizer, whole, 0, 350)
    assert {i.step for i in whole.interventions} >= {230, 300}  # there is something to compare

    model, optimizer = parts()
    first = watch(model, optimizer)
    train(model, optimizer, first, 0, stop_at)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "guard": first.state_dict()}
    torch.save(state, tmp_path / "checkpoint.pt")
    first.close()

    model, optimizer = parts()
    loaded = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    second = watch(model, optimizer)
    second.load_state_dict(loaded["guard"])
    assert second.step == stop_at
    train(model, optimizer, second, stop_at, 350)
    assert told(second, stop_at) == told(whole, stop_at)


def test_a_state_may_be_saved_again_before_the_first_step(watch: Watch) -> None:
    model, optimizer = parts()
    first = watch(model, optimizer)
    train(model, optimizer, first, 0, 50)
    saved = first.state_dict()
    first.close()
    second = watch(*parts())
    second.load_state_dict(saved)
    assert second.state_dict() == saved


@pytest.mark.parametrize("wrong", [{}, {"version": 99}, None, 3])
def test_what_is_no_state_is_refused(watch: Watch, wrong: Any) -> None:
    with pytest.raises(SetupError, match="state"):
        watch(*parts()).load_state_dict(wrong)


def test_a_plugin_that_was_not_there_before_starts_afresh(watch: Watch, probe: Any) -> None:
    first = watch(*parts(), plugins=[probe])
    saved = first.state_dict()
    first.close()
    model, optimizer = parts()
    second = watch(model, optimizer, plugins=["spike"])
    second.load_state_dict(saved)
    train(model, optimizer, second, 0, 20)
    assert second.findings == []
