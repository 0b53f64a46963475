"""Collapse of what modules put out: how far a batch's outputs lie apart, sampled by forward hooks."""

from __future__ import annotations

import fnmatch
import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from dynguard import Action, Evidence, Finding, Severity
from dynguard.torch.distributed import is_sharded
from dynguard.torch.module_hooks import ModuleHook, no_training_forward
from dynguard.torch.probe import alone

if TYPE_CHECKING:
    from dynguard.events import GradientEvent

log = logging.getLogger(__name__)
REPRESENTATIONS = (
    "projector", "projection", "projection_head", "encoder", "*_encoder", "tower", "*_tower", "embedding_head",
)  # fmt: skip
ROWS, COLUMNS = 128, 128
PLACES = 8
EARLY = 3  # the first forwards are all sampled; the reference is the EARLY-th largest sample, so that no outlier is
KEPT = 120
STEADY = 3  # samples in a row
LOSSES = 32


def spread(output: Tensor, inputs: Tensor | None) -> Tensor:
    """Of a batch of outputs: variance, squared mean, participation ratio, whether the inputs differ, and directions.

    Args:
        output: (batch, ..., d); with two or more spatial dimensions (batch, d, ...), over which is averaged.
        inputs: (batch, ...) what they were made of, or None.

    Returns:
        (5,) float32: total variance over the sampled rows, squared norm of their mean, participation ratio
        tr(C)^2 / tr(C^2) of their covariance C, 1 where not all inputs are alike, and the total variance of the
        normalised rows.
    """
    x = _few(output).float()
    mean, directions = x.mean(0), torch.nn.functional.normalize(x, dim=1)
    x = x - mean
    variance = x.square().sum(1).mean()
    gram = (x.T @ x if x.shape[1] <= x.shape[0] else x @ x.T) / x.shape[0]
    ratio = variance.square() / gram.square().sum().clamp_min(1e-38)
    differ = torch.ones_like(variance)
    if inputs is not None and inputs.ndim and inputs.shape[0] > 1:
        some = inputs[:ROWS].reshape(min(inputs.shape[0], ROWS), -1)[:, :COLUMNS]
        differ = (some[1:] != some[:1]).any().to(variance)
    turned = (directions - directions.mean(0)).square().sum(1).mean()
    return torch.stack([variance, mean.square().sum(), ratio, differ, turned])


