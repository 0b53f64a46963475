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
1 / (1 - b1^t), which counts as a larger lr here. Coupled weight decay adds to the Hessian; a decoupled one (AdamW)
shifts the threshold by less than lr x weight_decay and is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynguard.events import Training

ADAM = ("Adam", "AdamW", "Adamax")
DIVIDING = ("RMSprop", "Adagrad")


class UnknownThresholdError(Exception):
    """There is no known threshold for this optimizer; the message says why."""


@dataclass(slots=True)
class Edge:
    """The edge of stability for one source.

    Attributes:
        scales: by parameter, the entries of lr / (c P): the eigenvalues of ``scales^1/2 H scales^1/2`` are stable up
            to 1. None where a parameter has not been updated yet.
        decay: coupled weight decay by parameter.
        threshold: c / lr, where all parameter groups share it; else None.
        preconditioned: whether P is not 1.
    """

    scales: list[Any]
    decay: list[float]
    threshold: float | None
    preconditioned: bool


def edge(training: Training, parameters: Sequence[Any]) -> Edge:
    """The edge for the optimizer's present state.

    Raises:
        UnknownThresholdError: for optimizers whose step is not a preconditioned gradient (Lion, Muon, LBFGS ...), or
            that have not made their state yet.
    """
    optimizer = training.optimizer
    name, module = type(optimizer).__name__, type(optimizer).__module__
    if name != "SGD" and name not in ADAM and name not in DIVIDING:
        raise UnknownThresholdError(f"no threshold of stability is known for {name}")
    if not module.startswith("torch."):
        raise UnknownThresholdError(f"{module}.{name} is not torch's {name}, and may step differently")
    groups = optimizer.param_groups
    if any(group.get("maximize") for group in groups):
        raise UnknownThresholdError("the optimizer maximizes")
    scales, decay = [], []
    for parameter, g in zip(parameters, training.groups, strict=True):
        scales.append(_scale(optimizer, name, parameter, groups[g]))
        coupled = name not in ("AdamW",) and not groups[g].get("decoupled_weight_decay")
        decay.append(float(groups[g].get("weight_decay") or 0.0) if coupled else 0.0)
    shared = {(_number(group["lr"]), constant(name, group)) for group in groups}
    lr, c = next(iter(shared))
    return Edge(scales, decay, c / lr if len(shared) == 1 and lr > 0 else None, name != "SGD")


def constant(name: str, group: Mapping[str, Any]) -> float:
    """c of the table above, for torch's optimizer of that name and one of its parameter groups."""
    if name in ADAM:
        b1 = float(group["betas"][0])
        return (2 + 2 * b1) / (1 - b1)
    b = float(group.get("momentum") or 0.0)
    if group.get("nesterov"):
        return (2 + 2 * b) / (1 + 2 * b)
    return (2 + 2 * b) / (1 - (float(group.get("dampening") or 0.0) if b else 0.0))


def _scale(optimizer: Any, name: str, parameter: Any, group: Mapping[str, Any]) -> Any:
    rate = _number(group["lr"]) / constant(name, group)
    if name == "SGD":
        return rate
    from dynguard.torch.moments import moments

    kept = moments(optimizer, parameter, group)
    if kept is None or kept.second is None:
        return None  # it has never had a gradient
    second = kept.second.double()
    if name == "Adamax":
        return rate / _number(kept.correction1) / (second + kept.eps)
    if name == "Adagrad":
        steps = max(_number(kept.step) - 1, 0)
        return rate / (1 + steps * float(group.get("lr_decay") or 0.0)) / (second.sqrt() + kept.eps)
    average = optimizer.state[parameter].get("grad_avg") if name == "RMSprop" else None
    if average is not None:  # centered
        second = (second - average.double().square()).clamp_min(0.0)
    correction = _number(kept.correction2) if name in ADAM else 1.0
    first = _number(kept.correction1) if name in ADAM else 1.0
    return rate / first / ((second / correction).sqrt() + kept.eps)


def _number(value: Any) -> float:
    return float(value)
