"""A row ledger: 15 bytes for every row of an embedding table, kept where the table lies.

===========  =======  =============================================================================================
tensor       bytes    what
===========  =======  =============================================================================================
exposures    4        look-ups so far as uint32, repeats within a batch included; saturates
means[0]     2        visits: steps in which the row was looked up and its gradient was measured and finite, as int16;
                      saturates
means[1]     2        energy: mean over visits of |g|^2 / count as float16, in the table's own unit, 256 visits long
means[2]     2        velocity: mean length of the row's way in the step of a visit, as float16, in such a unit
heading      5        sum over visits of g / |g| on five fixed random directions, as int8 in steps of 2/3
===========  =======  =============================================================================================

Why a heading and not a cosine of consecutive gradients: gradients of one row differ in direction with whom the row
meets, and consecutive ones are nearly orthogonal for sound and contradictory rows alike. What tells them apart is
whether gradients add up at all: of n independent directions the squared sum is n on average, that of a row that
learns is many times n, and that of a row that is pulled to and fro stays far below it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dynguard.arrays import local
from dynguard.torch.embeddings import first_of_each, on_host
from dynguard_plugins.embeddings.ledger_follow import Followed, pack, unpack

PROJECTIONS = 5
QUANTUM = 2 / 3
WINDOW = 256
KNOWN = 512  # measured visits from which on a row of a large table is looked at less often ...
THIN = 8  # ... namely at one visit in so many
RENEW = 100.0  # times the unit that typical gradients have come to when a new one is taken
WARM = 16  # steps in which units are found, and in how many they are looked at again
MOST = 2**32 - 1
SMALL = 0.01  # a gradient below this share of the typical one hardly turns the heading: it may be rounding
Array = npt.NDArray[Any]


@dataclass(slots=True)
class Columns:
    """The ledger on the host, one entry a row: (N,) each; heading (N, 5)."""

    exposures: Array
    visits: Array
    energy: Array
    velocity: Array
    heading: Array

    @property
    def resultant(self) -> Array:
        """(N,) squared sum of the visits' gradient directions over visits: 1 for independent ones, NaN unvisited."""
        with np.errstate(all="ignore"):
            return np.asarray(np.square(self.heading).mean(axis=1) / np.where(self.visits > 0, self.visits, np.nan))


@dataclass(slots=True)
class _Pending:
    """What the newest step would teach, if it turns out not to be rejected."""

    step: int
    rows: Tensor
    learns: Tensor  # (r,) bool
    energy: Tensor  # (r,) |g|^2 / count
    heading: Tensor  # (r, 5)
    weights: Tensor  # (r, d) before the update
    looked_up: Tensor  # (r,) bool, False for places left over