def _few(output: Tensor) -> Tensor:
    """(<= 128, <= 128) of the outputs, evenly spaced."""
    x = output.detach()
    x = x.flatten(2).mean(-1) if x.ndim >= 4 else x.reshape(-1, x.shape[-1])
    return x[:: -(-x.shape[0] // ROWS), :: -(-x.shape[1] // COLUMNS)]


def looks_away(module: nn.Module) -> bool:
    """Whether a forward is no training forward of the user's: evaluation, tracing, a probe, a recomputation, vmap."""
    return not module.training or no_training_forward()


@dataclass(slots=True)
class Place:
    """One module under watch."""

    calls: int = 0
    samples: list[tuple[int, Any]] = field(default_factory=list)  # (step, (5,))
    told: bool = False

    def read(self) -> list[tuple[int, list[float]]]:
        """The finite samples of batches whose inputs differ, as numbers."""
        self.samples = [(s, v.tolist() if isinstance(v, Tensor) else v) for s, v in self.samples]
        return [(s, v) for s, v in self.samples if np.isfinite(v).all() and v[3]]


class Outputs:
    """Samples one in ``every`` training forwards of the modules that make representations.

    Watched are the last module with parameters of each model, and those whose own name matches ``patterns``.
    """

    def __init__(self, every: int, patterns: Sequence[str], share: float) -> None:
        self.every = every
        self.patterns = tuple(patterns)
        self.share = share
        self.places: dict[str, Place] = {}
        self._handles: list[Any] = []
        self._model: int | None = None
        self._inputs: Tensor | None = None
        self._step = 0
        self._first: list[Any] = []
        self._last: deque[Any] = deque(maxlen=LOSSES)

    def watch(self, event: GradientEvent) -> None:
        """Take note of the loss, and put the hooks on at the first event of a model."""
        self._step = event.step
        if event.loss is not None:
            self._last.append(event.loss)
            if len(self._first) < LOSSES:
                self._first.append(event.loss)
        model = event.training.model if event.training is not None else None
        if model is None or id(model) == self._model:
            return
        self.detach()
        self._model = id(model)
        for root in roots(model).values():
            self._handles.append(root.register_forward_pre_hook(ModuleHook(self._entered)))
        for name, module in representations(model, self.patterns):
            hook = ModuleHook(self._hook(self.places.setdefault(name, Place())))
            self._handles.append(module.register_forward_hook(hook))

    def detach(self) -> None:
        """Take all hooks off."""
        self.detach_hooks()
        self._model = None

    def detach_hooks(self) -> None:
        """Take them off and leave this model alone."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._inputs = [], None

    def _entered(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._inputs = args[0].detach() if args and isinstance(args[0], Tensor) else None

    def _hook(self, place: Place) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if looks_away(module):
                self._inputs = None
                return
            calls, place.calls = place.calls, place.calls + 1
            inputs, self._inputs = self._inputs, None
            if calls >= EARLY and calls % self.every:
                return
            made = output[0] if isinstance(output, tuple | list) and output else output
            if not isinstance(made, Tensor) or not made.is_floating_point() or is_sharded(made) or not _several(made):
                return
            if inputs is None and args and isinstance(args[0], Tensor):
                inputs = args[0]
            try:
                with torch.no_grad(), torch.autocast(made.device.type, enabled=False):
                    self._keep(place, spread(made, inputs))
            except Exception as error:  # noqa: BLE001 - this runs within the user's forward, which must go on
                log.warning("collapse: the outputs of a %s can't be sampled: %s", type(module).__name__, error)
                self.detach_hooks()

        return hook

    def _keep(self, place: Place, values: Tensor) -> None:
        place.samples.append((self._step, values))
        if len(place.samples) > KEPT:  # every second one of those between the early and the newest
            place.samples = [*place.samples[:EARLY], *place.samples[EARLY:-STEADY:2], *place.samples[-STEADY:]]

    def findings(self) -> Iterator[Finding]:
        """Modules whose outputs have become one point: WARNING where the loss is pinned with them, else INFO."""
        losses = self._losses()
        for name, place in self.places.items():
            samples = place.read()
            if place.told or len(samples) < EARLY + STEADY:
                continue
            pinned = _pinned(*losses)
            apart, relative, turned = (_fallen(x) for x in _series(samples))
            point = max(apart[2], relative[2]) < self.share
            if pinned is False or not (point or (pinned and turned[2] < self.share)):
                continue
            place.told = pinned is True
            yield _tell(name, samples, apart if point else turned, relative, losses[1], point=point)

    def _losses(self) -> tuple[list[float], list[float]]:
        self._first = [float(x) for x in self._first]
        self._last = deque([float(x) for x in self._last], maxlen=LOSSES)
        return self._first, list(self._last)

    def state_dict(self) -> dict[str, Any]:
        """Samples and losses as numbers."""
        first, last = self._losses()
        for place in self.places.values():
            place.read()
        places = {
            name: {"calls": p.calls, "samples": [[s, v] for s, v in p.samples], "told": p.told}
            for name, p in self.places.items()
        }
        return {"places": places, "first": first, "last": last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up ``state_dict()``; hooks that are on already go on with it."""
        for name, saved in state["places"].items():
            place = self.places.setdefault(name, Place())
            place.calls, place.told = saved["calls"], saved["told"]
            place.samples = [(step, values) for step, values in saved["samples"]]
        self._first, self._last = list(state["first"]), deque(state["last"], maxlen=LOSSES)


def _series(samples: list[tuple[int, list[float]]]) -> tuple[list[float], list[float], list[float]]:
    """Spread, spread over the outputs' size, and spread of their directions, by sample."""
    spreads = [v[0] ** 0.5 for _, v in samples]
    relative = [(v[0] / max(v[0] + v[1], 1e-300)) ** 0.5 for _, v in samples]
    return spreads, relative, [v[4] ** 0.5 for _, v in samples]


def _fallen(values: list[float]) -> tuple[float, float, float]:
    """(the newest, the reference, the largest of the newest three over it) of a series."""
    before = sorted(values[:-STEADY])[-EARLY]
    return values[-1], before, max(values[-STEADY:]) / before if before > 0 else 1.0


def _several(output: Tensor) -> bool:
    if output.ndim < 2 or not output.numel():
        return False
    width = output.shape[1] if output.ndim >= 4 else output.shape[-1]
    return width > 1 and output.numel() // width > 1


def roots(model: Any) -> dict[str, nn.Module]:
    """The models by the prefix of their modules' names, taken out of wrappers; compiled ones are left out."""
    several = (
        model.items() if isinstance(model, Mapping) else enumerate(model) if isinstance(model, list | tuple) else []
    )
    named = {"": model} if isinstance(model, nn.Module) else {f"{key}.": m for key, m in several}
    found = {prefix: alone(m) for prefix, m in named.items() if isinstance(m, nn.Module)}
    return {
        prefix: m
        for prefix, m in found.items()
        if isinstance(m, nn.Module) and not any(getattr(x, "_compiled_call_impl", None) for x in m.modules())
    }


def representations(model: Any, patterns: Sequence[str]) -> list[tuple[str, nn.Module]]:
    """(name, module) of the modules to watch, at most 8."""
    found: dict[str, nn.Module] = {}
    for prefix, root in roots(model).items():
        last = None
        for name, module in root.named_modules():
            if any(p.requires_grad for p in module.parameters(recurse=False)):
                last = name, module
            if name and any(fnmatch.fnmatchcase(x, p) for p in patterns for x in (name, name.rpartition(".")[2])):
                found[prefix + name] = module
        if last is not None:
            found[prefix + last[0]] = last[1]
    return list(found.items())[-PLACES:]


def _pinned(first: list[float], last: list[float]) -> bool | None:
    """Whether the loss has stopped answering to its batches, without having gone to zero; None where it is not known.

    With all outputs alike, a loss between outputs is the same whatever the batch. One that targets are compared with
    goes on varying with them, and one that is solved is near 0.
    """
    early, late = (np.asarray([x for x in found if np.isfinite(x)]) for found in (first, last))
    if len(late) < 10 or len(early) < 10:
        return None
    level = float(np.abs(np.median(late)))
    if level < 0.01 * float(np.abs(np.median(early[:5]))):
        return False
    late_jitter, early_jitter = (_jitter(x) for x in (late, early))
    return bool(late_jitter < 0.001 or (late_jitter < 0.1 * early_jitter and late_jitter < 0.05))


def _jitter(losses: npt.NDArray[np.float64]) -> float:
    """How much a loss varies from batch to batch, over its level; second differences leave a trend out."""
    level = float(np.abs(np.median(losses)))
    return float(np.median(np.abs(np.diff(losses, 2))) / max(level, 1e-300))


def _tell(
    name: str,
    samples: list[tuple[int, list[float]]],
    apart: tuple[float, float, float],
    relative: tuple[float, float, float],
    losses: list[float],
    *,
    point: bool,
) -> Finding:
    pinned = float(np.median(losses)) if losses else None
    stuck = "" if pinned is None else f", and the loss stands at {pinned:.4g} whatever the batch"
    what = "point: their spread" if point else "direction: the spread of their directions"
    return Finding(
        kind="embedding_collapse",
        severity=Severity.INFO if pinned is None else Severity.WARNING,
        step=samples[-1][0],
        subject=name,
        action=Action.WARN,
        premise=f"the outputs of {name!r} have become one {what} over a batch has fallen from {apart[1]:.4g} to "
        f"{apart[0]:.4g}, {apart[0] / apart[1]:.2%} of it{stuck}",
        implies="different inputs give the same output: the loss has a trivial solution, and the model has found it",
        expected_effect="semi-hard instead of hardest negatives, a soft margin, normalised outputs, a stop-gradient or "
        "a variance term take the trivial solution away; start again from before the collapse",
        evidence=(
            Evidence(name="what", value="point" if point else "direction"),
            Evidence(name="spread", value=apart[0]),
            Evidence(name="spread_before", value=apart[1]),
            Evidence(name="relative_spread", value=relative[0]),
            Evidence(name="relative_spread_before", value=relative[1]),
            Evidence(name="participation_ratio", value=samples[-1][1][2]),
            Evidence(name="participation_ratio_at_start", value=samples[0][1][2]),
            Evidence(name="loss", value=pinned),
            Evidence(name="samples", value=len(samples)),
        ),
    )
