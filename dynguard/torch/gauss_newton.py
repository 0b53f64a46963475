"""The diagonal of the Gauss-Newton matrix, from one gradient whose labels the model itself has drawn.

The Gauss-Newton matrix of ``sum_j a_j l(f_j, y_j)`` is ``sum_j a_j J_j^T H_j J_j`` with ``J_j`` the derivative of the
model's output ``f_j`` by the weights and ``H_j`` the second derivative of the loss by that output. For a loss that is
the negative log-likelihood of a distribution ``p(. | f)``, a label drawn from it has ``E[s_j s_j^T] = H_j`` and
``E[s_j] = 0`` with ``s_j = dl(f_j, y^_j) / df``, so that the gradient ``sum_j sqrt(a_j) J_j^T s_j`` has an expected
square that is the diagonal, exactly (Sophia's Gauss-Newton-Bartlett estimator, Liu et al. 2023, arXiv:2305.14342,
section 2.3, and A-GNB of HELENE, Zhao et al. 2024, arXiv:2411.10696). For a plain mean over B terms, ``a_j = 1 / B``,
it is their ``B * g * g``. The weights ``a_j`` are put in where the loss is differentiated, so that losses that are
scaled, masked, weighted or added up by the caller have the right ones too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from dynguard.torch.probe import Probe, ProbeError
from dynguard.torch.statistics import wide

LEAST = 4  # rows of a batch that is taken in part


class SampledLabels(TorchFunctionMode):
    """Within this mode losses see labels drawn from the model's own prediction, and gradients that square to curvature.

    It stands in for ``cross_entropy`` and ``nll_loss`` (a class from the softmax over the class dimension; positions
    at ``ignore_index`` stay ignored; class probabilities as targets become one drawn class),
    ``binary_cross_entropy(_with_logits)`` (Bernoulli) and ``mse_loss`` (the prediction plus N(0, 1/2)) of
    ``torch.nn.functional``, and so for the modules that call them. Weights (``weight``, ``pos_weight``) count as they
    do in the second derivative, with the true label; label smoothing leaves the second derivative as it is.
    Predictions that need no gradient, losses of any other kind and what is compiled or scripted are left alone.

    What else is in the total loss (penalties, other losses) enters the gradient as it is, hence with its square.
    The *value* of a loss in here is that of the drawn labels. A loss taken with a negative factor counts as positive.

    Args:
        seed: of the drawn labels; the global random states are not touched.

    Attributes:
        calls: losses that were stood in for.
        terms: label terms in them.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.seed = seed
        self.calls = 0
        self.terms = 0
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Stand in for a loss; everything else runs as it is."""
        kind = _KINDS.get(func) if getattr(func, "__name__", "") in _NAMES else None
        if kind is None:
            return func(*args, **(kwargs or {}))
        bound = inspect.signature(func).bind(*args, **(kwargs or {}))
        bound.apply_defaults()
        given = bound.arguments
        if not (isinstance(given["input"], Tensor) and given["input"].requires_grad):
            return func(*args, **(kwargs or {}))
        terms, weights, normalizer = kind(given, self._generator(given["input"].device))
        reduction = _reduction(given)
        if reduction == "mean":
            weights = weights / normalizer
        self.calls += 1
        self.terms += terms.numel()
        value = (terms * weights).detach()
        rooted: Callable[..., Tensor] = _Rooted.apply
        return rooted(terms, weights, value if reduction == "none" else value.sum())

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self.seed)
        return self._generators[device]


class _Rooted(torch.autograd.Function):
    """A weighted sum (or the weighted terms) whose terms get the root of their weight as gradient."""

    @staticmethod
    def forward(ctx: Any, terms: Tensor, weights: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(weights)
        ctx.kind = terms.dtype
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (weights,) = ctx.saved_tensors
        return (gradients[0] * weights).abs().sqrt().to(ctx.kind), None, None


Given = Mapping[str, Any]
Terms = tuple[Tensor, Tensor, Any]  # terms at drawn labels, weight of each, and what a mean divides by


def _classes(given: Given, generator: torch.Generator) -> Terms:
    logits, target, smoothing = given["input"], given["target"], given["label_smoothing"]
    dim, classes = _class_dim(logits), logits.shape[_class_dim(logits)]
    log_p = F.log_softmax(logits, dim)
    per_class = given["weight"] if given["weight"] is not None else logits.new_ones(classes)
    terms = _draw(log_p, dim, generator)
    if target.is_floating_point():
        smoothed = target * (1 - smoothing) + smoothing / classes
        weights = torch.tensordot(smoothed.movedim(dim, -1), per_class.to(smoothed.dtype), dims=1)
        return terms, weights, terms.numel()  # the mean over rows, whatever the weights
    kept = target != given["ignore_index"]
    own = per_class[torch.where(kept, target, torch.zeros_like(target))] * kept
    weights = own * (1 - smoothing) + per_class.sum() * (smoothing / classes) * kept
    return terms, weights, own.sum()


def _log_likelihoods(given: Given, generator: torch.Generator) -> Terms:
    log_p, target = given["input"], given["target"]
    classes = log_p.shape[_class_dim(log_p)]
    per_class = given["weight"] if given["weight"] is not None else log_p.new_ones(classes)
    terms = _draw(log_p, _class_dim(log_p), generator)
    kept = target != given["ignore_index"]
    weights = per_class[torch.where(kept, target, torch.zeros_like(target))] * kept
    return terms, weights, weights.sum()


def _class_dim(scores: Tensor) -> int:
    return 1 if scores.ndim > 1 else 0


def _draw(log_p: Tensor, dim: int, generator: torch.Generator) -> Tensor:
    """-log p of classes drawn along ``dim`` (the first arrivals of independent Poisson processes)."""
    with torch.no_grad():
        waits = torch.empty_like(log_p, dtype=torch.float32).exponential_(generator=generator)
        drawn = (log_p.to(torch.float32) - waits.log_()).argmax(dim, keepdim=True)
    return -log_p.gather(dim, drawn).squeeze(dim)


def _logits(given: Given, generator: torch.Generator) -> Terms:
    logits, target = given["input"], given["target"]
    drawn = _bernoulli(torch.sigmoid(logits.detach()), generator)
    weights = torch.ones_like(logits, requires_grad=False)
    if given["pos_weight"] is not None:  # the second derivative is (pos_weight y + 1 - y) p (1 - p)
        weights = 1 + (given["pos_weight"] - 1) * target
    if given["weight"] is not None:
        weights = weights * given["weight"]
    terms = F.binary_cross_entropy_with_logits(logits, drawn, reduction="none")
    return terms, weights.expand_as(terms), terms.numel()


def _probabilities(given: Given, generator: torch.Generator) -> Terms:
    p = given["input"]
    drawn = _bernoulli(p.detach(), generator)
    terms = F.binary_cross_entropy(p, drawn, reduction="none")
    weights = torch.ones_like(terms, requires_grad=False) if given["weight"] is None else given["weight"]
    return terms, weights.expand_as(terms), terms.numel()


def _bernoulli(p: Tensor, generator: torch.Generator) -> Tensor:
    wide = torch.rand(p.shape, generator=generator, device=p.device, dtype=torch.float32)
    return (wide < p).to(p.dtype)


def _squares(given: Given, generator: torch.Generator) -> Terms:
    shape = torch.broadcast_shapes(given["input"].shape, given["target"].shape)  # type: ignore[no-untyped-call] # torch leaves it untyped
    prediction = given["input"].expand(shape)
    noise = torch.empty_like(prediction, requires_grad=False, memory_format=torch.contiguous_format)
    noise.normal_(0.0, 0.5**0.5, generator=generator)
    terms = (prediction - (prediction.detach() + noise)) ** 2
    weight = given.get("weight")
    if weight is None:
        return terms, torch.ones_like(terms, requires_grad=False), terms.numel()
    return terms, weight.expand_as(terms), weight.sum()


_KINDS: dict[Any, Callable[[Given, torch.Generator], Terms]] = {
    F.cross_entropy: _classes,
    F.nll_loss: _log_likelihoods,
    F.binary_cross_entropy_with_logits: _logits,
    F.binary_cross_entropy: _probabilities,
    F.mse_loss: _squares,
}
_NAMES = {getattr(function, "__name__", "") for function in _KINDS}


def _reduction(given: Given) -> str:
    """Also from the two old arguments, which come first where they are given."""
    size_average, reduce = given.get("size_average"), given.get("reduce")
    if size_average is None and reduce is None:
        return str(given["reduction"])
    if reduce is False:
        return "none"
    return "sum" if size_average is False else "mean"


def roots(probe: Probe, seed: int = 0) -> list[Tensor]:
    """A gradient whose square is one unbiased draw of the diagonal of the Gauss-Newton matrix.

    Args:
        probe: of the loss on a batch; costs one forward and one backward.
        seed: of the drawn labels; another seed, another draw.

    Returns:
        One tensor for each of ``probe.parameters``, in its shape and dtype.

    Raises:
        ProbeError: the loss can't be evaluated, or calls none of the losses whose labels can be drawn.
    """
    labels = SampledLabels(seed)
    gradients = probe.gradients(within=labels)
    if not labels.calls:
        raise ProbeError("loss_fn calls none of the losses whose labels can be drawn (cross entropy, binary, squared)")
    return gradients


def diagonal(probe: Probe, seed: int = 0) -> list[Tensor]:
    """The squares of :func:`roots`, float32 or wider, of loss per squared weight."""
    return [widened(g).square() for g in roots(probe, seed)]


def widened(tensor: Tensor) -> Tensor:
    """In float64 if it is, else in float32."""
    return tensor.to(wide(tensor.dtype))


def part(batch: Any, share: float) -> Any:
    """The first rows of a batch, or the batch itself where rows can't be told.

    Args:
        batch: a tensor, or a nest of lists, tuples and dicts of tensors (and of numbers, which stay).
        share: of the rows, in (0, 1].

    Returns:
        ``batch`` as it is unless all its tensors have the same first dimension, of at least 4 rows.
    """
    leaves, tree = tree_flatten(batch)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if share >= 1 or not tensors or not all(_has_rows(t) for t in tensors):
        return batch
    rows = {t.shape[0] for t in tensors}
    if len(rows) != 1 or min(rows) < LEAST or not all(_is_plain(leaf) for leaf in leaves):
        return batch
    count = max(2, round(share * rows.pop()))  # one row has no batch statistics
    return tree_unflatten([leaf[:count] if isinstance(leaf, Tensor) else leaf for leaf in leaves], tree)


def _has_rows(tensor: Tensor) -> bool:
    return tensor.ndim > 0 and tensor.layout is torch.strided and not tensor.is_nested


def _is_plain(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, (Tensor, bool, int, float))


def mean_over_ranks(values: Sequence[Tensor], *, known: bool) -> bool:
    """Replace tensors by their means over the ranks that know theirs, in place; whether any did.

    Every rank must call it, with tensors of the same shapes. Reads the host.
    """
    device = values[0].device if values else torch.device("cpu")
    count = torch.full((), float(known), device=device)
    torch.distributed.all_reduce(count)
    for value in values:
        if not known:
            value.zero_()
        torch.distributed.all_reduce(value)
        value.div_(count.clamp_min(1.0).to(value.device))
    return bool(count.item() > 0)
