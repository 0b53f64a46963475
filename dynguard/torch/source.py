"""The torch source: one per optimizer. Hooks on the optimizer turn its steps into events and verdicts into deeds."""

from __future__ import annotations

import operator
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dynguard.errors import SetupError
from dynguard.events import GradientEvent, ParameterEvent
from dynguard.torch.distributed import is_sharded
from dynguard.torch.moments import moments
from dynguard.torch.names import innermost
from dynguard.torch.statistics import NARROW, Statistics
from dynguard.torch.training import PerGroup, TorchTraining, mean
from dynguard.torch.undo import Undo

# Under which names optimizers keep second moments, and how their classes are called.
SECOND_MOMENTS = frozenset({"exp_avg_sq", "square_avg", "exp_inf", "row_var", "variance", "exp_avg_sq_row"})
ADAPTIVE = (
    "Adam",
    "RMSprop",
    "Adagrad",
    "Adadelta",
    "NAdam",
    "RAdam",
    "SparseAdam",
    "Adafactor",
    "Lion",
    "Lamb",
    "Muon",
)
# Optimizers that coalesce a sparse gradient first of all: what is coalesced for them once serves everyone.
SUMMING = (torch.optim.SparseAdam, torch.optim.Adagrad)
ABSENT = object()
Hook = tuple[tuple[Any, ...], dict[str, Any]]
_watched: weakref.WeakKeyDictionary[Optimizer, weakref.ref[Source]] = weakref.WeakKeyDictionary()


class Listener(Protocol):
    """Who is told about the steps of a source."""

    def before_step(self, source: Source, loss: Any) -> None:
        """Gradients are ready and the update has not run; ``loss`` is what a closure returned, or None."""

    def after_step(self, source: Source) -> None:
        """The update has run, or was skipped."""

    def dropped_step(self, source: Source, scaler: Any) -> None:
        """A GradScaler has kept the update from the optimizer."""


