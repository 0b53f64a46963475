"""A detector of one's own: layers that have had no gradient at all for a while.

It keeps its counts on the device and never waits for it; only what has fired is read.
Run it: python examples/custom_detector.py
"""

from collections.abc import Iterator
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import nn

from dynguard import Evidence, Finding, FlowManager, Signal, hookimpl, validated


class Dead:
    """Warns of parameters whose gradient is exactly zero for many steps in a row."""

    @validated
    def __init__(self, *, patience: Annotated[int, Field(ge=1)] = 30) -> None:
        self.patience = patience
        self.idle: dict[str, Any] = {}  # steps in a row by optimizer, shape (n,)

    @hookimpl
    def on_gradients(self, event: Any) -> Signal:
        before = self.idle.get(event.source)
        if before is None or before.shape != event.norms.shape:  # the first step, or a parameter has joined
            before = torch.zeros_like(event.norms)
        idle = (before + 1) * (event.norms == 0)
        self.idle[event.source] = idle
        fired = idle == self.patience
        return Signal(idle.max(), fired, lambda: self.explain(event, fired))

    def explain(self, event: Any, fired: Any) -> Iterator[Finding]:
        for name, hit in zip(event.names, fired.tolist(), strict=True):
            if hit:
                yield Finding(
                    kind="dead_layer",
                    step=event.step,
                    subject=name,
                    evidence=(Evidence(name="idle_steps", value=self.patience, unit="steps"),),
                    premise=f"{name} has had a gradient of zero for {self.patience} steps in a row",
                    implies="nothing reaches it any more, so it can't recover by itself",
                    expected_effect="none; lower the learning rate, or use an activation with a slope below zero",
                )


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with FlowManager(model, optimizer, plugins=[Dead(patience=20)]) as flow:
        for step in range(100):
            if step == 41:  # as one giant update might: no unit of the second layer is ever positive again
                nn.init.constant_(model[2].bias, -1e4)  # type: ignore[arg-type]  # a Linear's bias is a tensor
            x = torch.randn(16, 8)
            nn.functional.mse_loss(model(x), x.sum(dim=1, keepdim=True)).backward()
            optimizer.step()
            optimizer.zero_grad()
    for finding in flow.findings:
        print(f"step {finding.step}: {finding.kind} in {finding.subject}: {finding.premise}")


if __name__ == "__main__":
    main()
