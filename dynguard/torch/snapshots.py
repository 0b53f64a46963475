"""A ring of verified snapshots of all that training changes, to go back to when a step that was taken proves bad."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from dynguard.errors import SetupError
from dynguard.torch.copies import Leaves, is_floating, local, look
from dynguard.torch.recovery import (
    TRACKED,
    TrainingState,
    is_scheduler,
    load_tracked,
    put_back,
    random_state,
    set_random_state,
    state_of,
)
from dynguard.torch.slots import Slot, Writer

log = logging.getLogger("dynguard")
STEP_BYTES = 4 * 2**20
EVERY = 50
EARLY = (1, 10, 25)  # steps after which the first snapshots are taken; the last two also after a rollback


class Snapshots:
    """Copies of parameters, buffers, optimizer state, tracked things and random states, some steps apart.

    Args:
        models: modules by key, as from ``names.modules_by_key``.
        optimizers: returns the present optimizers.
        every: steps between two snapshots once the first are taken; 0 for none. None: 50, and rarer in proportion where
            sparse gradients touch only some rows of large tables, as copying them whole would slow the run.
        keep: how many verified snapshots are kept. One more may be waiting for its verification.
        max_bytes: of all copies together. Where ``keep`` don't fit, fewer are kept; where not even one does beside
            the one that waits, snapshots are off and the log says so once.
        directory: where the newest verified snapshot is also written, as ``snapshot.pt``.
        restore_rng: whether a rollback also goes back in the random streams. Then the steps that follow draw the same
            dropout masks again.

    A snapshot counts only after ``confirm(True)``: its finiteness is computed on the device and read a step later,
    with all else. Of a model on CUDA the copies lie in pinned memory and are brought there beside the training, from a
    copy on the device if there is ample room for one, so that what is trained meanwhile doesn't get into them.

    A rollback goes to the newest snapshot. If that is asked for again before a newer one has been verified, going
    there didn't help: it is discarded and the next older one taken. With none left ``can_roll_back`` is False.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        optimizers: Callable[[], Sequence[Optimizer]],
        *,
        every: int | None = None,
        keep: int = 2,
        max_bytes: int = 2 * 2**30,
        directory: FilePath | None = None,
        restore_rng: bool = False,
    ) -> None:
        self._stretches = every is None
        every = EVERY if every is None else every
        if every < 0 or keep < 1:
            raise SetupError(f"snapshots need every >= 0 (0: none) and keep >= 1; got every={every}, keep={keep}")
        self.tracked: dict[str, Any] = {}
        self._models = dict(models)
        self._optimizers = optimizers
        self._keep = keep
        self._max_bytes = max_bytes
        self._restore_rng = restore_rng
        self._writer = None if directory is None else Writer(directory)
        self._clock = Clock(every)
        self._off = "" if every else "every=0"
        self._slots: list[Slot] = []
        self._valid: list[Slot] = []  # oldest first
        self._pending: Slot | None = None
        self._went_back_to: Slot | None = None
        self._counts = dict.fromkeys(("taken", "rejected", "passed_over", "rollbacks"), 0)
        self._masks: dict[Any, Tensor] = {}
        self._failed: set[str] = set()
        self._streams: dict[torch.device, Any] = {}
        self._look_for_masks()

    # -- taking

    def track(self, name: str, thing: Any) -> None:
        """Have something else go back with the model: an EMA (a module, too), a scheduler, a GradScaler.

        Raises SetupError where it has no ``state_dict()`` and ``load_state_dict()``.
        """
        if not (callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))):
            raise SetupError(
                f"can't track {name}={type(thing).__name__}: it needs state_dict() and load_state_dict(), "
                "as an nn.Module or a torch scheduler has them"
            )
        self.tracked[name] = thing
        self._look_for_masks()

    def due(self, step: int) -> bool:
        """Whether a snapshot should be taken, ``step`` being the number of steps taken so far."""
        return not self._off and self._clock.due(step)

    def take(self, step: int) -> Tensor:
        """Copy the state after ``step`` steps into the ring; it waits there for ``confirm()``.

        Returns:
            0-d bool on the model's device, not read yet: whether all that was copied is finite. Infinities that a
            parameter or buffer had from the start (a mask) don't count.
        """
        if self._stretches:
            self._stretch()
        self._clock.taken(step)
        self._pending = None
        return self._survived(lambda: self._take(step))

    def confirm(self, finite: bool) -> None:
        """Tell what the tensor of the last ``take()`` said: the snapshot counts from now on, or its place is free."""
        slot, self._pending = self._pending, None
        if slot is None:
            return
        if not finite:
            self._counts["rejected"] += 1
            return
        self._valid = [*self._valid, slot][-self._keep :]
        if self._writer is not None:
            self._writer.start(slot)

    # -- going back

    @property
    def can_roll_back(self) -> bool:
        """Whether there is a snapshot that was not gone back to in vain."""
        return bool(self._untried())

    def roll_back(self) -> int:
        """Put the newest verified snapshot back (see the class for a second time) and return its step.

        Parameters and buffers are written in place, and so is optimizer state that is there; what was not there then
        is dropped. Gradients are left alone, and so are the hyperparameters in parameter groups unless a tracked
        scheduler goes back with them. Raises RuntimeError where ``can_roll_back`` is False.
        """
        self._valid = self._untried()
        if not self._valid:
            raise RuntimeError("there is no snapshot to roll back to: ask can_roll_back first")
        slot = self._went_back_to = self._valid[-1]
        self._pending = None
        self._clock.went_back()
        self._counts["rollbacks"] += 1
        slot.wait()
        with torch.no_grad():
            self._put_back(slot)
        return slot.step

    # -- facts

    @property
    def bytes(self) -> int:
        """Bytes that all copies take now."""
        return sum(slot.nbytes for slot in self._slots)

    def state_dict(self) -> dict[str, Any]:
        """Light facts for a report: steps of the verified snapshots, counts, bytes, why they are off ("" if not)."""
        return {
            **self._counts,
            "steps": [slot.step for slot in self._valid],
            "bytes": self.bytes,
            "off": self._off,
            "failed_writes": self._writer.failures if self._writer else 0,
        }

    def close(self, timeout: float = 5.0) -> None:
        """Wait at most so many seconds for what is being written to disk."""
        if self._writer is not None:
            self._writer.close(timeout)

    # -- inside

    def _stretch(self) -> None:
        """Make snapshots rarer where steps touch only a part of what they copy: sparse gradients.

        A step that reads and writes all of its weights costs a multiple of their copy; one that touches some rows of a
        large table does not. What a step costs beside is put at ``STEP_BYTES``.
        """
        parameters = {
            id(p): p for o in self._optimizers() for g in o.param_groups for p in g["params"] if not is_lazy(p)
        }
        sizes = {True: 0, False: 0}  # by whether only some rows are touched
        for p in parameters.values():
            sparse = p.grad is not None and p.grad.layout is not torch.strided
            sizes[sparse] += p.numel() * p.element_size()
        whole = sizes[True] + sizes[False]
        stretch = max(1, whole // (sizes[False] + STEP_BYTES)) if sizes[True] else 1
        if stretch > self._clock.stretch:
            log.info(
                "snapshots are %d steps apart, as each copies %d MiB and sparse steps touch little of it; "
                "snapshot_every=%d insists",
                EVERY * stretch,
                whole // 2**20,
                EVERY,
            )
        self._clock.stretch = stretch

    def _untried(self) -> list[Slot]:
        in_vain = self._valid and self._valid[-1] is self._went_back_to
        return self._valid[:-1] if in_vain else self._valid

    def _take(self, step: int) -> Tensor:
        leaves = Leaves()
        state = self._state(leaves)
        finite = self._finite(leaves)
        slot = self._free_slot(leaves.nbytes)
        if slot is not None:
            slot.fill(step, state, leaves.tensors, self._streams)
            self._pending = slot
            self._counts["taken"] += 1
        return torch.zeros_like(finite) if state.nan else finite

    def _all_models(self) -> dict[str, nn.Module]:
        return {**self._models, **{TRACKED + n: t for n, t in self.tracked.items() if isinstance(t, nn.Module)}}

    def _state(self, leaves: Leaves) -> TrainingState:
        state, models, optimizers = TrainingState(), self._all_models(), self._optimizers()
        state.add_optimizers(optimizers, state.add_models(models, optimizers, leaves), leaves)
        for name, thing in self.tracked.items():
            if not isinstance(thing, nn.Module):
                with _Guarded(self._failed, f"{name} is not part of the snapshots"):
                    state.tracked[name] = leaves.freeze(state_of(thing), ("tracked", name))
        state.random = random_state({local(tensor).device for tensor in leaves.tensors.values()})
        if self._writer is not None:
            state.add_layout(models, leaves)
        return state

    def _look_for_masks(self) -> None:
        """Learn before training which parameters and buffers are infinite by nature."""
        if self._off:
            return
        leaves = Leaves()

        def find() -> Tensor:
            TrainingState().add_models(self._all_models(), [], leaves)
            return self._finite(leaves)

        self._survived(find)

    def _survived(self, look_or_copy: Callable[[], Tensor]) -> Tensor:
        """The answer; where a tensor can't be copied or looked at, True, and no snapshots instead of no training."""
        try:
            with torch.no_grad():
                return look_or_copy()
        except Exception as error:  # noqa: BLE001 - whatever a tensor subclass raises
            self._switch_off(f"the state of this run can't be copied: {type(error).__name__}: {error}")
            return torch.ones((), dtype=torch.bool)

    def _finite(self, leaves: Leaves) -> Tensor:
        floating = {path: tensor for path, tensor in leaves.tensors.items() if is_floating(tensor)}
        nan, inf = look(list(floating.values()))
        never = torch.zeros((), dtype=torch.bool, device=inf.device)
        masks = [
            never if path[0] == "optimizer" else self._masks.setdefault((path, tensor.shape), flag)
            for (path, tensor), flag in zip(floating.items(), inf.unbind(), strict=True)
        ]
        bad = nan | (inf & ~torch.stack(masks)) if masks else nan
        return ~bad.any()

    def _free_slot(self, size: int) -> Slot | None:
        """A place for a snapshot of so many bytes: a free one, or that of the oldest; None if there is none now."""
        places = min(self._keep + 1, self._max_bytes // max(size, 1))
        if places < 2:
            self._switch_off(
                f"two of this run take {2 * size / 2**20:.0f} MiB, max_bytes is {self._max_bytes / 2**20:.0f} MiB; "
                f"to have them, give max_bytes={2 * size} or more"
            )
            return None
        self._valid = self._valid[-(places - 1) :]
        if len(self._slots) > places:
            self._slots = [*self._valid, *(slot for slot in self._slots if slot not in self._valid)][:places]
        free = [slot for slot in self._slots if slot not in self._valid and not slot.busy]
        if not free and len(self._slots) < places:
            self._slots.append(Slot())
            return self._slots[-1]
        if not free:
            self._counts["passed_over"] += 1  # the only other place is still being written to disk
            return None
        return free[0]

    def _switch_off(self, why: str) -> None:
        if not self._off:
            self._off = why
            log.info("snapshots are off: %s", why)
        self._slots, self._valid, self._pending = [], [], None

    def _put_back(self, slot: Slot) -> None:
        with_scheduler = any(is_scheduler(name, self.tracked.get(name)) for name in slot.state.tracked)
        lost = put_back(slot.state, slot.memory, self._all_models(), self._optimizers(), with_scheduler)
        if lost:
            log.warning(
                "%d parameters have another shape than in the snapshot and stay as they are: %s", len(lost), lost[0]
            )
        for name, frozen in slot.state.tracked.items():
            if name in self.tracked:
                with _Guarded(self._failed, f"{name} could not be rolled back"):
                    load_tracked(self.tracked[name], frozen, slot.memory)
        if self._restore_rng:
            set_random_state(slot.state.random)


class _Guarded:
    """A failure of a tracked thing is its owner's: it is logged once and must not end the run."""

    def __init__(self, logged: set[str], what: str) -> None:
        self._logged = logged
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        if self._what not in self._logged:
            self._logged.add(self._what)
            log.warning("%s: %s: %s", self._what, type(error).__name__, error)
        return True


class Clock:
    """When snapshots are due: early on after a few steps, then every so many; soon again after a rollback.

    Attributes:
        stretch: by how much the steps between two are multiplied.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self.stretch = 1
        self._start = 0
        self._early: Sequence[int] = EARLY
        self._went_back = False
        self._next = 1

    def due(self, step: int) -> bool:
        """Whether one is due after ``step`` steps; a step that was missed stays due."""
        if self._went_back:
            self._went_back = False
            self._start, self._early = step, EARLY[1:]
            self.taken(step)
        return step >= self._next

    def taken(self, step: int) -> None:
        """One was taken after ``step`` steps."""
        early = [self._start + after for after in self._early if self._start + after > step]
        every = max(self._every, 1) * self.stretch
        self._next = min([*early, (step // every + 1) * every])

    def went_back(self) -> None:
        """A rollback: the next call of ``due()`` tells where training goes on."""
        self._went_back = True