class Source:
    """Watches one optimizer.

    Args:
        optimizer: the optimizer; one that wraps another (``.optimizer``) is watched at the innermost.
        known: names by ``id(parameter)``, in the order of the model; parameters outside it get names by position.
        name: of this source, "" where there is only one.
        listener: who is told.
        tables: ``id(parameter)`` of those that are embedding tables.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        known: Mapping[int, str],
        name: str,
        listener: Listener,
        tables: frozenset[int] = frozenset(),
    ) -> None:
        self.name = name
        self.step = 0
        self.names: tuple[str, ...] = ()
        self.parameters: list[nn.Parameter] = []
        self.rejected: Any = False
        self.changed = True  # names have changed since they were last told
        self.skipped = False
        self.owned: frozenset[int] = frozenset()  # ``id(parameter)`` of all
        self.judged = 0  # steps that the optimizer was really asked for
        self.tables: frozenset[int] = frozenset()
        self._table_names = tables
        self._known = dict(known)
        self._order = {key: i for i, key in enumerate(known)}
        self._listener = listener
        self._stash: list[tuple[Tensor, Tensor]] = []
        self.group_of: list[int] = []  # which parameter group holds each parameter
        self.training: TorchTraining | None = None
        self._previous: list[Tensor | None] = []
        self._sizes: list[int] = []
        self._held: list[Tensor] = []  # as in the parameter groups
        self._plain = self._sparse = False
        self.deferred = False
        self.sent: deque[Any] = deque()
        self._undo: Undo | None = None
        self._mine_found_inf: tuple[Any, ...] | None = None
        self._handles: list[Any] = []
        self.optimizer = innermost(optimizer)
        self.watch(self.optimizer)

    def watch(self, optimizer: Optimizer) -> None:
        """Put the hooks on ``optimizer``, taking them off the one watched before (an optimizer made anew)."""
        other = _watched.get(optimizer)
        if other is not None and other() is not None and other() is not self:
            raise SetupError(
                "this optimizer is already watched by another FlowManager: close() that one first, "
                "or give both models to one FlowManager(model=[...], optimizer=[...])"
            )
        self.detach()
        self.optimizer = optimizer
        _watched[optimizer] = weakref.ref(self)
        self._sizes = []
        self.refresh()
        self._handles = [
            optimizer.register_step_pre_hook(untraced(self._before)),
            optimizer.register_step_post_hook(untraced(self._after)),
        ]

    def detach(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self.training is not None:
            self.training.detach()
        self.restore()
        if self.optimizer in _watched:
            del _watched[self.optimizer]

    def refresh(self) -> None:
        """Learn of parameters that joined: known ones in the order of the model first, later ones at the end."""
        groups = self.optimizer.param_groups
        held = [p for group in groups for p in group["params"]]
        sizes = [len(group["params"]) for group in groups]
        if sizes == self._sizes and all(map(operator.is_, held, self._held)):
            return
        if sizes == self._sizes:
            self._replace(held)
        self._sizes, self._held = sizes, held
        group_of = {id(p): g for g, group in enumerate(groups) for p in group["params"]}
        have = {id(p) for p in self.parameters}
        joined = [
            (g, i, p) for g, group in enumerate(groups) for i, p in enumerate(group["params"]) if id(p) not in have
        ]
        joined.sort(key=lambda item: self._order.get(id(item[2]), len(self._order)))
        prefix = f"{self.name}." if self.name else ""
        fresh = [self._known.get(id(p), f"{prefix}group{g}.param{i}") for g, i, p in joined]
        if self.parameters and joined and not self._handles and set(fresh) == set(self.names):
            # A successor of the optimizer holds the same parameters by name: an index keeps its meaning.
            by_name = dict(zip(fresh, (p for _, _, p in joined), strict=True))
            self.parameters = [by_name[n] for n in self.names]
        else:
            self.parameters = [*self.parameters, *(p for _, _, p in joined)]
            self.names = (*self.names, *fresh)
            self.changed = True
        self.owned = frozenset(map(id, self.parameters))
        self.group_of = [group_of.get(id(p), 0) for p in self.parameters]
        self.tables = frozenset(i for i, p in enumerate(self.parameters) if id(p) in self._table_names)
        kinds = {(p.device, p.layout) for p in self.parameters}
        self._plain = len(kinds) == 1 and all(p.dtype in NARROW and not is_sharded(p) for p in self.parameters)

    def _replace(self, held: Sequence[Tensor]) -> None:
        """Parameters that took the place of others (a table that grew) keep their index and their name."""
        for old, new in zip(self._held, held, strict=True):
            at = next((i for i, p in enumerate(self.parameters) if p is old), None)
            if old is new or at is None or any(p is new for p in self.parameters):
                continue
            self.parameters[at] = cast(nn.Parameter, new)
            self._known[id(new)] = self.names[at]
            if at in self.tables:
                self._table_names |= {id(new)}

    def learning_rates(self) -> list[Any]:
        """Learning rate of each parameter group, as the optimizer holds it (a number, or a tensor if capturable)."""
        return [group.get("lr", 0.0) for group in self.optimizer.param_groups]

    @property
    def adaptive(self) -> bool:
        """Whether the optimizer divides by a second moment, by the state it keeps or by the name of its class."""
        state: dict[str, Any] = next(iter(self.optimizer.state.values()), {})
        return not SECOND_MOMENTS.isdisjoint(state) or type(self.optimizer).__name__.startswith(ADAPTIVE)

    def gradient_event(self, losses: Sequence[Any], batches: Sequence[Any]) -> GradientEvent:
        """The event of the step that is about to happen."""
        gradients: list[Tensor | None] = [p.grad for p in self.parameters]
        shared: set[int] = set()
        scale = getattr(self.optimizer, "grad_scale", None)
        statistics = Statistics(
            gradients,
            plain=self._plain and not self._sparse,
            scale=scale if isinstance(scale, Tensor) else None,
            moments=self._variances,
            previous=self._previous,
            remember=self._remember,
        )
        self._sparse = bool(statistics.sparse)  # probably so at the next step
        for i in statistics.sparse:  # autograd gives the tables of a sum one and the same values: edits would add up
            values = cast(Tensor, gradients[i])._values()
            if values.data_ptr() in shared:
                gradients[i] = self.parameters[i].grad = cast(Tensor, gradients[i]).clone()
            shared.add(values.data_ptr())
        if type(self.optimizer) in SUMMING and statistics.summed is not gradients:
            gradients = list(statistics.summed)
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter.grad = gradient
        return GradientEvent(
            step=self.step,
            source=self.name,
            names=self.names,
            statistics=statistics,
            parameters=self.parameters,
            gradients=gradients,
            learning_rates=PerGroup(self.learning_rates(), self.group_of),
            loss=mean(losses),
            losses=losses,
            batches=batches,
            rejected=self.rejected,
            tables=self.tables,
            adaptive=self.adaptive,
            scale=scale,
            overflow=getattr(self.optimizer, "found_inf", None),
            training=self.training,
        )

    def parameter_event(self) -> ParameterEvent:
        """The event after the update."""
        statistics = Statistics([p.detach() for p in self.parameters], plain=self._plain)
        return ParameterEvent(
            step=self.step,
            source=self.name,
            names=self.names,
            parameters=self.parameters,
            norms=statistics.norms,
            learning_rates=PerGroup(self.learning_rates(), self.group_of),
            skipped=self.skipped,
            training=self.training,
        )

    def _variances(self) -> list[Tensor | None]:
        """The bias-corrected second moments, before the update."""
        groups = self.optimizer.param_groups
        found = (moments(self.optimizer, p, groups[g]) for p, g in zip(self.parameters, self.group_of, strict=True))
        return [None if m is None else m.variance() for m in found]

    def _remember(self, gradients: Sequence[Tensor | None]) -> None:
        self._previous = [None if g is None else g.detach().clone() for g in gradients]

    def skip(self) -> None:
        """Keep the update from happening: without gradients an optimizer leaves weights and state alone.

        The gradients come back after the step, as code that logs or zeroes them expects them to be there.
        """
        self.skipped = True
        if not type(self.optimizer).__module__.startswith("torch."):
            self._undo = Undo(self.optimizer)  # it may not know that a gradient can be missing
            return
        for parameter in self._all_parameters():
            if parameter.grad is not None:
                self._stash.append((parameter, parameter.grad))
                parameter.grad = None

    def can_defer(self) -> bool:
        """Whether the optimizer drops an update by itself when ``found_inf`` says so: torch's fused ones."""
        optimizer: Any = self.optimizer
        return bool(getattr(optimizer, "_step_supports_amp_scaling", False)) and all(
            group.get("fused") for group in optimizer.param_groups
        )

    @property
    def defers_now(self) -> bool:
        """Whether this very step can be dropped on the device: not one that makes the optimizer's state.

        torch's fused SGD makes a momentum buffer without filling it, and a dropped step leaves it so.
        """
        if not self.deferred:
            return False
        stateless = all(not group.get("momentum", 1) for group in self.optimizer.param_groups)
        return stateless or len(self.optimizer.state) >= sum(p.grad is not None for p in self.parameters)

    def drop_on_device(self, drop: Tensor) -> None:
        """Let the device decide about this update: (1,) float, non-zero drops it. Joins a GradScaler's own flag."""
        optimizer: Any = self.optimizer
        before, scale = vars(optimizer).get("found_inf"), vars(optimizer).get("grad_scale")
        # A GradScaler that has unscaled already sets grad_scale to None and deletes it later: there, not absent.
        self._mine_found_inf = tuple(vars(optimizer).get(name, ABSENT) for name in ("found_inf", "grad_scale"))
        own = drop.to(torch.float32).reshape(())
        optimizer.found_inf = (
            own if before is None else torch.maximum(before, own.to(before.device).reshape(before.shape))
        )
        if scale is None:
            optimizer.grad_scale = None
        self.rejected = own.bool()

    def _give_back_found_inf(self) -> None:
        if self._mine_found_inf is None:
            return
        optimizer: Any = self.optimizer
        for name, value in zip(("found_inf", "grad_scale"), self._mine_found_inf, strict=True):
            if value is ABSENT:
                vars(optimizer).pop(name, None)
            else:
                setattr(optimizer, name, value)
        self._mine_found_inf = None

    def restore(self) -> None:
        """Put back the gradients that skip() took, or what an optimizer of unknown habits has done since."""
        if self.training is not None:
            self.training.restore()
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()
        for parameter, gradient in self._stash:
            if parameter.grad is None:
                parameter.grad = gradient
        self._stash = []

    def clip(self, limits: Mapping[str, float], norms: Mapping[str, float]) -> None:
        """Scale the gradients of the named parameters ("" for all together) down to the given L2 norm."""
        for subject, limit in limits.items():
            factor = limit / norms[subject] if norms.get(subject, 0.0) > limit else 1.0
            chosen = [p.grad for n, p in zip(self.names, self.parameters, strict=True) if subject in ("", n)]
            for gradient in chosen:
                if gradient is not None:
                    gradient.mul_(factor)

    def _all_parameters(self) -> Iterator[Tensor]:
        return (p for group in self.optimizer.param_groups for p in group["params"])

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hook | None:
        self.restore()  # of a step that died half-way
        self._give_back_found_inf()
        position = next((i for i, a in enumerate(args[1:], 1) if callable(a)), None)
        closure = kwargs.get("closure") if position is None else args[position]
        if closure is None:
            self._judge(None)
            return None
        judged = self._judging(closure)
        if position is None:
            return args, {**kwargs, "closure": judged}
        return (*args[:position], judged, *args[position + 1 :]), kwargs

    def _judging(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The user's closure, then the verdict: gradients exist only after the backward inside it."""
        calls = 0

        def judged() -> Any:
            nonlocal calls
            calls += 1
            loss = closure()
            if calls == 1:  # LBFGS calls it again within the step; the first is the step's own gradient
                self._judge(loss.detach() if isinstance(loss, Tensor) else loss)
            elif self.skipped:
                self.skip()
            return loss

        return judged

    def _judge(self, loss: Any) -> None:
        self.skipped = False
        self.judged += 1
        with torch.no_grad():
            self._listener.before_step(self, loss)

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.training is not None:
            self.training.settle()
        self.restore()
        self._give_back_found_inf()
        with torch.no_grad():
            self._listener.after_step(self)
        self.step += 1


def untraced(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook, left out of the graph where ``optimizer.step`` is compiled.

    The decorator that torch puts on its own optimizers; unlike ``torch.compiler.disable`` it imports the compiler only
    when it is called.
    """
    disable: Callable[..., Any] | None = getattr(torch, "_disable_dynamo", None)

    def plain(*arguments: Any) -> Any:  # the mark is an attribute, which a bound method can't have
        return hook(*arguments)

    return plain if disable is None else cast(Callable[..., Any], disable(plain))


def is_watched(optimizer: Optimizer) -> bool:
    """Whether some source has its hooks on this optimizer."""
    return optimizer in _watched
