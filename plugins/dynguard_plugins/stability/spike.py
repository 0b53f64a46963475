"""``spike``: a gradient or loss that is non-finite, or leaves its baseline upwards."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from dynguard import Action, Evidence, Finding, Severity, Signal, hookimpl, validated

if TYPE_CHECKING:
    from torch import Tensor

    from dynguard.events import GradientEvent

Positive = Annotated[float, Field(gt=0)]


class Spike:
    """Non-finite gradients and losses, and gradient norms that leave their baseline upwards."""

    @validated
    def __init__(
        self,
        *,
        action: Action = Action.SKIP,
        nan_action: Action = Action.SKIP,
        ratio: Annotated[float, Field(gt=1)] = 5.0,
        z: Positive = 8.0,
        warmup: Annotated[int, Field(ge=1)] = 20,
        window: Annotated[int, Field(ge=2)] = 100,
    ) -> None:
        self.action, self.nan_action = action, nan_action
        self.ratio, self.z, self.warmup, self.window = ratio, z, warmup, window
        self._state: dict[str, dict[str, Tensor]] = {}
        self._pending: dict[str, tuple[Tensor, Tensor]] = {}

    @hookimpl
    def on_gradients(self, event: GradientEvent) -> Signal:
        """Score every layer's log-norm against its own mean and spread over the steps that were accepted."""
        import torch

        norms = event.norms
        x = torch.cat((norms, event.global_norm.reshape(1))).log()
        state = self._settled(event, x)
        spread = (state["var"] + 0.01).sqrt()
        score = (x - state["mean"]) / spread
        known = state["count"] >= self.warmup
        spiking = known & (score > self.z) & (x - state["mean"] > math.log(self.ratio))
        bad = x.isnan() | x.isposinf()
        fired = bad.any() | spiking.any()
        if event.loss is not None:
            loss = torch.as_tensor(event.loss, device=norms.device)
            fired = fired | ~loss.isfinite()
        self._pending[event.source] = (x, x.isfinite() & ~spiking)
        action = max(self.action, self.nan_action)
        return Signal(
            score[:-1].nan_to_num(0.0, 0.0, 0.0).max(), fired, lambda: self._explain(event, x, state, spiking), action
        )

    def _settled(self, event: GradientEvent, x: Tensor) -> dict[str, Tensor]:
        """The baseline with the last step in it, unless that was rejected."""
        import torch

        state = self._state.get(event.source)
        if state is None or len(state["mean"]) != len(x):
            zeros = torch.zeros_like(x)
            state = {"mean": zeros, "var": zeros.clone(), "count": zeros.clone()}
            self._pending.pop(event.source, None)
        pending = self._pending.pop(event.source, None)
        if pending is not None:
            value, good = pending
            if event.rejected is not False:
                good = good & ~torch.as_tensor(event.rejected, device=good.device)
            count = state["count"] + good
            weight = torch.where(good, 1 / count.clamp(1, self.window), torch.zeros_like(count))
            delta = torch.where(good, value - state["mean"], torch.zeros_like(value))
            mean = state["mean"] + weight * delta
            var = (1 - weight) * (state["var"] + weight * delta * delta)
            state = {"mean": mean, "var": var, "count": count}
        self._state[event.source] = state
        return state

    def _explain(self, event: GradientEvent, x: Tensor, state: Mapping[str, Tensor], spiking: Tensor) -> Iterator[Finding]:
        norms = x[:-1].exp().tolist()
        loss = None if event.loss is None else float(event.loss)
        base = Evidence(name="loss", value=loss)
        bad = [i for i, n in enumerate(norms) if not math.isfinite(n)]
        if bad:
            first = bad[0]
            kind = "nan_grad" if math.isnan(norms[first]) else "inf_grad"
            yield Finding(
                kind=kind, severity=Severity.ERROR, step=event.step, subject=event.names[first], action=self.nan_action,
                premise=f"the gradient of {len(bad)} of {len(norms)} parameters is not finite; first in the model: "
                f"{event.names[first]}",
                implies="an update would make weights and optimizer state non-finite for good",
                expected_effect="weights and optimizer state stay as they were before this batch",
                evidence=(Evidence(name="gradient_norm", value=norms[first]), base,
                          Evidence(name="nonfinite_parameters", value=len(bad))), confidence=1.0,
            )  # fmt: skip
        elif loss is not None and not math.isfinite(loss):
            still = all(n == 0 for n in norms)
            kind = "empty_batch" if still and math.isnan(loss) else "nan_loss" if math.isnan(loss) else "inf_loss"
            yield Finding(
                kind=kind, severity=Severity.WARNING if still else Severity.ERROR, step=event.step, action=self.nan_action,
                premise=f"the loss is {loss} and " + ("every gradient is exactly zero" if still else "gradients are finite"),
                implies="no target in the batch counts" if still else "the loss is not defined for this batch",
                expected_effect="momentum and weight decay do not move weights on an empty batch", evidence=(base,),
            )  # fmt: skip
        hits = [i for i, hit in enumerate(spiking.tolist()) if hit]
        if hits and not bad:
            means = state["mean"].tolist()
            logs = x.tolist()
            worst = max(hits, key=lambda i: logs[i] - means[i])
            subject = event.names[worst] if worst < len(norms) else ""
            yield Finding(
                kind="grad_spike", severity=Severity.ERROR, step=event.step, subject=subject, action=self.action,
                premise=f"gradient norm {math.exp(logs[worst]):.4g}, usually {math.exp(means[worst]):.4g}",
                implies="one step with this gradient can undo many", expected_effect="the weights do not take this step",
                evidence=(Evidence(name="gradient_norm", value=math.exp(logs[worst])),
                          Evidence(name="baseline", value=math.exp(means[worst])),
                          Evidence(name="ratio", value=math.exp(min(logs[worst] - means[worst], 700))), base),
            )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """The baselines of all sources."""
        return {"state": self._state, "pending": self._pending}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up the baselines of ``state_dict()``."""
        self._state, self._pending = dict(state["state"]), dict(state["pending"])
