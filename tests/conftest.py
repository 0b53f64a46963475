"""What several test files share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dynguard import Action, FlowManager, Signal, hookimpl


class Probe:
    """A detector that keeps what it is shown, on the host, and can be told to fire."""

    def __init__(self, *, fire_at: dict[int, Action] | None = None) -> None:
        self.steps: list[int] = []
        self.sources: list[str] = []
        self.names: list[tuple[str, ...]] = []
        self.norms: list[list[float]] = []
        self.losses: list[float | None] = []
        self.micro: list[int] = []
        self.interventions: list[Any] = []
        self.fire_at = fire_at or {}

    @hookimpl
    def on_gradients(self, event: Any) -> Signal | None:
        from dynguard import Finding

        self.steps.append(event.step)
        self.sources.append(event.source)
        self.names.append(event.names)
        self.norms.append(event.norms.tolist())
        self.losses.append(None if event.loss is None else float(event.loss))
        self.micro.append(len(event.losses))
        action = self.fire_at.get(event.step)
        if action is None:
            return None
        # As a detector of finite spikes answers: asks to clip each layer to norm 1.
        norms = event.norms.tolist()
        found = [
            Finding(
                kind="grad_spike", action=action, subject=name, step=event.step,
                evidence=[{"name": "gradient_norm", "value": norm}, {"name": "gradient_limit", "value": 1.0}],
            )
            for name, norm in zip(event.names, norms, strict=True)
        ]  # fmt: skip
        return Signal(1.0, event.norms.max() >= 0, lambda: found, action)

    @hookimpl
    def on_intervention(self, intervention: Any) -> None:
        self.interventions.append(intervention)


@pytest.fixture
def probe() -> Probe:
    return Probe()


@pytest.fixture
def make_probe() -> type[Probe]:
    return Probe


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Callable[..., FlowManager]]:
    """Makes strict managers that are closed at the end of the test."""
    made: list[FlowManager] = []

    def make(*args: Any, **options: Any) -> FlowManager:
        options.setdefault("strict", True)
        options.setdefault("plugins", ["spike"])
        flow = FlowManager(*args, **options)
        made.append(flow)
        return flow

    yield make
    for flow in made:
        flow.close()


@pytest.fixture(autouse=True)
def _own_excepthook() -> Iterator[None]:
    """torch.distributed puts a prefix of its own into every traceback of the process and never takes it out."""
    before = sys.excepthook
    yield
    sys.excepthook = before


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small layers gain nothing from more, and wait long for one another on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
