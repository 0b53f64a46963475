"""What optimizers keep of the past: reading their moments, and starting them afresh.

Resetting Adam's moments without its step counter makes the next updates too large: the bias correction
``1 - beta2 ** t`` is then 1 already, while v holds a single square (Kingma & Ba 2015, "Adam", section 3). So a reset
always takes the counters too, and is refused where an optimizer has no bias correction to make it safe.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dynguard.arrays import local

# How each optimizer names its running mean of gradients and of their squares.
FIRST = ("exp_avg", "momentum_buffer", "grad_avg")
SECOND = ("max_exp_avg_sq", "exp_avg_sq", "square_avg", "sum", "exp_inf")
# Second moments without a bias correction: zeroed, the next update would be 1 / sqrt(1 - alpha) times as large.
UNCORRECTED = ("square_avg", "acc_delta")
UNDIVIDED = ("RAdam",)  # until its rectification sets in, some five updates (Liu et al. 2020, "On the variance ...")
COUNTERS = ("step", "steps", "mu_product")
FACTORED = ("row_var", "col_var", "variance", "exp_avg_sq_row", "exp_avg_sq_col")
ZEROED = ("exp_avg", "momentum_buffer", "grad_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", *FACTORED)


@dataclass(slots=True, frozen=True)
class Moments:
    """What an optimizer remembers of one parameter, as it is stored.

    Attributes:
        first: running mean of the gradients, or None.
        second: running mean of their squares in the shape of the parameter, or None (none kept, or kept factored).
        step: how many updates the parameter has had: a number, or 0-d on the device (fused, capturable).
        beta1, beta2: decay of the two means; 0.0 where there is no such mean.
        eps: what is added to the root of the second moment.
        corrected: whether the optimizer divides the means by ``1 - beta ** step``.
        name: under which the second moment is stored, "" if there is none: ``exp_inf`` is a largest magnitude and
            ``sum`` a sum of squares, the others are running means of squares.
    """

    first: Tensor | None
    second: Tensor | None
    step: Any
    beta1: float
    beta2: float
    eps: float
    corrected: bool
    name: str = ""

    @property
    def correction1(self) -> Any:
        """``1 - beta1 ** step``, or 1 where the optimizer corrects nothing; never 0."""
        return self._correction(self.beta1)

    @property
    def correction2(self) -> Any:
        """``1 - beta2 ** step``, or 1 where the optimizer corrects nothing; never 0."""
        return self._correction(self.beta2)

    def _correction(self, beta: float) -> Any:
        if not self.corrected:
            return 1.0
        if isinstance(self.step, Tensor):
            return 1.0 - beta ** self.step.clamp_min(1.0)
        return 1.0 - beta ** max(float(self.step), 1.0)

    def variance(self) -> Tensor | None:
        """The bias-corrected second moment, real, in float32 or wider, or None; the square of Adamax's largest."""
        if self.second is None:
            return None
        second = self.second
        if second.is_complex():  # torch keeps the squares of real and imaginary parts apart
            second = torch.view_as_real(second).sum(-1)
        wide = second if second.dtype == torch.float64 else second.float()
        if self.name == "exp_inf":  # never corrected: it starts at the first gradient
            return wide.square()
        # the largest corrected one is what AMSGrad divides by, and torch corrects it by the present step
        correction = self.correction2
        return wide / (correction.to(wide.device) if isinstance(correction, Tensor) else correction)


def moments(optimizer: Any, parameter: Any, group: Mapping[str, Any]) -> Moments | None:
    """What ``optimizer`` remembers of a parameter of ``group``; None before its first update.

    Args:
        optimizer: any torch optimizer; one with unknown names gives Moments without tensors.
        parameter: one of its parameters.
        group: the parameter group that holds it.
    """
    state = optimizer.state.get(parameter)
    if not state:
        return None
    beta1, beta2 = _betas(group)
    adam_like = "exp_avg_sq" in state or "exp_inf" in state or any(name in state for name in FACTORED)
    first, second, name = _tensor(state, FIRST, parameter)[0], *_tensor(state, SECOND, parameter)
    return Moments(
        first=first,
        second=second,
        step=_count(state),
        beta1=beta1 if first is not None else 0.0,
        beta2=beta2 if second is not None else 0.0,
        eps=float(group["eps"]) if isinstance(group.get("eps"), (int, float)) else 0.0,
        corrected=adam_like and "betas" in group,
        name=name,
    )


def can_reset(optimizer: Any, parameter: Any) -> str:
    """Why the moments of a parameter can't be reset, "" if they can.

    RMSprop and Adadelta divide by a second moment that they don't bias-correct: zeroed, the next update would be
    ``1 / sqrt(1 - alpha)`` times as large. RAdam's first updates are not divided at all. Their momentum can be
    reset (:func:`reset_moments` leaves the rest alone).
    """
    state = optimizer.state.get(parameter)
    name = type(optimizer).__name__
    if not state:
        return f"{name} keeps no state of it yet"
    if name in UNDIVIDED:
        return f"the first updates of {name} are not divided by a second moment: their size would be the gradient's"
    if any(key in state for key in UNCORRECTED):
        return f"{name} does not bias-correct its second moment: zeroed, the next update would be far too large"
    if not any(key in state and isinstance(state[key], Tensor) for key in ZEROED):
        return f"{name} keeps no moments under names that are known"
    return ""


def reset_moments(optimizer: Any, parameter: Any) -> list[str]:
    """Start an optimizer's memory of one parameter afresh, in place; the names of what was reset.

    Momentum, second moments and their maxima become 0 and the step counters what they were at the start, all together.
    Where the second moment can't be reset safely (:func:`can_reset`) only the momentum is. In place throughout, so
    that captured graphs, fused and capturable optimizers keep their tensors. Reads nothing from a device.
    """
    state = optimizer.state.get(parameter)
    if not state:
        return []
    partly = any(key in state for key in UNCORRECTED) or type(optimizer).__name__ in UNDIVIDED
    done = []
    with torch.no_grad():
        for key, value in state.items():
            if isinstance(value, Tensor) and key in (FIRST if partly else ZEROED):
                value.zero_()
                done.append(key)
        if not partly and done:
            done += [key for key in COUNTERS if key in state and _restart(state, key)]
    return done


def _restart(state: dict[str, Any], key: str) -> bool:
    start = 1.0 if key == "mu_product" else 0.0  # NAdam's product of momentum factors
    value = state[key]
    if isinstance(value, Tensor):
        value.fill_(start)
    else:
        state[key] = type(value)(start)
    return True


def _betas(group: Mapping[str, Any]) -> tuple[float, float]:
    betas = group.get("betas")
    if isinstance(betas, (tuple, list)) and len(betas) >= 2:
        return float(betas[0]), float(betas[1])
    return float(group.get("momentum") or 0.0), float(group.get("alpha") or group.get("rho") or 0.0)


def _tensor(state: Mapping[str, Any], names: tuple[str, ...], parameter: Any) -> tuple[Tensor | None, str]:
    for name in names:
        value = state.get(name)
        if isinstance(value, Tensor) and value.shape == parameter.shape:
            return value, name
    return None, ""


def _count(state: Mapping[str, Any]) -> Any:
    """The step count: a number where that costs no read, else the 0-d tensor."""
    for key in ("step", "steps"):
        if key in state:
            value = local(state[key])
            return value if isinstance(value, Tensor) else float(value)
    return 0.0
