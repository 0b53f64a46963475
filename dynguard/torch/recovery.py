"""The whole state of a training run, taken apart into tensors and the rest, and put back; and what in it is non-finite.

``dynguard.torch.buffers.Buffers`` undoes what a skipped step's forward wrote; ``dynguard.torch.snapshots.Snapshots``
keeps some ``TrainingState`` with copies of its tensors and undoes steps that were taken.
"""

from __future__ import annotations

import logging
import random
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from dynguard.torch import names as naming
from dynguard.torch.buffers import named_buffers
from dynguard.torch.copies import Leaf, Leaves, Path, Thaw, has_values, is_floating, local, look, rebuild

log = logging.getLogger("dynguard")
TRACKED = "tracked."  # before the names of tensors of a tracked module
# What users and schedulers set in a parameter group; anything else there is the optimizer's own state.
SET_FROM_OUTSIDE = frozenset({
    "lr", "initial_lr", "max_lr", "min_lr", "swa_lr", "lr_scale", "betas", "momentum", "base_momentum", "max_momentum",
    "weight_decay", "initial_weight_decay", "eps",
})  # fmt: skip


def named_parameters(models: Mapping[str, nn.Module], optimizers: Iterable[Optimizer]) -> dict[str, Tensor]:
    """Parameters by name: the models' in their order, then those that only an optimizer knows, by position."""
    found: dict[str, Tensor] = dict(naming.named_parameters(models))
    known = {id(parameter) for parameter in found.values()}
    for i, optimizer in enumerate(optimizers):
        for g, group in enumerate(optimizer.param_groups):
            for j, parameter in enumerate(group["params"]):
                if id(parameter) not in known:
                    known.add(id(parameter))
                    found[f"optimizer{i}.group{g}.param{j}"] = parameter
    return {name: parameter for name, parameter in found.items() if has_values(parameter)}


def nonfinite_state(models: Mapping[str, nn.Module], optimizer: Optimizer) -> list[str]:
    """Names of what is non-finite: parameters in the order of the models, then optimizer state.

    An entry of the optimizer state is called ``"exp_avg_sq of fc.weight"``. Infinities in a frozen parameter are a
    mask, not a fault. Reads the host once.
    """
    parameters = named_parameters(models, [optimizer])
    floating = {name: p for name, p in parameters.items() if is_floating(p)}
    leaves = Leaves()
    for name, parameter in parameters.items():
        leaves.freeze(optimizer.state.get(parameter, {}), (name,))
    state = {path: tensor for path, tensor in leaves.tensors.items() if is_floating(tensor)}
    nan, inf = look([*floating.values(), *state.values()])
    mask = [not p.requires_grad for p in floating.values()] + [False] * len(state)
    hits = [n or (i and not m) for (n, i), m in zip(torch.stack([nan, inf], 1).tolist(), mask, strict=True)]
    labels = [*floating, *map(_entry, state)]
    return [label for label, hit in zip(labels, hits, strict=True) if hit] + [_entry(path) for path in leaves.nan]


def _entry(path: Path) -> str:
    return f"{'.'.join(map(str, path[1:]))} of {path[0]}"


# -- taking apart


