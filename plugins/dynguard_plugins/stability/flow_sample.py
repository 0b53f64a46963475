"""A strided sample of every layer's entries, in one flat array on the device, and its sums over a window of steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dynguard.torch.moments import moments

if TYPE_CHECKING:
    from dynguard.events import GradientEvent

PER_LAYER, TOTAL = 2048, 65_536
COLUMNS = 8  # of each sampled row, at least


@dataclass(slots=True, frozen=True)
class Section:
    """Where one layer's sample lies: ``rows x columns`` entries of its matrix (rows: units), from ``start`` on."""

    index: int
    start: int
    rows: int
    columns: int
    steps: tuple[int, int]  # between sampled rows and sampled columns, in entries
    numel: int

    @property
    def stop(self) -> int:
        """One past its last entry."""
        return self.start + self.rows * self.columns


class Layout:
    """Which entries are sampled; the same ones at every step, so that they can be compared.

    Args:
        parameters: the n parameters; those that are sparse, empty or not floating-point have no section.
    """

    def __init__(self, parameters: Sequence[Any]) -> None:
        self.count = len(parameters)
        shapes = {i: here(p).shape for i, p in enumerate(parameters) if _dense(p)}
        shapes = {i: shape for i, shape in shapes.items() if shape.numel()}
        budget = _budgets({i: shape.numel() for i, shape in shapes.items()})
        self.sections: list[Section] = []
        start = 0
        for i, shape in shapes.items():
            section = _section(i, start, shape, budget[i])
            self.sections.append(section)
            start = section.stop
        self.size = start
        self.device = parameters[self.sections[0].index].device if self.sections else torch.device("cpu")
        owner = np.repeat([s.index for s in self.sections], [s.stop - s.start for s in self.sections])
        self.owner = torch.from_numpy(owner.astype(np.int64)).to(self.device, non_blocking=True)

    def gather(self, tensors: Sequence[Any]) -> tuple[Tensor, list[int]]:
        """(m,) float32 sample of ``tensors``, zero where one is missing, and the indices of those."""
        flat = torch.zeros(self.size, device=self.device)
        views: list[Tensor] = []
        targets: list[Tensor] = []
        missing = []
        for s in self.sections:
            tensor = tensors[s.index]
            source = None if tensor is None or tensor.layout is not torch.strided else here(tensor)
            if source is None or source.numel() != s.numel:
                missing.append(s.index)
                continue
            views.append(source.as_strided((s.rows, s.columns), s.steps))
            targets.append(flat[s.start : s.stop].view(s.rows, s.columns))
        if views:
            torch._foreach_copy_(targets, views, non_blocking=True)
        return flat, missing

    def sums(self, values: Tensor) -> Tensor:
        """(n,) sum of ``values``, shape (m,), by layer."""
        totals: Tensor = values.new_zeros(self.count).index_add_(0, self.owner, values)
        return totals


def here(tensor: Any) -> Tensor:
    """The part of a strided tensor that this process holds: real, contiguous, without its graph."""
    found: Tensor = tensor.detach()
    if hasattr(found, "to_local"):
        found = found.to_local()
    if found.is_complex():
        found = torch.view_as_real(found.resolve_conj())
    return found if found.is_contiguous() else found.contiguous()


def _dense(parameter: Any) -> bool:
    return parameter.layout is torch.strided and (parameter.is_floating_point() or parameter.is_complex())


def _budgets(sizes: dict[int, int]) -> dict[int, int]:
    """Entries for each layer: what small ones leave of an equal share goes to the large ones."""
    if not sizes:
        return {}
    share = TOTAL // len(sizes)
    small = {i: size for i, size in sizes.items() if size <= share}
    rest = (TOTAL - sum(small.values())) // max(len(sizes) - len(small), 1)
    return {i: min(size, PER_LAYER, max(rest, COLUMNS)) for i, size in sizes.items()}


