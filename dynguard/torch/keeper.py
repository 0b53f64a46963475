"""The keeper: what a step can be undone with, and where a non-finite value came from."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from dynguard.actions import NON_FINITE, Action
from dynguard.events import GradientEvent
from dynguard.findings import Evidence, Finding, Severity
from dynguard.settings import Settings
from dynguard.signals import Signal
from dynguard.torch.attribution import attribute, forward_order
from dynguard.torch.buffers import Buffers, named_buffers
from dynguard.torch.recovery import nonfinite_state
from dynguard.torch.snapshots import Snapshots

if TYPE_CHECKING:
    from dynguard.torch.distributed import Ranks
    from dynguard.torch.source import Source

log = logging.getLogger("dynguard")

ATTRIBUTED = 5  # non-finite steps in a run that are traced to their origin by running the batch again
NAME = "recovery"


class Keeper:
    """Keeps buffers and snapshots of all models of a run.

    Args:
        models: by key, unwrapped, as in names.modules_by_key.
        given: what the user passed as model: ``loss_fn`` gets it back.
        optimizers: gives the optimizers that are watched now.
        loss_fn: ``(model, batch) -> loss``, or None.
        settings: how often and how much.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        given: Any,
        optimizers: Callable[[], Sequence[Optimizer]],
        loss_fn: Callable[[Any, Any], Any] | None,
        settings: Settings,
    ) -> None:
        self.models = dict(models)
        self.given = given
        self.optimizers = optimizers
        self.loss_fn = loss_fn
        self.buffers = Buffers(self.models)
        self.snapshots: Snapshots | None = None
        if settings.snapshot_every and self.models:
            self.snapshots = Snapshots(
                self.models,
                optimizers,
                every=settings.snapshot_every if "snapshot_every" in settings.model_fields_set else None,
                keep=settings.snapshot_keep,
                max_bytes=settings.snapshot_bytes,
                directory=settings.snapshot_dir,
            )
        self.buffers.keep()
        self.ranks: Ranks | None = None
        self._unverified: Tensor | None = None
        self._left = ATTRIBUTED

    def track(self, name: str, thing: Any) -> None:
        """Something else that belongs to a snapshot: EMA, scheduler, scaler."""
        if self.snapshots is not None:
            self.snapshots.track(name, thing)

    @property
    def can_roll_back(self) -> bool:
        """Whether there is a verified snapshot."""
        return self.snapshots is not None and self.snapshots.can_roll_back

    def answers(self, source: Source) -> list[tuple[str, Signal]]:
        """The verdict on the snapshot taken last, to be read with the step's other flags."""
        if self._unverified is None:
            return []
        finite, self._unverified = self._unverified, None

        def learn(values: list[float]) -> None:
            if self.snapshots is not None:
                self.snapshots.confirm(values[0] == 1.0)

        return [
            (
                NAME,
                Signal(
                    finite.float(), ~finite, lambda: self._unsound(source), Action.ROLLBACK, drop=False, learn=learn
                ),
            )
        ]

    def after_step(self, steps: int) -> None:
        """The step is over: what the buffers hold now is good, and a snapshot may be due."""
        self.buffers.keep()
        if self.snapshots is not None and self.snapshots.due(steps):
            finite = self.snapshots.take(steps)
            if self.ranks is not None:  # a snapshot is good where it is good on every rank: all go back to the same one
                finite = self.ranks.any((~finite).float().reshape(1)).reshape(()) == 0
            self._unverified = finite

    def undo(self) -> list[str]:
        """Put back the buffers that the forward of a step that is skipped has written; their names."""
        return self.buffers.restore()

    def roll_back(self) -> int:
        """Go back to the newest verified snapshot; the step it was taken after."""
        assert self.snapshots is not None
        self._unverified = None
        step = self.snapshots.roll_back()
        self.buffers.keep(everything=True)
        return step

    def close(self) -> None:
        """Wait for what is being written."""
        if self.snapshots is not None:
            self.snapshots.close()

    def examine(self, source: Source, event: GradientEvent, found: Sequence[Finding]) -> list[Finding]:
        """The findings of a step with the origin of what is non-finite, where it can be told.

        A weight that is non-finite already makes every batch bad, so it is looked for first; then buffers that the
        forward has poisoned, then the input and the module that first produced such a value.
        """
        if not any(f.kind in NON_FINITE for f in found) or any(f.kind == "nonfinite_param" for f in found):
            return list(found)
        poisoned = list(self._poisoned(source))
        if poisoned:
            return [*poisoned, *found]
        buffers = self.poisoned_buffers(source)
        more: list[Finding] = []
        if self._left > 0:
            self._left -= 1
            batches = event.batches
            more += attribute(self.models, self.loss_fn, self.given, batches, step=event.step, source=event.source)
            found = [self._in_forward_order(f, event) for f in found]
        return [*more, *found, *buffers]

    def _in_forward_order(self, finding: Finding, event: GradientEvent) -> Finding:
        """A non-finite gradient named by the layer that ran first, which need not be the one registered first."""
        if finding.kind not in ("nan_grad", "inf_grad") or self.loss_fn is None or not event.batches:
            return finding
        bad = {n for n, norm in zip(event.names, event.norms.isfinite().tolist(), strict=True) if not norm}
        order = forward_order(self.models, self.loss_fn, self.given, event.batches[-1])
        first = next((name for name in order if name in bad), None)
        return finding if first is None else finding.model_copy(update={"subject": first})

    def _unsound(self, source: Source) -> Iterator[Finding]:
        """What made a snapshot unfit: weights and state, or else buffers that were poisoned between steps."""
        found = list(self._poisoned(source))
        yield from found
        if found:
            return
        for name, module, place in named_buffers(self.models):
            buffer = module._buffers[place]
            if buffer is not None and buffer.is_floating_point() and bool(buffer.isnan().any()):
                yield Finding(
                    kind="nan_buffer",
                    severity=Severity.ERROR,
                    step=source.step,
                    source=source.name,
                    subject=name,
                    detector=NAME,
                    premise=f"the buffer {name!r} holds NaN, written between steps",
                    implies="evaluation returns NaN, and no snapshot can be taken while it does",
                    expected_effect="",
                    confidence=1.0,
                )

    def _poisoned(self, source: Source) -> Iterator[Finding]:
        bad = nonfinite_state(self.models, source.optimizer)
        if not bad:
            return
        yield Finding(
            kind="nonfinite_param",
            severity=Severity.CRITICAL,
            step=source.step,
            source=source.name,
            subject=bad[0],
            action=Action.ROLLBACK,
            detector=NAME,
            premise=f"{len(bad)} weights or optimizer states hold non-finite values; first: {bad[0]}",
            implies="every further batch gives a non-finite loss, and skipping can't help",
            expected_effect="weights, buffers and optimizer state are those of the newest verified snapshot",
            confidence=1.0,
            evidence=(
                Evidence(name="nonfinite_tensors", value=len(bad)),
                Evidence(name="names", value=", ".join(bad[:10])),
            ),
        )

    def poisoned_buffers(self, source: Source) -> list[Finding]:
        """``nan_buffer`` for every buffer that the step's forward has made non-finite. Reads the host."""
        return list(self._poisoned_buffers(source))

    def _poisoned_buffers(self, source: Source) -> Iterator[Finding]:
        for name in self.buffers.nonfinite():
            yield Finding(
                kind="nan_buffer",
                severity=Severity.ERROR,
                step=source.step,
                source=source.name,
                subject=name,
                action=Action.SKIP,
                detector=NAME,
                premise=f"the forward of this step has written non-finite values into the buffer {name!r}",
                implies="training goes on as if nothing had happened, but evaluation returns NaN from here on",
                expected_effect="the buffer is restored to what it was before this step",
                confidence=1.0,
            )
