"""Buffers as they were before a step's forward: a step that is skipped must not leave its batch in BatchNorm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from dynguard.torch import names as naming
from dynguard.torch.copies import copy_all, has_values, is_floating, local, look

LOOK_EVERY = 16  # calls of keep() between two looks for buffers in a model that has none
WALK_EVERY = 256  # calls of keep() between two searches for modules that were replaced


def named_buffers(models: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module, str]]:
    """(name, module, attribute) of every buffer, also of those that are None or share a tensor, in module order."""
    seen: set[int] = set()
    for key, model in naming.modules_by_key(models).items():
        for path, module in model.named_modules():
            if id(module) in seen:
                continue
            seen.add(id(module))
            for attribute in module._buffers:
                yield naming.clean(".".join(part for part in (key, path, attribute) if part)), module, attribute


class _Shadow:
    """A buffer's tensor and the copy of its values."""

    __slots__ = ("copied", "live", "silent", "source", "users", "version")

    def __init__(self, live: Tensor, copied: Tensor | None, silent: bool) -> None:
        self.live = live
        self.source = local(live)
        fits = copied is not None and (copied.shape, copied.dtype, copied.device, copied.layout) == (
            self.source.shape, self.source.dtype, self.source.device, self.source.layout
        )  # fmt: skip
        self.copied: Tensor | None = copied if fits else None
        self.version = -1
        self.silent = silent and is_floating(live)
        self.users = 0

    def put_back(self) -> None:
        """The values back into the tensor, past its version counter: a graph that is pending must not die of it."""
        assert self.copied is not None
        if self.source.shape == self.copied.shape:
            self.source.data.copy_(self.copied)
        else:
            self.live.data = self.copied.clone()
        self.count()

    def count(self) -> None:
        """Take the present version as that of the copy. An inference tensor counts none."""
        self.version = -1 if self.live.is_inference() else self.live._version

    @property
    def untouched(self) -> bool:
        """Whether the version counter says that nothing was written; what counts none always may have been."""
        return self.version >= 0 and not self.silent and self.live._version == self.version


@dataclass(slots=True, eq=False)
class _Slot:
    """A place for a buffer in a module. ``kept`` tells a buffer that was None from one that was not there yet."""

    name: str
    module: nn.Module
    attribute: str
    home: Mapping[str, Tensor | None]
    silent: bool
    shadow: _Shadow | None = None
    kept: bool = False

    def may_have_changed(self) -> bool:
        live, shadow = self.home.get(self.attribute), self.shadow
        if shadow is None:
            return live is not None or not self.kept
        return live is not shadow.live or not shadow.untouched

    def has_changed(self) -> bool:
        """As may_have_changed(), sure where the counter says nothing; reads the host."""
        shadow = self.shadow
        if not self.may_have_changed():
            return False
        if shadow is None or self.home.get(self.attribute) is not shadow.live:
            return True
        if not shadow.silent and shadow.version >= 0:
            return True
        return shadow.copied is None or not torch.equal(shadow.source, shadow.copied)


