"""Rows that are followed exactly: their weights at the start and after their last visit."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dynguard.arrays import local


def pack(tensor: Tensor) -> str:
    """The bytes of a tensor as base64, which a checkpoint takes as it is."""
    whole = tensor.detach().contiguous().cpu().reshape(-1)
    return base64.b64encode(whole.view(torch.uint8).numpy().tobytes()).decode("ascii")


def unpack(text: str, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device | str) -> Tensor:
    """What ``pack()`` has packed."""
    raw = np.frombuffer(base64.b64decode(text), dtype=np.uint8).copy()
    return torch.from_numpy(raw).view(dtype).reshape(shape).to(device)


class Followed:
    """Every ``spacing``-th row of a table; all rows of a table that is small enough.

    A row takes twice its weights and 8 bytes. Where not all fit into ``exact_bytes``, as many are followed as one byte
    a row of the table pays for (at least one row, and up to 256 KiB).

    Args:
        weight: (N, d) the table, whose rows now are the start.
        exact_bytes: see above.
        follow: how many rows to follow where not all fit, instead.
    """

    def __init__(self, weight: Tensor, exact_bytes: int, follow: int | None = None) -> None:
        rows, width = weight.shape
        each = 2 * width * weight.element_size() + 8
        self.spacing = 1
        if rows * each > exact_bytes:
            # One entry of `last` and `seen` belongs to no row.
            fit = follow or max(min(2**18, rows) // each - 1, 1)
            self.spacing = -(-rows // fit)
        self.start = weight.detach()[:: self.spacing].clone()
        self.spare = torch.zeros((1, width), dtype=weight.dtype, device=weight.device)
        self.last = torch.cat([self.start, self.spare])  # after the last visit; the last entry is no row's
        self.seen = torch.full((len(self.start) + 1,), -1, dtype=torch.int64, device=weight.device)

    @property
    def bytes(self) -> int:
        """What is kept."""
        return sum(t.numel() * t.element_size() for t in (self.start, self.last, self.seen))

    @property
    def rows(self) -> Tensor:
        """(f,) numbers of the rows that are followed."""
        return torch.arange(len(self.start), device=self.start.device) * self.spacing

    def visit(self, rows: Tensor, step: int) -> None:
        """These rows were looked up in this step."""
        slots, _ = self._slots(rows)
        self.seen.index_fill_(0, slots, step)

    def after(self, rows: Tensor, weights: Tensor) -> None:
        """The weights of rows after the update of the step in which they were looked up."""
        slots, which = self._slots(rows)
        self.last.index_copy_(0, slots, weights if which is None else weights.index_select(0, which))

    def grow(self, weight: Tensor) -> None:
        """The table has got more rows: they start where they are now."""
        new = weight.detach()[:: self.spacing][len(self.start) :]
        self.start = torch.cat([self.start, new])
        self.last = torch.cat([self.last[:-1], new, self.spare])
        self.seen = torch.cat([self.seen[:-1], self.seen.new_full((len(new) + 1,), -1)])

    def merge(self, other: Followed) -> None:
        """Take over what another rank, which trains the same weights, has seen later."""
        if self.spacing != other.spacing or self.seen.shape != other.seen.shape:
            return
        later = other.seen > self.seen
        self.seen = torch.where(later, other.seen, self.seen)
        self.last = torch.where(later.unsqueeze(1), other.last, self.last)

    def state_dict(self) -> dict[str, Any]:
        """As numbers and strings."""
        return {
            "spacing": self.spacing, "shape": list(self.start.shape), "dtype": str(self.start.dtype).split(".")[-1],
            "start": pack(self.start), "last": pack(self.last), "seen": pack(self.seen),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device | str) -> None:
        """Take up ``state_dict()``."""
        count, width = state["shape"]
        dtype = getattr(torch, state["dtype"])
        self.spacing = state["spacing"]
        self.start = unpack(state["start"], dtype, (count, width), device)
        self.last = unpack(state["last"], dtype, (count + 1, width), device)
        self.seen = unpack(state["seen"], torch.int64, (count + 1,), device)
        self.spare = torch.zeros((1, width), dtype=dtype, device=device)

    def _slots(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Where these rows are kept, and which of them are; on a device the others go to the spare."""
        if self.spacing == 1:
            return rows, None
        numbers = local(rows)
        if isinstance(numbers, np.ndarray):
            which = np.flatnonzero(numbers % self.spacing == 0)
            return torch.from_numpy(numbers[which] // self.spacing), torch.from_numpy(which)
        slots = torch.div(rows, self.spacing, rounding_mode="floor")
        return torch.where(rows % self.spacing == 0, slots, len(self.start)), None