class Ledger:
    """Accounts for every row of one table. A step costs what the touched rows cost, and no host read.

    Args:
        weight: (N, d) the table.
        exact_bytes: how much the rows that are followed exactly may take in a table that they all fit in.
        follow: how many rows are followed exactly in a larger table; by default what 1 byte a row pays for.
    """

    def __init__(self, weight: Tensor, *, exact_bytes: int = 2**18, follow: int | None = None) -> None:
        self.width = weight.shape[1]
        self.device = weight.device
        rows, device = weight.shape[0], weight.device
        self.exposures = torch.zeros(rows, dtype=torch.int32, device=device)
        self.means = torch.zeros((rows, 3), dtype=torch.int16, device=device)
        self.heading = torch.zeros((rows, PROJECTIONS), dtype=torch.int8, device=device)
        self.followed = Followed(weight, exact_bytes, follow)
        self.unit = torch.zeros((), dtype=torch.float32, device=weight.device)  # typical |g|^2 / count of a row
        self.stride = torch.zeros_like(self.unit)  # typical way of a row in a step, 0 until known
        self.typical = torch.zeros_like(self.unit)  # running mean of |g| / sqrt(count)
        self.steps = 0  # from the first event to the newest
        self.first_step = -1
        self._pending: _Pending | None = None
        generator = torch.Generator().manual_seed(20)
        directions = torch.randn((self.width, PROJECTIONS), generator=generator)
        directions *= self.width**0.5 / directions.norm(dim=0).clamp_min(1e-9)
        self._directions = (directions / QUANTUM).t().contiguous().to(weight.device)  # the faster way round
        self._spread = (torch.arange(PROJECTIONS) * 0.5698402909980532 % 1.0).to(weight.device)

    def __len__(self) -> int:
        return self.exposures.shape[0]

    @property
    def bytes(self) -> int:
        """What is kept beside the table, the touched rows of the newest step left out."""
        own = (self.exposures, self.means, self.heading)
        return sum(t.numel() * t.element_size() for t in own) + self.followed.bytes

    def see(self, step: int, rows: Tensor, counts: Tensor, gradients: Tensor | None, weight: Tensor, ok: Any) -> None:
        """Take down one step.

        Args:
            step: from 0.
            rows: (r,) row numbers and
            counts: (r,) how often each was looked up, both as in an EmbeddingEvent.
            gradients: (r, d) or None.
            weight: (N, d) before the update.
            ok: whether the step before this one was taken, bool or 0-d bool on any device.
        """
        if weight.shape[0] > len(self):
            self._grow(weight)
        self.first_step = step if self.first_step < 0 else self.first_step
        self._settle(step, weight, ok)
        looked_up = counts > 0
        if not on_host(rows):  # places left over say the same as the row that they repeat, whoever writes last
            counts = counts.index_select(0, first_of_each(rows))
        self._count(rows, counts)
        self.steps = step - self.first_step + 1
        self.followed.visit(rows, step)
        if gradients is not None:
            some = self._worth_measuring(step, rows)
            if some is not None:
                rows, counts, gradients, looked_up = (
                    t.index_select(0, some) for t in (rows, counts, gradients, looked_up)
                )
            self._pending = self._measure(step, rows, counts, gradients, weight, looked_up)

    def columns(self) -> Columns:
        """Everything on the host."""
        unit, stride = float(self.unit), float(self.stride)
        means = self.means.cpu().numpy()
        halves = means.view(np.float16).astype(np.float64)
        return Columns(
            exposures=self.exposures.cpu().numpy().view(np.uint32).astype(np.int64),
            visits=means[:, 0].astype(np.int64),
            energy=halves[:, 1] * unit,
            velocity=halves[:, 2] * stride,
            heading=self.heading.cpu().numpy() * QUANTUM,
        )

    def merge(self, other: Ledger) -> None:
        """Add what another rank has seen of the same table: counts add up exactly (until they saturate)."""
        if (len(other), other.width) != (len(self), self.width):
            raise ValueError(
                f"ledgers of tables of different shape: {(len(self), self.width)}, {(len(other), other.width)}"
            )
        mine, theirs = self.columns(), other.columns()
        visits = mine.visits + theirs.visits
        self.unit, self.stride = torch.maximum(self.unit, other.unit), torch.maximum(self.stride, other.stride)
        share = mine.visits / np.maximum(visits, 1)
        means = np.zeros((len(self), 3), np.int16)
        means[:, 0] = np.minimum(visits, 32767)
        for column, a, b, unit in (
            (1, mine.energy, theirs.energy, float(self.unit)), (2, mine.velocity, theirs.velocity, float(self.stride)),
        ):  # fmt: skip
            means.view(np.float16)[:, column] = np.minimum((a * share + b * (1 - share)) / (unit or 1.0), 6e4)
        heading = np.clip(np.rint((mine.heading + theirs.heading) / QUANTUM), -127, 127).astype(np.int8)
        exposures = np.minimum(mine.exposures + theirs.exposures, MOST).astype(np.uint32).view(np.int32)
        for own, new in ((self.exposures, exposures), (self.means, means), (self.heading, heading)):
            own.copy_(torch.from_numpy(new))
        self.followed.merge(other.followed)
        self.steps = max(self.steps, other.steps)

    def merged(self, group: Any = None) -> Ledger:
        """A copy that holds what all ranks of a process group have seen. Every rank must call it."""
        states: list[Any] = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(states, self.state_dict(), group=group)
        whole = Ledger.from_state(states[0], self.device)
        for state in states[1:]:
            whole.merge(Ledger.from_state(state, self.device))
        return whole

    def state_dict(self) -> dict[str, Any]:
        """As numbers and strings; the arrays are base64. What the newest step would teach is left out."""
        return {
            "rows": len(self), "width": self.width, "first_step": self.first_step, "steps": self.steps,
            "unit": float(self.unit), "stride": float(self.stride), "typical": float(self.typical),
            "exposures": pack(self.exposures), "means": pack(self.means), "heading": pack(self.heading),
            "followed": self.followed.state_dict(),
        }  # fmt: skip

    @classmethod
    def from_state(cls, state: Mapping[str, Any], device: torch.device | str) -> Ledger:
        """The ledger that ``state_dict()`` was taken of."""
        new = cls(torch.zeros((0, state["width"]), device=device), exact_bytes=0)
        rows = state["rows"]
        new.exposures = unpack(state["exposures"], torch.int32, (rows,), device)
        new.means = unpack(state["means"], torch.int16, (rows, 3), device)
        new.heading = unpack(state["heading"], torch.int8, (rows, PROJECTIONS), device)
        new.followed.load_state_dict(state["followed"], device)
        for name in ("unit", "stride", "typical"):
            getattr(new, name).fill_(state[name])
        new.first_step, new.steps = state["first_step"], state["steps"]
        return new

    def present(self) -> Tensor | None:
        """The rows of the newest step, whose update has not been seen yet."""
        return None if self._pending is None else self._pending.rows

    def _grow(self, weight: Tensor) -> None:
        more = weight.shape[0] - len(self)
        for name in ("exposures", "means", "heading"):
            old = getattr(self, name)
            setattr(self, name, torch.cat([old, old.new_zeros((more, *old.shape[1:]))]))
        self.followed.grow(weight)

    def _count(self, rows: Tensor, counts: Tensor) -> None:
        old = self.exposures.index_select(0, rows).to(torch.int64) & MOST
        self.exposures.index_copy_(0, rows, (old + counts).clamp_max_(MOST).to(torch.int32))

    def _worth_measuring(self, step: int, rows: Tensor) -> Tensor | None:
        """Positions of the rows whose gradient is worth a look, or None for all of them.

        Most look-ups are of rows that are known well already. Of those, one visit in ``THIN`` is measured, chosen by
        row and step alone; a row with few visits, or one that is followed, always is. On a device, where choosing
        would take a host read, all are.
        """
        if self.followed.spacing == 1 or not on_host(rows):
            return None
        numbers, visits = rows.numpy(), self.means.numpy()
        turn = (numbers * 0.7548776662466927 + step * 0.6180339887498949) % 1.0 < 1.0 / THIN
        turn |= visits[numbers, 0] < KNOWN
        turn |= numbers % self.followed.spacing == 0
        some = np.flatnonzero(turn)
        return None if len(some) == len(numbers) else torch.from_numpy(some)

    def _measure(
        self, step: int, rows: Tensor, counts: Tensor, gradients: Tensor, weight: Tensor, looked_up: Tensor
    ) -> _Pending:
        g = gradients.float()
        squares = torch.linalg.vecdot(g, g)
        learns = torch.isfinite(squares)
        squares = torch.where(learns, squares, 0.0)
        energy = squares / counts
        if self.steps <= WARM or step % WARM == 0:
            self._rescale(squares * looked_up, energy * looked_up)
        length = (squares.sqrt() + counts.sqrt().mul_(SMALL * self.typical)).add_(1e-37)
        heading = torch.nn.functional.linear(g, self._directions).div_(length.unsqueeze(1))
        return _Pending(step, rows, learns, energy, heading, weight.index_select(0, rows), looked_up)

    def _rescale(self, squares: Tensor, energy: Tensor) -> None:
        """Bring the typical gradient up to date; the unit stays what it was in the first step that had gradients."""
        some = (squares > 0).sum().clamp_min_(1)
        mean = energy.sum() / some
        level = mean.sqrt()
        self.unit = torch.where(self.unit > 0, self.unit, mean)
        # Rises to its double at most, so that one giant gradient does not blind it for long.
        slow = torch.minimum(self.typical + 0.2 * (level - self.typical), 2 * self.typical)
        self.typical = torch.where(self.typical > 0, slow, level)
        self._renew_unit()

    def _renew_unit(self) -> None:
        """Take a larger unit where gradients have grown by far (a warm-up, a head that began at zero).

        Half precision holds 65,504 units. Costs a pass over the table once for each hundredfold; not on a device,
        where asking takes a host read.
        """
        unit, typical = local(self.unit), local(self.typical)
        if isinstance(unit, np.ndarray) and isinstance(typical, np.ndarray) and 0 < unit * RENEW < typical**2 < np.inf:
            kept = self.means.view(torch.float16).select(1, 1)
            kept.mul_(float(unit) / float(typical) ** 2)
            self.unit.copy_(self.typical.square())

    def _settle(self, step: int, weight: Tensor, ok: Any) -> None:
        """Enter what the last step taught, unless it was rejected."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        next_one = step == pending.step + 1
        rows = pending.rows
        learns = pending.learns & torch.as_tensor(ok if next_one else True, device=rows.device)
        now = weight.index_select(0, rows)
        self.followed.after(rows, now)
        means = self.means.index_select(0, rows)
        visits = means.select(1, 0)
        n = (visits.int() + 1).clamp_max_(32767)
        rate = torch.where(learns, 1.0 / n.clamp_max(WINDOW), 0.0)
        _blend(means, 1, pending.energy / (self.unit + 1e-37), rate)
        if next_one:
            way = torch.linalg.vector_norm(now.float().sub_(pending.weights), dim=1)  # `now` is a copy, used up here
            way.nan_to_num_(0.0, 0.0)
            if self.steps <= WARM or step % WARM == 0:
                usual = learns & pending.looked_up
                moved = (way * usual).sum() / (usual & (way > 0)).sum().clamp_min(1)
                self.stride = torch.where(self.stride > 0, self.stride, moved)
            _blend(means, 2, way / (self.stride + 1e-37), rate)
        visits.copy_(torch.where(learns, n, visits))
        self.means.index_copy_(0, rows, means)
        self.heading.index_copy_(0, rows, _turned(self.heading.index_select(0, rows), pending, learns, self._spread))


def _blend(means: Tensor, column: int, value: Tensor, rate: Tensor) -> None:
    kept = means.view(torch.float16).select(1, column)
    kept.copy_(torch.lerp(kept.float(), value.clamp_max(6e4), rate))


def _turned(heading: Tensor, pending: _Pending, learns: Tensor, spread: Tensor) -> Tensor:
    """The headings with the visit's, rounded by a dither of row and step: right on average, and the same every time."""
    dither = torch.frac(pending.rows * 0.7548776662466927 + (pending.step * 0.6180339887498949) % 1.0).float()
    add = torch.frac(dither.unsqueeze(1) + spread).add_(pending.heading).floor_()
    return torch.where(learns.unsqueeze(1), add.add_(heading).clamp_(-127, 127), heading).to(torch.int8)
