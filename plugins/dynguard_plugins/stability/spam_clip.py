"""The two element-wise clips of ``spam``, on the device, without a host read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dynguard_plugins.stability.spam_levels import Levels

if TYPE_CHECKING:
    from dynguard.events import GradientEvent, Training
    from dynguard.torch.moments import Moments

AT_ONCE = 1 << 22  # entries whose limits are held at the same time (16 MB), unless one tensor alone has more
SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg")  # running means of squares: not Adagrad's sum, not a maximum


class ElementClip:
    """Bounds single entries of the gradients that are far out of line with what came before.

    ``spike_aware``: where g^2 > theta v, g becomes sign(g) sqrt(theta v) (SPAM, Huang et al. 2025, arXiv 2501.06842,
    section 3). v is the optimizer's own second moment before this update. Unlike the paper's it is bias-corrected: as
    stored it is (1 - beta2^t) times too small, so that t updates after a reset ordinary entries would be clipped
    (at t = 1 and beta2 = 0.999 at 2.2 times the last gradient instead of at 71 times). An entry with v = 0 has no past
    to be out of line with and is left alone, else theta v = 0 would keep it from ever learning: a row that was never
    looked up, and every entry right after a reset.

    ``adaclip``: per parameter, T follows the largest entry, T <- gamma T + (1 - gamma) max |g|, and where max |g| is
    above T / (1 - gamma^t), entries above that are multiplied by it over max |g| (Stable-SPAM, Huang et al. 2025,
    arXiv 2502.17055). t counts all updates of the parameter and not those since the last reset, so that the debiasing
    fades only once. As in the paper T takes in the spike itself, (1 - gamma) of it. A non-finite entry, and the
    gradient of an update that was dropped, never enter T.

    Sparse and complex gradients are left alone. Shards (DTensor) are clipped by each rank; the largest entry is that of
    the whole tensor, by one all-reduce a layout.

    Args:
        kind: ``auto`` is spike_aware where the optimizer keeps an element-wise mean of squares and adaclip elsewhere.
        theta, gamma: as above.
    """

    def __init__(self, kind: str, theta: float, gamma: float) -> None:
        self.kind, self.theta = kind, theta
        self.levels = Levels(gamma)
        self.seen = 0
        self._counts: dict[Any, Any] = {}  # entries clipped, by device
        self._before = 0

    @property
    def clipped(self) -> int:
        """How many entries were clipped (of this rank's shards); reads the device."""
        return self._before + sum(int(count) for count in self._counts.values())

    def clip(self, event: GradientEvent) -> None:
        """Edit the gradients in place."""
        if self.kind == "none" or event.training is None:
            return
        bounded: dict[Any, list[tuple[Any, Any, Any]]] = {}
        levelled: list[int] = []
        for i, gradient in enumerate(event.gradients):
            if gradient is None or not _plain(gradient):
                continue
            kept = self._moments(event, event.training, i)
            if kept is not None:
                second, step = _local(kept.second), kept.step
                counted = hasattr(step, "to") or step > 0  # RMSprop's mean starts at 0 as well
                beta2 = kept.beta2 if counted else 0.0
                key = (second.device, second.dtype, gradient.dtype, beta2, hasattr(step, "to"))
                bounded.setdefault(key, []).append((_local(gradient), second, step))
            elif self._levels(event, event.parameters[i]):
                levelled.append(i)
        for (*_, beta2, _), members in bounded.items():
            for chunk in _chunks(members):
                self._spike_aware(chunk, beta2, event.scale)
        if levelled:
            self._adaclip(event, levelled)

    def _moments(self, event: GradientEvent, training: Training, index: int) -> Moments | None:
        """The second moment to clip by, or None."""
        from dynguard.torch.moments import moments

        if self.kind == "adaclip":
            return None
        group = training.optimizer.param_groups[training.groups[index]]
        kept = moments(training.optimizer, event.parameters[index], group)
        usable = kept is not None and kept.second is not None and kept.name in SQUARES
        return kept if usable and _plain(kept.second) else None  # type: ignore[union-attr] # usable says it is there

    def _levels(self, event: GradientEvent, parameter: Any) -> bool:
        """Whether adaclip is to do it: not where a second moment is only about to be made."""
        assert event.training is not None
        return self.kind == "adaclip" or (
            self.kind == "auto" and (not event.adaptive or bool(event.training.optimizer.state.get(parameter)))
        )

    def _spike_aware(self, chunk: Sequence[tuple[Any, Any, Any]], beta2: float, scale: Any) -> None:
        import torch

        gradients = [g for g, _, _ in chunk if g.numel()]
        seconds = [v for g, v, _ in chunk if g.numel()]
        if not gradients:
            return
        first = gradients[0]
        kind = torch.float64 if first.dtype == torch.float64 else torch.float32
        limits = list(torch._foreach_sqrt([v.to(kind) for v in seconds]))
        torch._foreach_mul_(limits, self._factors([s for g, _, s in chunk if g.numel()], beta2, kind))
        if scale is not None:
            torch._foreach_mul_(limits, scale.to(first.device, kind, non_blocking=True))
        over = []
        for i, (gradient, limit) in enumerate(zip(gradients, limits, strict=True)):
            limit.masked_fill_((limit > 0).logical_not_(), math.inf)  # of NaN as well: it would spread
            if gradient.dtype != kind:  # rounded to 0, it would keep the entry from learning
                limits[i] = limit.clamp_min_(torch.finfo(gradient.dtype).tiny).to(gradient.dtype)
            over.append((gradient.abs() > limits[i]).sum())
        torch._foreach_minimum_(gradients, limits)
        torch._foreach_neg_(limits)
        torch._foreach_maximum_(gradients, limits)
        self._count(over)
        self.seen += sum(g.numel() for g in gradients)

    def _factors(self, steps: Sequence[Any], beta2: float, kind: Any) -> Any:
        """sqrt(theta / (1 - beta2^step)) of each; beta2 = 0 stands for none known."""
        if not hasattr(steps[0], "to"):
            return [math.sqrt(self.theta / (1.0 - beta2 ** max(step, 1.0))) for step in steps]
        import torch

        counts = torch.stack([step.reshape(()) for step in steps]).to(kind).clamp_min_(1.0)
        share = 1.0 - torch.pow(beta2, counts) if beta2 else torch.ones_like(counts)
        return list((self.theta / share).sqrt_().unbind())

    def _adaclip(self, event: GradientEvent, chosen: Sequence[int]) -> None:
        import torch

        gradients = [event.gradients[i] for i in chosen]
        factors, limits = self.levels.judge(event, chosen, gradients)
        over = []
        for i, gradient in zip(chosen, map(_local, gradients), strict=True):
            if not gradient.numel():
                continue
            factor = factors[i].to(gradient.device, non_blocking=True)
            mask = gradient.abs() > limits[i].to(gradient.device, non_blocking=True)
            gradient.mul_(torch.where(mask, factor, torch.ones_like(factor)).to(gradient.dtype))
            over.append(mask.sum())
            self.seen += gradient.numel()
        self._count(over)

    def _count(self, numbers: Sequence[Any]) -> None:
        for number in numbers:
            before = self._counts.get(number.device)
            self._counts[number.device] = number if before is None else before + number

    def state_dict(self) -> dict[str, Any]:
        """adaclip's levels, and counts."""
        return {"levels": self.levels.state_dict(), "clipped": self.clipped, "seen": self.seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up ``state_dict()``."""
        self.levels.load_state_dict(state["levels"])
        self._before, self._counts, self.seen = state["clipped"], {}, state["seen"]


def _plain(tensor: Any) -> bool:
    import torch

    return tensor.layout is torch.strided and tensor.is_floating_point()


def _local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _chunks(members: Sequence[tuple[Any, Any, Any]]) -> Iterator[list[tuple[Any, Any, Any]]]:
    """In portions whose temporaries are small beside the gradients of a large model."""
    chunk: list[tuple[Any, Any, Any]] = []
    entries = 0
    for member in members:
        if chunk and entries + member[0].numel() > AT_ONCE:
            yield chunk
            chunk, entries = [], 0
        chunk.append(member)
        entries += member[0].numel()
    if chunk:
        yield chunk
