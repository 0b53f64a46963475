"""What a sparse step costs must not depend on the table: one sort of its gradient, and snapshots that keep away."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dynguard import FlowManager, hookimpl
from dynguard.torch.snapshots import Snapshots

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sparseadam": lambda p: torch.optim.SparseAdam(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}


class Looks:
    @hookimpl
    def on_embeddings(self, event: Any) -> None:
        self.counts = event.counts.tolist()


class Sorts(TorchDispatchMode):
    """Counts the gradients that are really coalesced."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._coalesce.default
        return func(*args, **(kwargs or {}))


def steps(name: str, plugins: list[Any] | None, tmp_path: Path, rows: int = 50) -> tuple[torch.Tensor, int]:
    """The table after five steps, and how often a gradient was sorted in the last one."""
    torch.manual_seed(0)
    table = nn.Embedding(rows, 8, sparse=True)
    optimizer = OPTIMIZERS[name](table.parameters())
    flow = None if plugins is None else FlowManager(table, optimizer, plugins=plugins, run_dir=tmp_path / name)
    for step in range(5):
        ids = torch.randint(0, rows, (64,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        table(ids).square().sum().backward()
        with Sorts() as sorts:
            optimizer.step()
    if flow is not None:
        flow.close()
    return table.weight.detach().clone(), sorts.count


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch.optim.Adagrad
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_watched_sparse_step_is_the_plain_one_bit_for_bit(name: str, tmp_path: Path) -> None:
    plain, own = steps(name, None, tmp_path)
    watched, sorts = steps(name, ["spike", Looks()], tmp_path)
    assert torch.equal(plain, watched)
    # where the optimizer sorts the gradient itself, watching adds no sort, else one
    assert sorts == (own if name in ("sparseadam", "adagrad") else own + 1)


def test_lookups_are_counted_although_the_gradient_was_coalesced(tmp_path: Path) -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.ones(8, 2))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return nn.functional.embedding(ids, self.table, sparse=True)

    model, looks = Functional(), Looks()
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)
    with FlowManager(model, optimizer, plugins=[looks], run_dir=tmp_path / "run"):
        model(torch.tensor([5, 5, 2])).sum().backward()
        optimizer.step()
    assert looks.counts == [1, 2]


@pytest.mark.parametrize(("sparse", "every", "apart"), [(True, None, 400), (False, None, 50), (True, 50, 50)])
def test_snapshots_of_large_sparse_tables_are_rare(
    sparse: bool, every: int | None, apart: int, caplog: pytest.LogCaptureFixture
) -> None:
    """32 MiB of which steps touch a few rows: eight times what a step is taken to cost beside. Asked for: as asked."""
    table = nn.Embedding(2**18, 32, sparse=sparse)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    snapshots = Snapshots({"": table}, lambda: [optimizer], every=every)
    table(torch.tensor([1, 2])).sum().backward()
    taken = []
    with caplog.at_level(logging.INFO, "dynguard"):
        for step in range(1, 1001):
            if snapshots.due(step):
                snapshots.take(step)
                taken.append(step)
    assert taken[:3] == [1, 10, 25]
    assert taken[3:] == list(range(apart, 1001, apart))
    assert bool([r for r in caplog.messages if "400 steps apart" in r]) is (apart == 400)
