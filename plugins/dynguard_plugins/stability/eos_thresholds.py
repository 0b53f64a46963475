"""Up to which curvature an optimizer's step is stable.

On a quadratic with curvature h every optimizer below is linear in the distance to the minimum, and stable as long as no
root of its characteristic polynomial leaves the unit circle; the first to leave does so at -1, which gives h x lr < c:

====================================  ============================  =============================================
optimizer                             c                             source
====================================  ============================  =============================================
gradient descent                      2                             Cohen et al. 2021 (arXiv 2103.00065), section 2
momentum b, dampening d               (2 + 2 b) / (1 - d)           the same, appendix B (d = 0: heavy ball, d = b: EMA)
Nesterov momentum b                   (2 + 2 b) / (1 + 2 b)         the same, appendix B
Adam, AdamW, Adamax on P^-1 H         (2 + 2 b1) / (1 - b1)         Cohen et al. 2022 (arXiv 2207.14484), section 2
RMSprop, Adagrad on P^-1 H            2 (with momentum b: 2 + 2 b)  the same
====================================  ============================  =============================================

P is what the optimizer divides by: sqrt(v) + eps. Adam's first steps are larger by the bias correction of its momentum,
1 / (1 - b1^t), which counts as a larger lr here. Coupled weight decay adds to the Hessian; a decoupled one (AdamW) of
strength w shortens the weights by 1 - lr w, which makes the constant (2 - lr w) (1 + b1) / (1 - b1). The rule for a
constant P holds as long as P changes slowly; with Adagrad and in Adam's first steps it is approximate.

Coordinates whose root of v is below float32's rounding of the others' (a bias that softmax cancels, a row that was
never looked up) are left out: their gradient is rounding noise, and the coming update will not divide by that v.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynguard.events import Training

ADAM = ("Adam", "AdamW", "Adamax")
DIVIDING = ("RMSprop", "Adagrad")
NOISE = (1e-6, 1e-14)  # of the usual root of the second moment: float32 (and narrower) and float64 gradients


class UnknownThresholdError(Exception):
    """There is no known threshold for this optimizer; the message says why."""


@dataclass(slots=True)
class Edge:
    """The edge of stability for one source.

    Attributes:
        scales: by parameter, the entries of lr / (c P): the eigenvalues of ``scales^1/2 H scales^1/2`` are stable up
            to 1. None where a parameter has not been updated yet.
        decay: coupled weight decay by parameter.
        preconditioned: whether P is not 1.
        name: of the optimizer.
        groups: its parameter groups.
    """

    scales: list[Any]
    decay: list[float]
    preconditioned: bool
    name: str
    groups: Sequence[Mapping[str, Any]]

    @property
    def threshold(self) -> float | None:
        """c / lr, where all parameter groups share it; else None. May read the device."""
        shared = {(_number(group["lr"]), constant(self.name, group)) for group in self.groups}
        lr, c = next(iter(shared))
        return c / lr if len(shared) == 1 and lr > 0 else None


def edge(training: Training, parameters: Sequence[Any]) -> Edge:
    """The edge for the optimizer's present state.

    Raises:
        UnknownThresholdError: for optimizers whose step is not a preconditioned gradient (Lion, Muon, LBFGS ...).
    """
    optimizer = training.optimizer
    name, groups = type(optimizer).__name__, optimizer.param_groups
    _refuse_unknown(optimizer, name)
    scales: list[Any] = []
    decay = []
    for parameter, g in zip(parameters, training.groups, strict=True):
        scales.append(_scale(optimizer, name, parameter, groups[g]))
        decay.append(0.0 if _decoupled(name, groups[g]) else float(groups[g].get("weight_decay") or 0.0))
    if name != "SGD":
        _leave_noise_out(scales, optimizer, parameters)
    return Edge(scales, decay, name != "SGD", name, groups)


def _refuse_unknown(optimizer: Any, name: str) -> None:
    module = type(optimizer).__module__
    if name != "SGD" and name not in ADAM and name not in DIVIDING:
        raise UnknownThresholdError(f"no threshold of stability is known for {name}")
    if not module.startswith("torch."):
        raise UnknownThresholdError(f"{module}.{name} is not torch's {name}, and may step differently")
    if any(group.get("maximize") for group in optimizer.param_groups):
        raise UnknownThresholdError("the optimizer maximizes")


def constant(name: str, group: Mapping[str, Any]) -> float:
    """c of the table above, for torch's optimizer of that name and one of its parameter groups."""
    if name in ADAM:
        b1 = float(group["betas"][0])
        shrinks = _number(group["lr"]) * float(group["weight_decay"]) if _decoupled(name, group) else 0.0
        return (2 - shrinks) * (1 + b1) / (1 - b1)
    b = float(group.get("momentum") or 0.0)
    if group.get("nesterov"):
        return (2 + 2 * b) / (1 + 2 * b)
    return (2 + 2 * b) / (1 - (float(group.get("dampening") or 0.0) if b else 0.0))


