"""What an adversary found in the watch on embeddings: copies, pickles, tracing, shared gradients, replaced tables."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

from dynguard import Action, FlowManager, hookimpl
from dynguard_plugins.embeddings.rows import Rows


def net(rows: int = 50, **options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(rows, 8, **options), nn.Linear(8, 2))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> None:
    F.cross_entropy(model(ids), ids % 2).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit.trace
def test_a_watched_model_can_be_copied_pickled_traced_and_compiled_whole(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    with FlowManager(model, optimizer, plugins=["deep", "-console"], run_dir=tmp_path / "run", strict=True):
        step(model, optimizer, torch.randint(0, 50, (16,)))
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        ids = torch.arange(9)
        traced = torch.jit.trace(model, ids)
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        for other in (loaded, copy.deepcopy(model), traced, compiled):
            torch.testing.assert_close(other(ids), model(ids))


def test_a_copy_takes_nothing_of_the_watch_along(tmp_path: Path) -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    before, model = nn.Linear(4, 8), Unused()
    optimizer = torch.optim.SGD([*model.parameters(), *before.parameters()], lr=0.1)
    with FlowManager([before, model], optimizer, plugins=["default", "-console"], run_dir=tmp_path / "a", strict=True):
        model(before(torch.randn(4, 4))).square().mean().backward()
        optimizer.step()
        copy.deepcopy(model)  # the input of a module has a graph, which can't be copied

    tables, rows = net(), Rows()
    optimizer = torch.optim.SGD(tables.parameters(), lr=0.1)
    with FlowManager(tables, optimizer, plugins=[rows], run_dir=tmp_path / "b"):
        step(tables, optimizer, torch.arange(9))
        twin = copy.deepcopy(tables)
        for _ in range(5):
            twin(torch.arange(9))
        step(tables, optimizer, torch.arange(9))
        assert rows.columns("0.weight").exposures.sum() == 18


@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, lr=1.0), lambda p: torch.optim.SparseAdam(p, lr=0.1)])
def test_tables_that_share_a_sparse_gradient_are_scaled_once_each(make: Any, tmp_path: Path) -> None:
    """Autograd gives the tables of a sum the same values; scaling one must leave the other alone."""

    class Halve:
        @hookimpl
        def adjust_embeddings(self, event: Any) -> None:
            if event.table == "0.weight":
                event.training.scale_row_gradients(event.index, event.rows, torch.full((len(event.rows),), 0.5))

    tables = nn.ModuleList(nn.Embedding(10, 4, sparse=True) for _ in range(2))
    optimizer = make(tables.parameters())
    with FlowManager(tables, optimizer, plugins=[Halve()], run_dir=tmp_path / "run", strict=True):
        (tables[0](torch.arange(5)) + tables[1](torch.arange(5))).sum().backward()
        optimizer.step()
        assert tables[0].weight.grad.coalesce().values().unique().tolist() == [0.5]
        assert tables[1].weight.grad.coalesce().values().unique().tolist() == [1.0]


def test_a_parameter_that_takes_the_place_of_another_is_guarded_and_counted(tmp_path: Path) -> None:
    model, rows = net(60), Rows()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with FlowManager(model, optimizer, plugins=["spike", rows], run_dir=tmp_path / "run", strict=True) as flow:
        for number in range(31):
            if number == 20:
                model[0].weight = nn.Parameter(torch.cat([model[0].weight.detach(), torch.randn(20, 8)]))
                optimizer.param_groups[0]["params"][0] = model[0].weight
            ids = torch.randint(0, 60 if number < 20 else 80, (64,))
            F.cross_entropy(model(ids), ids % 2).backward()
            if number == 30:
                model[0].weight.grad[3] = float("nan")
            optimizer.step()
            optimizer.zero_grad()
        assert [(i.step, i.action, i.subject) for i in flow.interventions] == [(30, Action.SKIP, "0.weight")]
        assert bool(model[0].weight.isfinite().all())
        assert rows.columns("0.weight").exposures.sum() == 31 * 64


def test_watching_leaves_a_parametrised_table_alone(tmp_path: Path) -> None:
    ends = []
    for plugins in (None, ["rows", "collapse"]):
        torch.manual_seed(0)
        model = nn.Sequential(spectral_norm(nn.Embedding(20, 8)), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        flow = plugins and FlowManager(model, optimizer, plugins=plugins, run_dir=tmp_path / "run", strict=True)
        for number in range(30):
            step(model, optimizer, torch.randint(0, 20, (16,), generator=torch.Generator().manual_seed(number)))
        if flow:
            flow.close()
        ends.append(model[1].weight.detach().clone())
    assert torch.equal(*ends)


def test_forwards_under_vmap_and_ids_out_of_range_cost_no_judgement(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    with FlowManager(model, optimizer, plugins=["default", "-console"], run_dir=tmp_path / "run", strict=True) as flow:
        for _ in range(3):
            torch.func.vmap(model)(torch.randint(0, 50, (16, 3))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with pytest.raises(IndexError):
            model(torch.tensor([50]))
        step(model, optimizer, torch.arange(9))
    assert not [f for f in flow.findings if f.kind == "plugin_failed"]


def test_the_graph_of_a_closures_loss_is_let_go(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alive = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(torch.arange(9)), torch.arange(9) % 2)
        loss.backward()
        alive.append(weakref.ref(loss))
        return loss

    with FlowManager(model, optimizer, plugins=["default", "-console"], run_dir=tmp_path / "run", strict=True):
        for _ in range(10):
            optimizer.step(closure)
        gc.collect()
        assert sum(ref() is not None for ref in alive) <= 1


def test_a_frozen_tower_is_no_stalled_one(tmp_path: Path) -> None:
    towers = nn.ModuleDict(
        {f"{n}_tower": nn.Sequential(nn.Embedding(60, 8), nn.Linear(8, 8)) for n in ("user", "item")}
    )
    towers["user_tower"].requires_grad_(False)
    optimizer = torch.optim.Adam(towers.parameters(), lr=1e-2)
    with FlowManager(towers, optimizer, plugins=["towers"], run_dir=tmp_path / "run", strict=True) as flow:
        for number in range(250):
            ids = torch.randint(0, 60, (32,), generator=torch.Generator().manual_seed(number))
            scores = towers["user_tower"](ids) @ towers["item_tower"](ids).T
            F.cross_entropy(scores, torch.arange(32)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert flow.findings == []


def test_rows_of_a_tied_head_or_without_momentum_are_no_zombies(tmp_path: Path) -> None:
    """Words 30 to 59 leave the data half-way: the softmax goes on moving them, and plain SGD has no stale momentum."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(60, 8, padding_idx=0)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.table(ids) @ self.table.weight.T

    for make in (torch.optim.Adam, torch.optim.SGD):
        torch.manual_seed(0)
        model = Tied()
        optimizer = make(model.parameters(), lr=0.01)
        run = tmp_path / make.__name__
        with FlowManager(model, optimizer, plugins=["rows"], run_dir=run, strict=True) as flow:
            for number in range(400):
                ids = torch.randint(1, 60 if number < 150 else 30, (64,))
                F.cross_entropy(model(ids), ids).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert [f.kind for f in flow.findings] == []


def test_planted_rows_are_found_after_a_zero_head_and_a_long_warm_up(tmp_path: Path) -> None:
    """The first gradients are a millionth of the later ones: a unit that was fixed then would saturate."""
    model = net(200)
    nn.init.zeros_(model[1].weight)
    nn.init.zeros_(model[1].bias)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 600) ** 2)
    with FlowManager(model, optimizer, plugins=["rows"], run_dir=tmp_path / "run", strict=True) as flow:
        for number in range(2000):
            generator = torch.Generator().manual_seed(number)
            ids = torch.randint(0, 200, (64,), generator=generator)
            labels = torch.where(ids < 10, torch.randint(0, 2, (64,), generator=generator), ids % 2)
            F.cross_entropy(model(ids), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            warm_up.step()
    found = [f for f in flow.findings if f.kind == "oscillating_rows"]
    assert found
    assert set(found[-1].rows) <= set(range(10))
    assert len(found[-1].rows) >= 8
