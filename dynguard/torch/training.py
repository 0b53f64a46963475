"""What a source lets guards change beyond gradients: the learning rate of one update, and the size of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dynguard.torch.source import Source


class PerGroup(Sequence[float]):
    """One number per parameter, kept per group: made in no time however many parameters there are."""

    __slots__ = ("_group_of", "_values")

    def __init__(self, values: Sequence[float], group_of: Sequence[int]) -> None:
        self._values = values
        self._group_of = group_of

    def __len__(self) -> int:
        return len(self._group_of)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._values[g] for g in self._group_of[index]]
        return self._values[self._group_of[index]]


class TorchTraining:
    """The :class:`~dynguard.events.Training` of one source.

    Args:
        source: whose optimizer it is.
        model: as the user gave it.
        loss_fn: ``(model, batch) -> loss`` or None.
        tracked: what the user gave to ``flow.track``.
    """

    def __init__(
        self, source: Source, model: Any, loss_fn: Callable[[Any, Any], Any] | None, tracked: dict[str, Any]
    ) -> None:
        self._source = source
        self._tracked = tracked
        self.model = model
        self.loss_fn = loss_fn
        self._saving: Any = None
        self._rates: list[tuple[dict[str, Any], Any, Any]] = []  # (group, the user's rate, what it was set to)
        self._starts: list[tuple[Tensor, Tensor, Any]] = []  # (parameter, where it starts, share of the way)
        self._rows: list[tuple[Tensor, Tensor, Tensor, Any]] = []  # (parameter, rows, where they start, shares)

    @property
    def optimizer(self) -> Any:
        """The optimizer of this source."""
        return self._source.optimizer

    @property
    def scaler(self) -> Any:
        """The tracked GradScaler, or None."""
        return self._tracked.get("scaler")

    @property
    def groups(self) -> Sequence[int]:
        """(n,) which parameter group holds each parameter."""
        return self._source.group_of

    def scale_learning_rate(self, factor: Any) -> None:
        """Multiply all learning rates for the coming update only."""
        if self._saving is None:  # a checkpoint after an update that died has the user's rates
            self._saving = self.optimizer.register_state_dict_pre_hook(lambda optimizer: self.restore())
        shared: set[int] = set()  # torch gives all groups the one tensor that it was made with
        for group in self.optimizer.param_groups:
            rate = group.get("lr")
            if rate is None or id(rate) in shared:
                continue
            if isinstance(rate, Tensor):  # in place: a captured graph reads this very tensor
                shared.add(id(rate))
                with torch.no_grad():
                    self._rates.append((group, rate.clone(), rate))
                    rate.mul_(factor.to(rate.device) if isinstance(factor, Tensor) else factor)
            else:
                scaled = rate * (factor if not isinstance(factor, Tensor) else float(factor))
                self._rates.append((group, rate, scaled))
                group["lr"] = scaled

    def scale_update(self, index: int, factor: Any) -> None:
        """Take only a part of the coming update of one parameter."""
        parameter = self._source.parameters[index]
        self._starts.append((parameter, parameter.detach().clone(), factor))

    def scale_rows(self, index: int, rows: Tensor, factors: Any) -> None:
        """The same for single rows of one parameter, ascending; of one that stands several times the first counts."""
        parameter = self._source.parameters[index]
        shares = torch.as_tensor(factors, device=rows.device).index_select(0, torch.searchsorted(rows, rows))
        self._rows.append((parameter, rows, parameter.detach().index_select(0, rows), shares))

    def scale_row_gradients(self, index: int, rows: Tensor, factors: Any) -> None:
        """Multiply the gradient of single rows of one parameter in place; ``rows`` ascending.

        Of a row that stands several times (see EmbeddingEvent) the first factor counts.
        """
        gradient = self._source.parameters[index].grad
        if gradient is None or not rows.numel():
            return
        with torch.no_grad():
            if gradient.layout is not torch.sparse_coo:
                shares = torch.as_tensor(factors, dtype=gradient.dtype, device=gradient.device)
                shares = shares.index_select(0, torch.searchsorted(rows, rows))
                scaled = gradient.index_select(0, rows) * shares.reshape(-1, *[1] * (gradient.ndim - 1))
                gradient.index_copy_(0, rows, scaled)
                return
            values, mine = gradient._values(), gradient._indices()[0]  # repeats of a row all take its factor
            shares = torch.as_tensor(factors, dtype=values.dtype, device=values.device)
            at = torch.searchsorted(rows, mine).clamp_max(rows.shape[0] - 1)
            own = torch.where(rows[at] == mine, shares[at], 1.0)
            values.mul_(own.reshape(-1, *[1] * (values.ndim - 1)))

    def detach(self) -> None:
        """Give everything back and take the hook off."""
        self.restore()
        if self._saving is not None:
            self._saving.remove()
            self._saving = None

    def settle(self) -> None:
        """The update is done: shorten the ways that are to be shortened, and give the learning rates back."""
        starts, self._starts = self._starts, []
        ways, self._rows = self._rows, []
        with torch.no_grad():
            for parameter, start, factor in reversed(starts):
                way = (parameter.detach() - start).mul_(factor)
                parameter.copy_(start.add_(way))
            for parameter, rows, start, factors in reversed(ways):
                shares = torch.as_tensor(factors, dtype=start.dtype, device=start.device)
                way = parameter.detach().index_select(0, rows) - start
                parameter.index_copy_(0, rows, start + way * shares.reshape(-1, *[1] * (start.ndim - 1)))
        self.restore()

    def restore(self) -> None:
        """Give the learning rates back, newest change first; a rate that someone else has set since is left alone."""
        rates, self._rates = self._rates, []
        self._starts, self._rows = [], []
        for group, before, scaled in reversed(rates):
            if isinstance(scaled, Tensor):
                with torch.no_grad():
                    scaled.copy_(before)
            elif group.get("lr") == scaled:
                group["lr"] = before


def mean(losses: Sequence[Any]) -> Any:
    """Mean of the observed losses as 0-d, or None."""
    if not losses:
        return None
    if len(losses) == 1:
        return losses[0]
    tensors = [loss for loss in losses if isinstance(loss, Tensor)]
    if len(tensors) == len(losses):
        return torch.stack([t.to(tensors[0]) for t in tensors]).mean()
    return sum(float(loss) for loss in losses) / len(losses)


def observed(loss: Any) -> Any:
    """A loss as 0-d tensor without its graph, in float32 or wider, or a float.

    Raises TypeError where it is neither a number nor a tensor.
    """
    if isinstance(loss, Tensor):
        loss = loss.detach()
        if loss.is_complex():
            loss = loss.abs()
        if loss.dtype not in (torch.float32, torch.float64):
            loss = loss.float()
        return loss if loss.ndim == 0 else loss.mean()
    try:
        return float(loss)
    except (TypeError, ValueError):
        raise TypeError(f"flow.observe(loss=...) takes a 0-d tensor or a number; got {type(loss).__name__}") from None