@dataclass(slots=True)
class OptimizerState:
    """One optimizer's state: by name of the parameter, by other keys, and its parameter groups without tensors."""

    kind: type[Optimizer]
    parameters: dict[str, Any] = field(default_factory=dict)
    others: dict[Hashable, Any] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class TrainingState:
    """All that training changes, with a Leaf for every tensor.

    Attributes:
        parameters: by name.
        buffers: by name; None for one that was None.
        bound: the tensor that each buffer was bound to.
        optimizers: in their order.
        tracked: the state of tracked things that are no modules. A tracked module is one of the models.
        random: states of the generators.
        nan: whether a plain number in the optimizers' state was NaN.
        layout: names as in each model's ``state_dict()``, for a file.
    """

    parameters: dict[str, Leaf] = field(default_factory=dict)
    buffers: dict[str, Leaf | None] = field(default_factory=dict)
    bound: dict[str, weakref.ref[Tensor]] = field(default_factory=dict)
    optimizers: list[OptimizerState] = field(default_factory=list)
    tracked: dict[str, Any] = field(default_factory=dict)
    random: dict[str, Any] = field(default_factory=dict)
    nan: bool = False
    layout: dict[str, dict[str, Leaf]] = field(default_factory=dict)

    def add_models(
        self, models: Mapping[str, nn.Module], optimizers: Sequence[Optimizer], leaves: Leaves
    ) -> dict[int, str]:
        """Take in parameters and buffers; returns names by ``id(parameter)``."""
        parameters = named_parameters(models, optimizers)
        self.parameters = {name: leaves.add(p, ("parameter", name)) for name, p in parameters.items()}
        for name, module, attribute in named_buffers(models):
            buffer = module._buffers[attribute]
            if buffer is None:
                self.buffers[name] = None
            elif has_values(buffer):
                self.buffers[name] = leaves.add(buffer, ("buffer", name))
                self.bound[name] = weakref.ref(buffer)
        return {id(parameter): name for name, parameter in parameters.items()}

    def add_optimizers(self, optimizers: Sequence[Optimizer], names: Mapping[int, str], leaves: Leaves) -> None:
        """Take in the optimizers' state."""
        for i, optimizer in enumerate(optimizers):
            taken = OptimizerState(type(optimizer))
            for key, value in optimizer.state.items():
                name = names.get(id(key)) if isinstance(key, Tensor) else key
                if name is not None:
                    into: dict[Any, Any] = taken.parameters if isinstance(key, Tensor) else taken.others
                    into[name] = leaves.freeze(value, ("optimizer", i, name))
            for g, group in enumerate(optimizer.param_groups):
                rest = {key: value for key, value in group.items() if key != "params"}
                held = [names[id(p)] for p in group["params"] if id(p) in names]
                taken.groups.append({**leaves.freeze(rest, ("optimizer", i, g)), "params": held})
            self.optimizers.append(taken)
        self.nan = bool(leaves.nan)

    def add_layout(self, models: Mapping[str, nn.Module], leaves: Leaves) -> None:
        """Remember the names that ``state_dict()`` would give, tied parameters under all of theirs."""
        for key, model in naming.modules_by_key(models).items():
            named: list[tuple[str, Tensor | None]] = list(model.named_parameters(remove_duplicate=False))
            for path, module in model.named_modules(remove_duplicate=False):
                kept = [(a, b) for a, b in module._buffers.items() if a not in module._non_persistent_buffers_set]
                named += [(f"{path}.{attribute}" if path else attribute, buffer) for attribute, buffer in kept]
            found = {name: leaves.find(tensor) for name, tensor in named}
            self.layout[key] = {name: leaf for name, leaf in found.items() if leaf is not None}


def state_of(thing: Any) -> Any:
    """``thing.state_dict()``; of a GradScaler the same without the host read, its numbers being tensors."""
    if isinstance(thing, GradScaler) and thing._scale is not None:
        return {
            "scale": thing._scale,
            "growth_factor": thing.get_growth_factor(),
            "backoff_factor": thing.get_backoff_factor(),
            "growth_interval": thing.get_growth_interval(),
            "_growth_tracker": thing._growth_tracker,
        }
    return thing.state_dict()


def random_state(devices: Iterable[torch.device]) -> dict[str, Any]:
    """States of Python's, numpy's and torch's generators, and of those on the given CUDA devices."""
    cuda = {device.index: torch.cuda.get_rng_state(device) for device in devices if device.type == "cuda"}
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state(), "cuda": cuda}


