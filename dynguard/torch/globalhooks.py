"""Guarding a script that knows nothing of dynguard: which modules own an optimizer's parameters, found when it steps.

A global pre-hook of torch (``torch.optim.optimizer.register_optimizer_step_pre_hook``) runs before the optimizer's own
pre-hooks, so those that it registers there run in the same step: the very first step is judged.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from dynguard.errors import DynguardError
from dynguard.torch.names import unwrap


class Watcher:
    """Attaches one FlowManager to every optimizer at its first step, so that this step is judged already.

    Args:
        keywords: for FlowManager.
        home: the working directory of whoever reads the last line; the script may go elsewhere.
    """

    def __init__(self, keywords: Mapping[str, Any], home: Path) -> None:
        self.keywords = dict(keywords)
        self.home = home
        self.report: Path | None = None
        self.flow: Any = None
        self.trouble = ""
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._attached = 0

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Attach to an optimizer that is new. Raises nothing: a guard that can't be set up must not end training."""
        if optimizer in self._seen:
            return
        self._seen.add(optimizer)
        if is_inside_another(optimizer):
            return
        try:
            self._attach(optimizer)
        except Exception as error:  # noqa: BLE001 - said below and at the end
            self.trouble = str(error) if isinstance(error, DynguardError) else f"{type(error).__name__}: {error}"
            print(f"dynguard: {type(optimizer).__name__} is not guarded by this run: {self.trouble}", file=sys.stderr)

    def _attach(self, optimizer: torch.optim.Optimizer) -> None:
        if self.flow is None:
            from dynguard.flow import FlowManager

            self.flow = FlowManager(**self.keywords)
        self.flow.attach(optimizer, model=owners(optimizer), name=f"optimizer{self._attached}")
        self._attached += 1
        if self.flow.run_directory is not None and self.report is None:
            self.report = self.flow.run_directory.absolute()

    def close(self, error: BaseException | None = None) -> str:
        """Close the manager and say in a line what was found and where the report lies."""
        if self.flow is None:
            return f"nothing was watched: {self.trouble}" if self.trouble else "nothing was watched"
        self.flow.close(None if isinstance(error, SystemExit) and not error.code else error)
        found = f"{_count(self.flow.findings, 'finding')}, {_count(self.flow.interventions, 'intervention')}"
        unguarded = f" Not all was guarded: {self.trouble}." if self.trouble else ""
        return f"{found} in {self.flow.step} steps.{unguarded}{self._where()}"

    def _where(self) -> str:
        if self.report is None:
            return ""
        near = self.report.is_relative_to(self.home)
        return f" Read: dynguard report {self.report.relative_to(self.home) if near else self.report}"


def _count(items: list[Any], noun: str) -> str:
    return f"{len(items) or 'no'} {noun}{'' if len(items) == 1 else 's'}"


def is_inside_another(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this step was called by the step of another optimizer over the same parameters (SAM, Lookahead ...).

    The outer one is watched already; watching both would judge one update twice.
    """
    mine = {id(p) for p in _parameters(optimizer)}
    for frame in _frames():
        outer = frame.f_locals.get("self") if frame.f_globals.get("__name__") == "torch.optim.optimizer" else None
        if not isinstance(outer, torch.optim.Optimizer) or outer is optimizer:
            continue
        if any(id(p) in mine for p in _parameters(outer)):
            return True
    return False


def owners(optimizer: torch.optim.Optimizer) -> nn.Module | dict[str, nn.Module] | None:
    """What names the optimizer's parameters.

    The one module that owns them, or the several modules that do, under the names of the variables that hold them;
    None where no module owns any.
    """
    roots = cover({id(p) for p in _parameters(optimizer)}, live_roots())
    if len(roots) == 1:
        return roots[0]
    labelled: dict[str, nn.Module] = {}
    for root in roots:
        label = base = _variable(root) or type(unwrap(root)).__name__.lower()
        number = 2
        while label in labelled:
            label, number = f"{base}{number}", number + 1
        labelled[label] = root
    return labelled or None


def cover(wanted: set[int], roots: Iterable[nn.Module]) -> list[nn.Module]:
    """The fewest roots that own the wanted parameters (by id), greedily: most of them first, then the smallest root."""
    owned = [(root, {id(p) for p in root.parameters()}) for root in roots]
    chosen: list[nn.Module] = []
    wanted = set(wanted)
    while wanted:
        best = max(owned, key=lambda pair: (len(pair[1] & wanted), -len(pair[1])), default=None)
        if best is None or not best[1] & wanted:
            break
        chosen.append(best[0])
        wanted -= best[1]
    return chosen


def live_roots() -> list[nn.Module]:
    """All modules alive that are no other module's child, in order of creation."""
    # type() and not isinstance(): the latter asks an object's __class__, which lazy proxies answer by importing.
    modules = [o for o in gc.get_objects() if issubclass(type(o), nn.Module) and "_modules" in vars(o)]
    children = {id(child) for module in modules for child in module.children()}
    return [module for module in modules if id(module) not in children]


def _variable(wanted: object) -> str:
    """The name of a variable or attribute of ``self`` that holds it, in the functions that called the step or in their
    modules; "" where there is none."""
    for frame in _frames():
        this = getattr(frame.f_locals.get("self"), "__dict__", {})
        for scope in (frame.f_locals, this, frame.f_globals):
            for name, value in list(scope.items()):
                if value is wanted and not name.startswith("_"):
                    return str(name)
    return ""


def _frames() -> Iterator[FrameType]:
    """The frames of all functions that are running, ours left out, innermost first."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals is not globals():
            yield frame
        frame = frame.f_back


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
