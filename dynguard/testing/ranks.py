"""Several ranks on one machine, to see what a plugin does under ``torch.distributed``."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def on_ranks(work: Callable[..., object], *arguments: Any, size: int = 2, timeout: float = 120.0) -> None:
    """Run ``work(rank, *arguments)`` in processes that make up a gloo group.

    Args:
        work: a function at the top level of its module, as it is sent to other processes; so are ``arguments``.
        size: how many ranks.
        timeout: seconds that each may take.

    Raises:
        AssertionError: a rank has raised (with its traceback), died or hung.
    """
    import torch.multiprocessing as mp

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    with tempfile.TemporaryDirectory() as name:
        folder, context = Path(name), mp.get_context("spawn")
        processes = [context.Process(target=_rank, args=(r, size, port, name, work, arguments)) for r in range(size)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout)
        hung = [process for process in processes if process.is_alive()]
        for process in hung:
            process.kill()
        failed = "".join(f"rank {f.stem}:\n{f.read_text(encoding='utf-8')}" for f in sorted(folder.glob("*.failed")))
        missing = [rank for rank in range(size) if not (folder / f"{rank}.done").exists()]
    if failed or missing:
        raise AssertionError(failed or f"ranks {missing} {'hang' if hung else 'have died'}")


def _rank(
    rank: int, size: int, port: int, folder: str, work: Callable[..., object], arguments: tuple[Any, ...]
) -> None:
    import torch

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=size)
    try:
        work(rank, *arguments)
    except BaseException:
        (Path(folder) / f"{rank}.failed").write_text(traceback.format_exc(), encoding="utf-8")
        raise
    (Path(folder) / f"{rank}.done").touch()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's own threads abort a process that leaves in order now and then
