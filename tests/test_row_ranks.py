"""``rows`` on two ranks that train one model: what one has seen, both know; one that stays away holds up nobody."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")


from dynguard.testing import on_ranks  # noqa: E402 - after the skip

STEPS = 120


def train(rank: int, folder: Path, plugins: list[Any], **settings: Any) -> tuple[Any, Any]:
    """Each rank looks up one half of the rows only; Adam moves them on both. The flow and this rank's look-ups."""
    from dynguard import FlowManager

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(40, 4), torch.nn.Linear(4, 1))
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.05)
    flow = FlowManager(ddp, optimizer, plugins=plugins, run_dir=folder / f"run{rank}", **settings)
    seen = []
    for step in range(STEPS):
        batch = torch.randint(0, 20, (16,), generator=torch.Generator().manual_seed(100 * step + rank)) + 20 * rank
        seen.append(batch)
        (ddp(batch).squeeze(1) - batch % 3).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return flow, torch.bincount(torch.cat(seen), minlength=40)


def together(rank: int, folder: Path) -> None:
    from dynguard_plugins.embeddings.rows import Rows

    rows = Rows(least_steps=20)
    flow, counts = train(rank, folder, [rows], strict=True, diagnose_every=50)
    flow.close()
    torch.distributed.all_reduce(counts)
    assert rows.columns("0.weight").exposures.tolist() == counts.tolist()
    # alone, either rank would call the other's half dead, and moved by a stale momentum
    assert [(f.kind, f.rows) for f in flow.findings] == []
    assert rows.state_dict()["tables"][0]["ledger"]["steps"] == STEPS


def alone(rank: int, folder: Path) -> None:
    from dynguard_plugins.embeddings.rows import Rows

    flow, _ = train(rank, folder, [Rows(least_steps=20)] if rank == 0 else [], diagnose_every=50)
    start = time.monotonic()
    flow.close()
    assert time.monotonic() - start < 60
    assert flow.findings == []


@pytest.mark.parametrize("work", [together, alone])
def test_two_ranks(work: Any, tmp_path: Path) -> None:
    on_ranks(work, tmp_path)
