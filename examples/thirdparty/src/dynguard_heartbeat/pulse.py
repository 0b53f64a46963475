"""A detector with state: it counts, on the device, for how long the gradients have been next to nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field

from dynguard import Evidence, Finding, Signal, hookimpl, validated


class Pulse:
    """Warns when the norm of all gradients stays below a floor for many steps in a row."""

    @validated
    def __init__(
        self,
        *,
        floor: Annotated[float, Field(gt=0)] = 1e-8,
        patience: Annotated[int, Field(ge=1)] = 20,
    ) -> None:
        self.floor = floor
        self.patience = patience
        # Quiet steps in a row by optimizer. The counts become arrays on the device at the first step.
        self.quiet: dict[str, Any] = {}

    @hookimpl
    def on_gradients(self, event: Any) -> Signal:
        """Count up or start again without asking which: the host never waits for the device."""
        is_quiet = event.global_norm < self.floor
        quiet = (self.quiet.get(event.source, 0) + 1) * is_quiet
        self.quiet[event.source] = quiet
        # Equal, not beyond: one finding per standstill.
        return Signal(quiet, quiet == self.patience, lambda: self.explain(event))

    def explain(self, event: Any) -> Iterator[Finding]:
        """Only called when the patience has run out."""
        norm = float(event.global_norm)
        yield Finding(
            kind="stagnation",
            step=event.step,
            source=event.source,
            evidence=(
                Evidence(name="global_gradient_norm", value=norm),
                Evidence(name="quiet_steps", value=self.patience, unit="steps"),
            ),
            premise=f"the norm of all gradients was below {self.floor:g} for {self.patience} steps in a row",
            implies="the weights hardly move: a dead network, a detached loss or a converged run",
            expected_effect="none; look at the last layers and at the loss",
        )

    def state_dict(self) -> dict[str, Any]:
        """The counts, to be kept with a checkpoint."""
        return {"quiet": {source: int(count) for source, count in self.quiet.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting where the checkpoint was made."""
        self.quiet = dict(state["quiet"])
