"""``rows`` on two ranks that train one model: what one has seen, both know; one that stays away holds up nobody."""

from __future__ import annotations

import os
import socket
import time
import traceback
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.multiprocessing as mp  # noqa: E402 - after the skip

STEPS = 120


def child(rank: int, port: int, folder: str, case: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    try:
        {"together": together, "alone": alone}[case](rank, Path(folder))
    except BaseException:
        (Path(folder) / f"error{rank}").write_text(traceback.format_exc())
        raise
    os._exit(0)  # gloo's own threads abort a leaving process now and then, with or without a watch


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


@pytest.mark.parametrize("case", ["together", "alone"])
def test_two_ranks(case: str, tmp_path: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = int(s.getsockname()[1])
    context = mp.get_context("spawn")
    processes = [context.Process(target=child, args=(rank, port, str(tmp_path), case)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
    errors = [path.read_text() for path in tmp_path.glob("error*")]
    assert not errors, errors[0]
    assert [process.exitcode for process in processes] == [0, 0]