def set_random_state(state: Mapping[str, Any]) -> None:
    """Put the generators where ``random_state()`` found them."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    for index, one in state["cuda"].items():
        torch.cuda.set_rng_state(one, index)


# -- putting back


def put_back(
    state: TrainingState,
    memory: Mapping[Path, Tensor],
    models: Mapping[str, nn.Module],
    optimizers: Sequence[Optimizer],
    scheduled: bool,
) -> list[str]:
    """Put all but tracked things and generators back; returns names of parameters that don't fit any more.

    Args:
        state: what was taken apart.
        memory: copies of its tensors.
        models: by key, tracked modules included.
        optimizers: in the same order.
        scheduled: whether to put back what a scheduler sets in parameter groups, too.
    """
    thaw = Thaw(memory)
    parameters = named_parameters(models, optimizers)
    lost = [n for n, leaf in state.parameters.items() if n not in parameters or not thaw.write(parameters[n], leaf)]
    for name, module, attribute in named_buffers(models):
        if name in state.buffers:
            module._buffers[attribute] = _buffer(state, name, module._buffers[attribute], thaw)
    for optimizer, taken in zip(optimizers, state.optimizers, strict=False):
        if type(optimizer) is taken.kind:
            _put_back_optimizer(optimizer, taken, parameters, thaw, scheduled)
    thaw.finish()
    return lost


def _buffer(state: TrainingState, name: str, current: Tensor | None, thaw: Thaw) -> Tensor | None:
    """The tensor that holds the buffer's old values: the current one, unless that may be somebody else's."""
    leaf = state.buffers[name]
    if leaf is None:
        return None
    own = current is not None and (current is state.bound[name]() or local(current).device != leaf.device)
    return current if own and current is not None and thaw.write(current, leaf) else thaw.fresh(leaf)


def _put_back_optimizer(
    optimizer: Optimizer, taken: OptimizerState, parameters: Mapping[str, Tensor], thaw: Thaw, scheduled: bool
) -> None:
    wanted: dict[Any, Any] = {parameters[n]: value for n, value in taken.parameters.items() if n in parameters}
    wanted.update(taken.others)
    for key in [key for key in optimizer.state if key not in wanted]:
        del optimizer.state[key]
    for key, value in wanted.items():
        optimizer.state[key] = thaw.value(value, optimizer.state.get(key))
    left_alone = {"params"} if scheduled else {"params", *SET_FROM_OUTSIDE}
    for group, old in zip(optimizer.param_groups, taken.groups, strict=False):
        group.update({key: thaw.value(old[key], group.get(key)) for key in old.keys() - left_alone})


def load_tracked(thing: Any, frozen: Any, memory: Mapping[Path, Tensor]) -> None:
    """Give a tracked thing that is no module its state back."""
    state = Thaw(memory).value(frozen)
    if isinstance(thing, GradScaler):
        state = {key: value.item() if isinstance(value, Tensor) else value for key, value in state.items()}
    thing.load_state_dict(state)


def is_scheduler(name: str, thing: Any) -> bool:
    """Whether a tracked thing sets learning rates."""
    return name == "scheduler" or hasattr(thing, "get_last_lr")


# -- a file


def payload(step: int, state: TrainingState, memory: Mapping[Path, Tensor]) -> dict[str, Any]:
    """What goes into a file: state dicts of models and optimizers as torch makes them, readable with weights_only."""

    def plain(value: Any) -> Any:
        return _plain(value, memory, plain)

    models = {key: plain(named) for key, named in state.layout.items()}
    modules = {key.removeprefix(TRACKED): models.pop(key) for key in list(models) if key.startswith(TRACKED)}
    return {
        "version": 1,
        "step": step,
        "models": models,
        "optimizers": [plain(_as_torch_does(taken)) for taken in state.optimizers],
        "tracked": {**plain(state.tracked), **modules},
        "random": plain(state.random),
    }


def _as_torch_does(taken: OptimizerState) -> dict[str, Any]:
    """The shape of ``Optimizer.state_dict()``: parameters by their position in the groups."""
    names = [name for group in taken.groups for name in group["params"]]
    position = {name: i for i, name in enumerate(names)}
    state = {position[name]: value for name, value in taken.parameters.items() if name in position}
    groups = [{**group, "params": [position[name] for name in group["params"]]} for group in taken.groups]
    return {"state": {**state, **taken.others}, "param_groups": groups}


def _plain(value: Any, memory: Mapping[Path, Tensor], again: Callable[[Any], Any]) -> Any:
    if isinstance(value, Leaf):
        return memory[value.path]
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.astype(np.int64) if value.dtype.kind == "u" else value.copy())
    if isinstance(value, (Tensor, str, bytes, bool, int, float, complex, torch.dtype, torch.device)) or value is None:
        return value
    if isinstance(value, (set, frozenset, deque)):
        value = list(value)
    if isinstance(value, (dict, list, tuple)):
        return rebuild(value, lambda _, item: again(item))
    return None  # a function or an object: not for a file