def _decoupled(name: str, group: Mapping[str, Any]) -> bool:
    return bool(group.get("weight_decay")) and (name == "AdamW" or bool(group.get("decoupled_weight_decay")))


def _scale(optimizer: Any, name: str, parameter: Any, group: Mapping[str, Any]) -> Any:
    """lr / (c P): a number or a tensor; None where the parameter has never had a gradient."""
    rate = group["lr"] / constant(name, group)
    if name == "SGD":
        return _number(rate)
    from dynguard.torch.moments import moments

    kept = moments(optimizer, parameter, group)
    if kept is None or kept.second is None or kept.second.is_complex():
        return None
    second = kept.second if kept.second.element_size() >= 4 else kept.second.float()
    if name == "Adamax":
        return _over(rate, kept.correction1, second.clamp_min(kept.eps or 1e-30))  # eps is in it already
    if name == "Adagrad":
        steps = kept.step - 1 if hasattr(kept.step, "clamp_min") else max(kept.step - 1, 0)
        return _over(rate, 1 + steps * float(group.get("lr_decay") or 0.0), second.sqrt() + kept.eps)
    average = optimizer.state[parameter].get("grad_avg") if name == "RMSprop" else None
    if average is not None:  # centered
        second = (second - average.to(second).square()).clamp_min(0.0)
    if name == "RMSprop":
        return _over(rate, 1.0, second.sqrt() + kept.eps)
    variance = kept.variance()
    assert variance is not None
    return _over(rate, kept.correction1, variance.sqrt() + kept.eps)


def _over(rate: Any, correction: Any, divisor: Any) -> Any:
    """``rate / correction / divisor`` without a host read, wherever the three live."""
    rate, correction = (v.to(divisor.device) if hasattr(v, "to") else v for v in (rate, correction))
    return rate / (correction * divisor)


def _leave_noise_out(scales: list[Any], optimizer: Any, parameters: Sequence[Any]) -> None:
    """Set the scale to 0 where the root of the second moment is rounding noise beside that of the others."""
    import torch

    from dynguard.torch.moments import SECOND

    known: dict[int, Any] = {}
    for i, parameter in enumerate(parameters):
        if scales[i] is not None and scales[i].numel():
            state = optimizer.state[parameter]
            kept = next(state[key] for key in SECOND if getattr(state.get(key), "shape", None) == parameter.shape)
            known[i] = kept.float() if "exp_inf" in state else kept.float().sqrt()
    if not known:
        return
    device = next(iter(known.values())).device
    total = torch.stack([r.square().sum().to(device) for r in known.values()]).sum()
    usual = (total / sum(r.numel() for r in known.values())).sqrt()
    for i, root in known.items():
        wide = parameters[i].dtype == torch.float64
        least = usual.to(root.device) * (NOISE[1] if wide else NOISE[0])
        scales[i] = torch.where(root > least, scales[i], torch.zeros_like(scales[i]))


def _number(value: Any) -> float:
    return float(value)