def _section(index: int, start: int, shape: torch.Size, budget: int) -> Section:
    """Rows spread evenly over the units, columns over what comes into each."""
    numel = shape.numel()
    units = int(shape[0]) if len(shape) > 1 else 1
    width = numel // units
    rows = min(units, max(budget // min(width, COLUMNS), 1))
    columns = max(min(width, budget // rows), 1)
    return Section(index, start, rows, columns, (width * (units // rows), width // columns), numel)


@dataclass(slots=True)
class Window:
    """What a window of steps comes to, still on the device; (n,) by layer where nothing else is said.

    Attributes:
        step: of its end.
        updates: optimizer steps between its first sample and its end.
        layout: of the sample.
        numbers: 0-d or (n,) by name.
        norms: gradient norms, one (n,) per sample, NaN where a step does not count.
        absent: samples without a gradient.
        rates: learning rates at the beginning and at the end, as the optimizer holds them.
        alive: (m,) whether a sampled entry's gradient was ever other than zero.
        zero: (m,) whether a sampled weight is exactly zero at the end.
        variance: (index, sum of the second moment over the sample, entries, its bias correction).
        adaptive: whether the optimizer divides by a second moment.
        names: of the layers.
    """

    step: int
    updates: int
    layout: Layout
    numbers: dict[str, Any]
    norms: list[Any]
    absent: list[int]
    rates: tuple[list[Any], list[Any]]
    alive: Any
    zero: Any
    variance: list[tuple[int, Any, int, Any]]
    adaptive: bool
    names: tuple[str, ...]


@dataclass(slots=True)
class Gathering:
    """A window under way."""

    layout: Layout
    begun: int
    sums: Tensor
    squares: Tensor
    count: Tensor
    weights: Tensor
    rates: list[Any]
    pending: tuple[Tensor, Tensor, Tensor, list[int]] | None = None
    norms: list[Tensor] = field(default_factory=list)
    absent: list[int] = field(default_factory=list)
    way: Tensor | None = None
    held: Any = 0

    @classmethod
    def of(cls, event: GradientEvent, layout: Layout) -> Gathering:
        """Begin with the weights as they are before the coming update."""
        zeros = torch.zeros(layout.size, device=layout.device)
        return cls(
            layout=layout, begun=event.step, sums=zeros, squares=zeros.clone(),
            count=torch.zeros((), device=layout.device), weights=layout.gather(event.parameters)[0],
            rates=_rates(event), absent=[0] * layout.count,
        )  # fmt: skip

    def take(self, event: GradientEvent) -> None:
        """Sample the gradients of this step; they count once the next step says that it was not rejected."""
        norms = event.norms
        good = norms.isfinite().all()
        if event.overflow is not None:
            good = good & (event.overflow == 0).all().to(good.device)
        sample, missing = self.layout.gather(event.gradients)
        if event.scale is not None:
            sample.div_(event.scale.to(sample.device) if isinstance(event.scale, Tensor) else event.scale)
        self.pending = sample, good.to(sample.device, non_blocking=True), norms.detach(), missing

    def settle(self, rejected: Any) -> None:
        """Count what was sampled last, unless it was rejected or not finite."""
        self.held = self.held + (rejected.float() if isinstance(rejected, Tensor) else float(rejected))
        if self.pending is None:
            return
        sample, good, norms, missing = self.pending
        self.pending = None
        if isinstance(rejected, Tensor):
            good = good & rejected.logical_not().to(good.device)
        elif rejected:
            good = torch.zeros_like(good)
        sample = torch.where(good, sample, 0.0)
        self.sums.add_(sample)
        self.squares.addcmul_(sample, sample)
        self.count += good
        self.norms.append(torch.where(good.to(norms.device), norms, torch.nan))
        for i in missing:
            self.absent[i] += 1

    def look(self, event: GradientEvent) -> None:
        """One update after the beginning: how far did it go?"""
        if self.way is None:
            now, _ = self.layout.gather(event.parameters)
            self.way = self.layout.sums((now - self.weights).square_())

    def finish(self, event: GradientEvent) -> Window:
        """The window's numbers, before the update of this step."""
        layout = self.layout
        now, _ = layout.gather(event.parameters)
        way = self.way if self.way is not None else torch.full((layout.count,), torch.nan, device=layout.device)
        return Window(
            step=event.step, updates=event.step - self.begun, layout=layout,
            numbers={
                "sum2": layout.sums(self.sums.square()), "squares": layout.sums(self.squares), "count": self.count,
                "way": way, "net": layout.sums((now - self.weights).square_()),
                "weight": layout.sums(self.weights.square()), "held": self.held,
            },
            norms=self.norms, absent=self.absent, rates=(self.rates, _rates(event)),
            alive=self.squares > 0, zero=now == 0, variance=list(_variance(event, layout)), adaptive=event.adaptive,
            names=event.names,
        )  # fmt: skip


def _rates(event: GradientEvent) -> list[Any]:
    """Learning rates by layer; one on the device is copied, as it changes in place."""
    copies: dict[int, Any] = {}
    rates = []
    for i in range(len(event.parameters)):
        rate = event.learning_rates[i] if i < len(event.learning_rates) else 0.0
        if isinstance(rate, Tensor):
            rate = copies.setdefault(id(rate), rate.detach().clone())
        rates.append(rate)
    return rates


def _variance(event: GradientEvent, layout: Layout) -> Iterator[tuple[int, Any, int, Any]]:
    """By layer: sum of the sampled second moments, how many entries, and what to divide by for the bias."""
    if event.training is None or not event.adaptive:
        return
    optimizer = event.training.optimizer
    groups, of = optimizer.param_groups, event.training.groups
    known: list[tuple[Section, Tensor, Any]] = []
    for s in layout.sections:
        found = moments(optimizer, event.parameters[s.index], groups[of[s.index]])
        second = None if found is None or found.second is None else here(found.second)
        if found is not None and second is not None and second.numel() == s.numel:
            known.append((s, second.as_strided((s.rows, s.columns), s.steps), found.correction2))
    if known:
        views = [view if view.dtype == torch.float32 else view.float() for _, view, _ in known]  # samples are small
        for (s, _, correction), total in zip(known, torch._foreach_norm(views, 1), strict=True):
            yield s.index, total, s.stop - s.start, correction
