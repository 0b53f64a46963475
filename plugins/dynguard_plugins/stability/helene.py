"""``helene``: bounds every entry of a gradient by the local curvature of its layer."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from dynguard import Action, Section, Table, hookimpl, validated
from dynguard_plugins.stability.helene_curvature import Curvature
from dynguard_plugins.stability.helene_limits import Limits

if TYPE_CHECKING:
    from dynguard.actions import Intervention
    from dynguard.events import GradientEvent

ROWS = 20  # of the table in the summary


class Watched:
    """What is known about one source."""

    def __init__(self, curvature: Curvature, limits: Limits) -> None:
        self.curvature = curvature
        self.limits = limits
        self.steps = 0
        self.since: int | None = None  # steps since the last estimate
        self.names: tuple[str, ...] = ()
        self.before = {"sampled": 0, "fallbacks": 0}  # estimates before the run was resumed
        self.left_alone: set[str] = set()


class Helene:
    """Layer-wise clipping by curvature: ``|g| <= base_clip * max(h, floor)`` for every entry of a gradient.

    h is a running mean of the diagonal of the Gauss-Newton matrix of the loss, estimated every ``every`` steps at the
    present weights from the first rows of the newest observed batch, with labels that the model itself draws
    (:mod:`dynguard.torch.gauss_newton`; cross entropy, binary and squared losses that ``loss_fn`` calls). Where the
    labels can't be drawn (no ``loss_fn``, no batch, another loss, parameters in shards) the squared gradients of the
    step itself stand in, the diagonal of the empirical Fisher matrix up to a factor; that is logged and in the summary.

    *Units.* h is loss per squared weight, so ``g / h`` and ``base_clip`` are in units of the weights: the longest way
    that a Newton step ``g / max(h, floor)`` could take an entry. By default it is ``multiple`` times what is usual in
    the layer: the RMS of ``|g| / max(h, floor)``, a running mean over accepted steps. By Chebyshev's inequality at
    most ``1 / multiple^2`` = 4 % of the entries of a step with the usual RMS are above that, whatever their
    distribution; of a small transformer's clean run 0.06 % were (0.4 % in its worst layer).

    *Not the papers' method.* HELENE (Zhao et al. 2024, arXiv:2411.10696) is a zeroth-order optimizer that divides an
    annealed momentum by the Hessian's diagonal clipped from below, layer by layer; Sophia (Liu et al. 2023,
    arXiv:2305.14342) clips the preconditioned step. This guard takes their estimator and the lower bound by layer, and
    bounds the *gradient* before the user's own optimizer. None of their results is claimed for it. A guard runs after
    the detectors, which see gradients as they came.

    An entry that is clipped keeps its sign. h of a step with a gradient that is not finite is not estimated, and a
    single batch can't move h or the level far. Sparse and complex gradients are left alone. Limits last until the next
    estimate; in a resumed run h is estimated anew at its first step (it is as large as the model, so it isn't saved),
    what is usual in each layer is taken up.

    Cost a step: ``(forward + backward of share * batch + 5 passes over the weights) / every``, one clamp of the
    gradients between stored limits (four streams of memory, no host read) and 256 entries per layer. Memory: h in
    float32 and two limits in the gradients' dtype. The host is read at estimates only.

    Args:
        base_clip: in units of weights, or ``auto``.
        multiple: of auto; entries may be this many times the layer's usual RMS.
        warmup: of auto; accepted steps before anything is clipped.
        floor_ratio: the floor of a layer, as a share of the mean of its h.
        every: steps between two estimates.
        decay: of the mean of h, per estimate.
        share: of the rows of a batch that an estimate is made on, where rows can be told (all tensors of the batch
            have the same first dimension, of at least 4). Of a loss that is a sum h is then that of the part.
        exclude: patterns of parameter names to leave alone.
    """

    @validated
    def __init__(
        self,
        *,
        base_clip: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto",
        multiple: Annotated[float, Field(gt=1)] = 5.0,
        warmup: Annotated[int, Field(ge=1)] = 10,
        floor_ratio: Annotated[float, Field(gt=0)] = 1.0,
        every: Annotated[int, Field(ge=1)] = 10,
        decay: Annotated[float, Field(ge=0, lt=1)] = 0.99,
        share: Annotated[float, Field(gt=0, le=1)] = 0.5,
        exclude: tuple[str, ...] = (),
    ) -> None:
        self.base_clip, self.multiple, self.warmup, self.floor_ratio = base_clip, multiple, warmup, floor_ratio
        self.every, self.decay, self.share, self.exclude = every, decay, share, exclude
        self._watched: dict[str, Watched] = {}

    @hookimpl
    def adjust_gradients(self, event: GradientEvent) -> None:
        """Estimate the curvature when due, then clip."""
        if event.training is None:
            return
        watched = self._of(event.source)
        watched.names = event.names
        limits, curvature = watched.limits, watched.curvature
        limits.settle(event)
        chosen = [i for i in range(len(event.names)) if self._clips(watched, event, i)]
        if not chosen:
            return
        fresh = self._estimate(watched, event, chosen)
        watched.steps += 1
        if fresh or watched.steps <= self.warmup + self.every or not limits.ready(chosen, curvature):
            limits.refresh(event, chosen, curvature, self.floor_ratio)
        limits.observe(event, chosen, curvature, self.floor_ratio)
        limits.clip(event, chosen)

    def _estimate(self, watched: Watched, event: GradientEvent, chosen: list[int]) -> bool:
        if watched.since is not None and watched.since + 1 < self.every:
            watched.since += 1
            return False
        if not bool(event.global_norm < float("inf")):
            return False  # due again at the next step
        watched.since = 0
        watched.curvature.estimate(event, chosen)
        return True

    def _clips(self, watched: Watched, event: GradientEvent, index: int) -> bool:
        gradient = event.gradients[index]
        if gradient is None or not event.parameters[index].requires_grad:
            return False
        name = event.names[index]
        if any(fnmatchcase(name, pattern) for pattern in self.exclude):
            return False
        if _is_plain(gradient):
            return True
        watched.left_alone.add(name)
        return False

    @hookimpl
    def on_intervention(self, intervention: Intervention) -> None:
        """A step that is undone is not learned from."""
        if intervention.action is Action.ROLLBACK:
            self._of(intervention.source).limits.forget()

    def _of(self, source: str) -> Watched:
        watched = self._watched.get(source)
        if watched is None:
            base = None if self.base_clip == "auto" else float(self.base_clip)
            limits = Limits(base, self.multiple, self.warmup)
            watched = self._watched[source] = Watched(Curvature(self.decay, self.share), limits)
        return watched

    @hookimpl
    def summarize(self) -> Section | None:
        """How much was clipped in each layer, in what units, and where the curvature came from."""
        used = {source: w for source, w in self._watched.items() if w.steps}
        if not used:
            return None
        rule = f"{self.multiple:g} times the usual" if self.base_clip == "auto" else f"{self.base_clip:g}"
        text = [
            f"Entries are bounded to base_clip x max(h, floor); base_clip: {rule}; floor: {self.floor_ratio:g} of the "
            "layer's mean h. Shares are of the entries that were looked at, 256 per layer and step."
        ]
        text += [line for source, w in used.items() for line in _sources(source, w)]
        rows = sorted(
            (row for source, w in used.items() for row in _rows(source, w, self.floor_ratio)), key=lambda r: -r[2]
        )[:ROWS]
        columns = ("source", "layer", "share clipped", "floor", "base_clip")
        return Section(
            title="Clipping by curvature", text=" ".join(text), tables=(Table(columns=columns, rows=tuple(rows)),)
        )

    def state_dict(self) -> dict[str, Any]:
        """Numbers by layer, and counts; h is estimated anew."""
        return {
            source: {
                "names": list(w.names), "steps": w.steps, "limits": w.limits.state_dict(), "why": w.curvature.why,
                "sampled": w.before["sampled"] + w.curvature.sampled,
                "fallbacks": w.before["fallbacks"] + w.curvature.fallbacks,
                "left_alone": sorted(w.left_alone),
            }
            for source, w in self._watched.items()
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up ``state_dict()``."""
        self._watched = {}
        for source, saved in state.items():
            watched = self._of(source)
            watched.names, watched.steps = tuple(saved["names"]), saved["steps"]
            watched.before = {name: saved[name] for name in watched.before}
            watched.left_alone, watched.curvature.why = set(saved["left_alone"]), saved["why"]
            watched.limits.load_state_dict(saved["limits"])


def _is_plain(gradient: Any) -> bool:
    import torch

    return bool(gradient.layout is torch.strided and gradient.is_floating_point() and gradient.numel())


def _sources(source: str, watched: Watched) -> list[str]:
    of = f" of {source}" if source else ""
    sampled = watched.before["sampled"] + watched.curvature.sampled
    fallbacks = watched.before["fallbacks"] + watched.curvature.fallbacks
    lines = [f"Estimates{of}: {sampled} by sampled labels, {fallbacks} by the step's own squared gradients."]
    if fallbacks:
        lines.append(f"Labels could not be drawn: {watched.curvature.why}.")
    if watched.left_alone:
        lines.append(f"Left alone (sparse or complex gradients): {', '.join(sorted(watched.left_alone)[:5])}.")
    return lines


def _rows(source: str, watched: Watched, floor_ratio: float) -> list[tuple[str, str, float, float, float]]:
    limits, means = watched.limits, watched.curvature.means
    if limits.level is None:
        return []
    numbers = zip(watched.names, limits.clipped.tolist(), limits.seen.tolist(), limits.base().tolist(), strict=False)
    return [
        (source, name, round(clipped / seen, 6), floor_ratio * means.get(i, 0.0), base)
        for i, (name, clipped, seen, base) in enumerate(numbers)
        if seen
    ]
