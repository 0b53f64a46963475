"""What ranks have learnt, brought together between steps without any of them being able to hold up the others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch


def exchange(
    key: str, mine: Any, *, replaces: str | None = None, timeout: float = 5.0, most_bytes: int = 2**26
) -> Sequence[Any] | None:
    """What every rank has put under ``key``, by rank; None where one of them has not within ``timeout``.

    Goes through the store that the process group was made with, not through a collective: a rank that never calls it
    (it has closed, failed, or has the plugin switched off) costs the others the timeout and no more.

    Args:
        key: the same on all ranks, another one each time.
        mine: numbers, strings, lists and dicts.
        replaces: the key before, of which this rank's part is thrown away: by now all have had it.
        timeout: seconds.
        most_bytes: of each rank's part; with more, there is no exchange and no wait.
    """
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    payload = json.dumps(mine)
    # Torch has no public name for it. Every part is announced, also one that is too large, so that nobody waits for it.
    store = torch.distributed.distributed_c10d._get_default_store()
    store.set(f"dynguard/{key}/{rank}", payload if len(payload) <= most_bytes else "")
    if replaces is not None and replaces != key:
        store.delete_key(f"dynguard/{replaces}/{rank}")
    keys = [f"dynguard/{key}/{other}" for other in range(size)]
    try:
        store.wait(keys, timedelta(seconds=timeout))
        parts = [bytes(store.get(key)) for key in keys]
    except (RuntimeError, torch.distributed.DistError):
        return None
    return [json.loads(part) for part in parts] if all(parts) else None
