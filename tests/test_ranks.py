"""Two ranks with gloo: true norms of shards, one verdict for all, and no hang."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dynguard import Action, FlowManager, Signal, hookimpl
from dynguard.testing import on_ranks


def run(work: Callable[[int, Path], None], folder: Path, size: int = 2) -> None:
    on_ranks(work, folder, size=size)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


def one_rank_sees_a_nan_loss(rank: int, folder: Path) -> None:
    ddp = nn.parallel.DistributedDataParallel(model())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.1)
    flow = FlowManager(ddp, optimizer, plugins=["spike"], strict=True)
    for step in range(6):
        torch.manual_seed(10 * step + rank)
        loss = ddp(torch.randn(4, 6)).square().mean()
        # The gradients are finite on both ranks; only what rank 1 reports is not.
        flow.observe(loss=loss * math.nan if rank == 1 and step == 3 else loss)
        optimizer.zero_grad()
        loss.backward()
        before = [p.detach().clone() for p in ddp.parameters()]
        optimizer.step()
        moved = any(not torch.equal(a, b) for a, b in zip(before, ddp.parameters(), strict=True))
        assert moved == (step != 3), (step, moved)
    assert [(i.step, i.action) for i in flow.interventions] == [(3, Action.SKIP)]
    assert bool([f for f in flow.findings if f.kind == "nan_loss"]) == (rank == 1)
    whole = torch.cat([p.detach().flatten() for p in ddp.parameters()])
    other = whole.clone()
    torch.distributed.broadcast(other, 0)
    assert torch.equal(whole, other)  # the ranks have not drifted apart
    flow.close()


def ranks_agree_in_deferred_mode_too(rank: int, folder: Path) -> None:
    ddp = nn.parallel.DistributedDataParallel(model())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.1, fused=True)
    flow = FlowManager(ddp, optimizer, plugins=["spike"], reads="deferred", strict=True)
    for step in range(8):
        torch.manual_seed(10 * step + rank)
        loss = ddp(torch.randn(4, 6)).square().mean()
        flow.observe(loss=loss * math.nan if rank == 1 and step == 4 else loss)
        optimizer.zero_grad()
        loss.backward()
        before = [p.detach().clone() for p in ddp.parameters()]
        optimizer.step()
        moved = any(not torch.equal(a, b) for a, b in zip(before, ddp.parameters(), strict=True))
        assert moved == (step != 4), (step, moved)
    assert [(i.step, i.action) for i in flow.interventions] == [(4, Action.SKIP)]
    flow.close()


def only_rank_zero_writes(rank: int, folder: Path) -> None:
    ddp = nn.parallel.DistributedDataParallel(model())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with FlowManager(ddp, optimizer, plugins=["default"], run_dir=folder / "run") as flow:
        ddp(torch.randn(4, 6)).sum().backward()
        optimizer.step()
        assert (flow.run_directory is not None) == (rank == 0)
    assert flow._sources[0].names[0] == "0.weight"  # not module.0.weight


class NormKeeper:
    def __init__(self) -> None:
        self.norms: list[float] = []

    @hookimpl
    def on_gradients(self, event: Any) -> Signal | None:
        self.norms = [*event.norms.tolist(), float(event.global_norm)]
        return None


def norms_of_shards_are_those_of_the_whole(rank: int, folder: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    plain = model()
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    plain(x).square().mean().backward()
    expected = [float(torch.linalg.vector_norm(p.grad.double())) for p in plain.parameters() if p.grad is not None]
    sharded = model()
    for layer in (sharded[0], sharded[2], sharded):
        fully_shard(layer)
    optimizer = torch.optim.Adam(sharded.parameters(), lr=0.1)
    keeper = NormKeeper()
    flow = FlowManager(sharded, optimizer, plugins=[keeper, "spike"], strict=True)
    sharded(x).square().mean().backward()
    optimizer.step()
    assert keeper.norms[:-1] == pytest.approx(expected, rel=1e-5)
    assert keeper.norms[-1] == pytest.approx(math.hypot(*expected), rel=1e-5)
    flow.close()


def a_nan_in_one_shard_skips_on_all_ranks(rank: int, folder: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    sharded = model()
    for layer in (sharded[0], sharded[2], sharded):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.1)
    flow = FlowManager(sharded, optimizer, plugins=["spike"], strict=True)
    for step in range(4):
        sharded(torch.randn(8, 6)).square().mean().backward()
        if step == 2 and rank == 1:
            with torch.no_grad():
                sharded[2].weight.grad.to_local()[0, 0] = math.nan
        optimizer.step()
        optimizer.zero_grad()
    assert [(i.step, i.action) for i in flow.interventions] == [(2, Action.SKIP)]
    assert all(torch.isfinite(p.to_local()).all() for p in sharded.parameters())
    flow.close()


def the_farthest_action_of_any_rank_is_taken_by_all(rank: int, folder: Path) -> None:
    from dynguard import GradientSpikeError

    ddp = nn.parallel.DistributedDataParallel(model())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    options = {"nan_action": "raise"} if rank == 0 else {"nan_action": "skip"}
    flow = FlowManager(ddp, optimizer, plugins=[("spike", options)])
    ddp(torch.full((2, 6), math.nan)).sum().backward()
    with pytest.raises(GradientSpikeError):
        optimizer.step()
    flow.close()


def ranks_roll_back_to_the_same_snapshot(rank: int, folder: Path) -> None:
    """Rank 1 alone holds a NaN in a shard when a snapshot is taken: no rank may count that snapshot as good."""
    from torch.distributed.fsdp import fully_shard

    sharded = model()
    for layer in (sharded[0], sharded[2], sharded):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.01)
    flow = FlowManager(sharded, optimizer, plugins=["spike"], snapshot_every=20, strict=True)
    for step in range(24):
        if step == 19 and rank == 1:
            with torch.no_grad():
                optimizer.state[sharded[2].weight]["exp_avg_sq"].to_local()[0, 0] = math.inf
        sharded(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    rollbacks = [i for i in flow.interventions if i.action is Action.ROLLBACK]
    assert [i.step for i in rollbacks] == [20]
    assert "step 10" in rollbacks[0].reason
    flow.close()


@pytest.mark.parametrize(
    "work",
    [
        ranks_roll_back_to_the_same_snapshot,
        ranks_agree_in_deferred_mode_too,
        one_rank_sees_a_nan_loss,
        only_rank_zero_writes,
        norms_of_shards_are_those_of_the_whole,
        a_nan_in_one_shard_skips_on_all_ranks,
        the_farthest_action_of_any_rank_is_taken_by_all,
    ],
    ids=lambda f: f.__name__,
)
def test_two_ranks(work: Callable[[int, Path], None], tmp_path: Path) -> None:
    run(work, tmp_path)