class Buffers:
    """Keeps the values that all buffers had after the last good step, and puts them back.

    Args:
        models: modules by key, as from ``names.modules_by_key``.

    ``keep()`` goes by identity and version counter, on the host alone, so that a step that changed no buffer costs a
    look at each. Buffers of normalisation (floating, of a norm layer, or with "mean" or "var" in their name) are copied
    at every call: ``F.batch_norm`` writes running statistics past the version counter.
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self._models = models
        self._slots: list[_Slot] = []
        self._tables: list[Any] = []
        self._tally = -1
        self._calls = 0
        self._by_id: dict[int, _Shadow] = {}
        self.keep()

    def keep(self, *, everything: bool = False) -> None:
        """Take the present values as the good ones: after every step that was taken.

        Args:
            everything: copy also what looks unchanged: after a rollback, which writes past the version counters.
        """
        due = self._slots or not self._calls % LOOK_EVERY
        if due and (sum(map(len, self._tables)) != self._tally or not self._calls % WALK_EVERY):
            self._walk()
        self._calls += 1
        changed = [slot for slot in self._slots if everything or slot.may_have_changed()]
        if changed:
            self._copy(changed)

    def restore(self) -> list[str]:
        """Put back what changed since ``keep()`` and return its names, in module order.

        Values are written in place. A buffer that its module has bound to another tensor gets the tensor that it had
        at ``keep()``, as the new one may be somebody else's (a batch, an activation); only where that is of another
        device or dtype (the model was moved) the values are written into the new one. A buffer registered since
        ``keep()`` is left alone. Reads the host for buffers whose changes are not counted.
        """
        changed = [slot for slot in self._slots if slot.kept and slot.has_changed()]
        named: dict[int, str] = {}
        for slot in changed:
            live = slot.home.get(slot.attribute)
            named.setdefault(id(slot if live is None else live), slot.name)  # a shared one once
        for slot in changed:
            self._put_back(slot)
        return list(named.values())

    def restore_where(self, drop: Tensor) -> None:
        """Put back what changed since ``keep()`` where ``drop``, a bool on the device, says so. No host read."""
        done: set[int] = set()
        for slot in self._slots:
            live, shadow = slot.home.get(slot.attribute), slot.shadow
            if shadow is None or shadow.copied is None or live is not shadow.live or id(live) in done:
                continue
            if slot.may_have_changed() and shadow.copied.shape == shadow.source.shape:
                done.add(id(live))
                flag = drop.to(shadow.source.device, non_blocking=True).reshape(())
                shadow.source.data.copy_(torch.where(flag, shadow.copied, shadow.source))

    def nonfinite(self) -> list[str]:
        """Names of floating buffers, in module order, in which a NaN or a new infinity came up since ``keep()``.

        An infinity that was there at ``keep()`` is the buffer's own (a mask). Reads the host.
        """
        self._walk()
        found: dict[int, str] = {}
        for slot in self._slots:
            live = slot.home.get(slot.attribute)
            if live is None or id(live) in found or not has_values(live) or not is_floating(live):
                continue
            if slot.has_changed() and _poisoned(live, slot.shadow):
                found[id(live)] = slot.name
        return list(found.values())

    def _walk(self) -> None:
        """Find the buffers that there are now; those known already keep their shadows."""
        known = {(id(slot.module), slot.attribute): slot for slot in self._slots}
        slots = [
            known.get((id(module), attribute)) or _make_slot(name, module, attribute)
            for name, module, attribute in named_buffers(self._models)
        ]
        here = {id(slot) for slot in slots}
        for slot in self._slots:
            if id(slot) not in here:
                self._release(slot)
        self._slots = slots
        modules = [m for model in naming.modules_by_key(self._models).values() for m in model.modules()]
        self._tables = [table for module in modules for table in (module._buffers, module._modules)]
        self._tally = sum(map(len, self._tables))

    def _copy(self, changed: list[_Slot]) -> None:
        """Bring the shadows of these slots up to date."""
        stale: dict[_Shadow, None] = {}
        for slot in changed:
            live, shadow = slot.home.get(slot.attribute), slot.shadow
            if shadow is None or shadow.live is not live:
                shadow = self._rebind(slot, live)
            if shadow is not None:
                stale[shadow] = None
        targets, sources = [], []
        with torch.no_grad():
            for shadow in stale:
                if shadow.copied is None or shadow.copied.shape != shadow.source.shape:
                    shadow.copied = shadow.source.detach().clone()
                else:
                    targets.append(shadow.copied)
                    sources.append(shadow.source)
                shadow.count()
            copy_all(targets, sources)

    def _rebind(self, slot: _Slot, live: Tensor | None) -> _Shadow | None:
        """Give the slot the shadow of its new tensor; None where it has no values."""
        if live is not None and has_values(live):
            slot.kept = True
            return self._shadow(slot, live)
        self._release(slot)
        slot.kept = live is None
        return None

    def _shadow(self, slot: _Slot, live: Tensor) -> _Shadow:
        """The shadow of the slot's new tensor: that of a slot that shares the tensor, or a new one."""
        memory = self._release(slot)
        shadow = self._by_id.get(id(live))
        if shadow is None:
            shadow = self._by_id[id(live)] = _Shadow(live, memory, slot.silent)
        shadow.users += 1
        slot.shadow = shadow
        return shadow

    def _release(self, slot: _Slot) -> Tensor | None:
        """Let go of the slot's shadow; its memory, where nobody else uses it."""
        shadow, slot.shadow = slot.shadow, None
        if shadow is None:
            return None
        shadow.users -= 1
        if shadow.users:
            return None
        del self._by_id[id(shadow.live)]
        return shadow.copied

    def _put_back(self, slot: _Slot) -> None:
        live, shadow = slot.home.get(slot.attribute), slot.shadow
        if shadow is None or shadow.copied is None:
            slot.module._buffers[slot.attribute] = None
            return
        shadow.put_back()
        if live is shadow.live:
            return
        moved = live is not None and (live.device, live.dtype) != (shadow.live.device, shadow.live.dtype)
        if live is not None and moved and local(live).shape == shadow.copied.shape:
            local(live).data.copy_(shadow.copied)
        else:
            slot.module._buffers[slot.attribute] = shadow.live


def _make_slot(name: str, module: nn.Module, attribute: str) -> _Slot:
    table = module._buffers
    home = table if isinstance(table, dict) else dict(table.items())  # a scripted module's is a wrapper
    silent = isinstance(module, _NormBase) or "mean" in attribute or "var" in attribute
    return _Slot(name, module, attribute, home, silent)


def _poisoned(live: Tensor, shadow: _Shadow | None) -> bool:
    nan, inf = look([live])
    if bool(nan) or not bool(inf):
        return bool(nan)
    before = None if shadow is None else shadow.copied
    values = local(live)
    if before is None or before.shape != values.shape or values.layout is not torch.strided:
        return True
    return bool((values.isinf() & ~before.to(values.device).isinf()).any())
