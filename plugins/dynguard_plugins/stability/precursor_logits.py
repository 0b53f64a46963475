"""How large the logits are: of the output, and of attention, sampled by forward hooks."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dynguard import Action, Evidence, Finding, Severity
from dynguard.bus import FAILURES
from dynguard_plugins.stability.precursor_places import Place, places

if TYPE_CHECKING:
    from dynguard.events import GradientEvent

log = logging.getLogger("dynguard")

SAMPLES = 40
LEAST = 8
SATURATED = 50.0  # nats: a softmax over logits this far apart is one-hot, and its gradient is gone
GROWN = 2.0  # over the samples that are kept
SEQUENCES, POSITIONS = 4, 64  # of a forward pass that attention logits are computed for
BALANCED = 0.05  # a softmax's gradient sums to zero over the classes; up to rounding, beside its norm


class Logits:
    """Samples of the largest logit by place: of the output, and of attention.

    Attention logits q k / sqrt(d) are computed by head for up to 4 sequences and 64 positions of a forward pass, masks
    and rotary embeddings aside, from the outputs of query and key projections (separate, or fused as q, k, v) or of
    their normalisation, and from the inputs of ``nn.MultiheadAttention``; cosine attention by a function call is not
    seen. Dehghani et al. 2023 (arXiv 2302.05442, section 2) and Wortsman et al. 2023 (arXiv 2309.14322, section 3.1)
    saw such logits grow before divergence. The last linear layer counts as output; its growth is told only where the
    gradient of its weight sums to zero over the classes, as that of a softmax does: a regression's outputs may grow as
    they like.

    A hook looks at one in ``every`` forward passes of training and keeps a 0-d tensor on the device; nothing is read
    until ``diagnose``. Compiled models get no hooks. While there are hooks, torch's fused inference path of
    ``nn.TransformerEncoderLayer`` is not taken.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._handles: list[Any] = []
        self._calls: dict[str, int] = {}
        self._sampled: dict[str, deque[tuple[int, Any]]] = {}
        self._queries: dict[str, Any] = {}
        self._told: set[str] = set()
        self._failed: set[str] = set()
        self._step = 0
        self._model: int | None = None
        self._head: tuple[str, Any] | None = None
        self._balance: deque[Any] = deque(maxlen=3)

    def watch(self, event: GradientEvent) -> None:
        """Put the hooks on, once per model; now and then look whether the output's gradient is a softmax's."""
        self._step = event.step
        model = event.training.model if event.training is not None else None
        if model is None:
            return
        if id(model) != self._model:
            self.detach()
            self._model = id(model)
            for place in places(model):
                self._put_on(place)
        if self._head is not None and event.step % self.every == 0:
            self._look_at_balance(event, self._head[1])

    def _put_on(self, place: Place) -> None:
        from dynguard.torch.module_hooks import ModuleHook

        if place.kind == "whole":
            hook = self._guarded(place, self._whole)
            self._handles.append(place.module.register_forward_pre_hook(ModuleHook(hook), with_kwargs=True))
            return
        look = {"head": self._output, "query": self._query, "key": self._key, "fused": self._fused}[place.kind]
        looked = ModuleHook(self._guarded(place, look))
        self._handles.append(place.module.register_forward_hook(looked, with_kwargs=True))
        if place.kind == "head":
            self._head = (place.name, place.module.weight)

    def detach(self) -> None:
        """Take them off."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._model, self._head, self._queries = [], None, None, {}

    def _guarded(self, place: Place, look: Callable[[Place, Any], None]) -> Any:
        """A hook that looks at one forward pass in so many, and whose failure is nobody's but its own."""
        import torch

        from dynguard.torch.module_hooks import no_training_forward

        def hook(module: Any, args: Any, kwargs: Any, output: Any = None) -> None:
            if not module.training or no_training_forward() or place.name in self._failed:
                return
            self._calls[place.name] = calls = self._calls.get(place.name, -1) + 1
            if calls % self.every:
                return
            try:
                with torch.no_grad():
                    look(place, (args, kwargs) if place.kind == "whole" else output)
            except FAILURES as error:  # whatever a stranger's module hands over, its forward pass goes on
                log.warning("precursor: the logits of %r can't be sampled: %s", place.name, error)
                self._failed.add(place.name)

        return hook

    def _output(self, place: Place, output: Any) -> None:
        if output.numel():
            self._keep(place.of, output.detach().abs().amax().float())

    def _query(self, place: Place, output: Any) -> None:
        self._queries[place.of] = some(output, place.width)

    def _key(self, place: Place, output: Any) -> None:
        if place.of in self._queries:
            self._attention(place, self._queries.pop(place.of), some(output, place.width))

    def _fused(self, place: Place, output: Any) -> None:
        q, k = output.chunk(3, dim=-1)[:2]
        self._attention(place, some(q, place.width), some(k, place.width))

    def _whole(self, place: Place, given: Any) -> None:
        """``nn.MultiheadAttention``: what its projections would make of a few of the inputs."""
        import torch.nn.functional as F

        module, (args, kwargs) = place.module, given
        query = args[0] if args else kwargs["query"]
        key = args[1] if len(args) > 1 else kwargs["key"]
        if query.ndim == 3 and not module.batch_first:
            query, key = query.transpose(0, 1), key.transpose(0, 1)
        width, bias = module.embed_dim, module.in_proj_bias
        if module.in_proj_weight is not None:
            of_query, of_key = module.in_proj_weight[:width], module.in_proj_weight[width : 2 * width]
        else:
            of_query, of_key = module.q_proj_weight, module.k_proj_weight
        q = F.linear(few(query), of_query, None if bias is None else bias[:width])
        k = F.linear(few(key), of_key, None if bias is None else bias[width : 2 * width])
        self._attention(place, some(q, place.width), some(k, place.width))

    def _attention(self, place: Place, q: Any, k: Any) -> None:
        """Keep the largest |q k| / sqrt(d) of (b, t, h, d) queries and keys; keys may be shared by several heads."""
        import torch

        if not q.numel() or not k.numel():
            return
        k = k[: q.shape[0]].repeat_interleave(max(q.shape[2] // k.shape[2], 1), dim=2)
        logits = torch.einsum("bqhd,bkhd->bhqk", q[: k.shape[0]], k)
        self._keep(place.of, logits.abs().amax() / math.sqrt(q.shape[-1]))

    def _keep(self, place: str, value: Any) -> None:
        self._sampled.setdefault(place, deque(maxlen=SAMPLES)).append((self._step, value))

    def _look_at_balance(self, event: GradientEvent, weight: Any) -> None:
        import torch

        index = next((i for i, p in enumerate(event.parameters) if p is weight), None)
        gradient = None if index is None else event.gradients[index]
        if gradient is None or gradient.layout is not torch.strided or gradient.ndim != 2:
            return
        if index in event.tables:  # tied to the embedding: a vocabulary, and the gradient is mixed
            self._balance.append(event.norms.new_zeros(()))
            return
        total = torch.linalg.vector_norm(gradient.detach().sum(0, dtype=torch.float32))
        self._balance.append(total / event.norms[index].clamp_min(1e-30))

    @property
    def softmax(self) -> bool:
        """Whether the output feeds a softmax, by its gradient. Reads the device."""
        seen = [float(b) for b in self._balance]
        return bool(seen) and max(seen) < BALANCED

    def samples(self) -> dict[str, list[tuple[int, float]]]:
        """(step, largest logit) by place. Reads the device."""
        read = {place: [(step, float(v)) for step, v in kept] for place, kept in self._sampled.items()}
        for place, pairs in read.items():
            self._sampled[place] = deque(pairs, maxlen=SAMPLES)
        return read

    def diagnose(self) -> Iterator[Finding]:
        """``logit_growth``: saturated, and growing over all samples that are kept."""
        for place, pairs in self.samples().items():
            finite = [(s, v) for s, v in pairs if math.isfinite(v) and v > 0]
            if place in self._told or len(finite) < LEAST or finite[-1][1] < SATURATED:
                continue
            slope, low, p = trend(finite)
            if low <= 0 or slope * (finite[-1][0] - finite[0][0]) < math.log(GROWN):
                continue
            if self._head is not None and place == self._head[0] and not self.softmax:
                continue
            self._told.add(place)
            yield _growing(place, finite, slope, p)

    def state_dict(self) -> dict[str, Any]:
        """The samples, read, and what was told."""
        return {
            "samples": {k: [list(p) for p in v] for k, v in self.samples().items()},
            "told": sorted(self._told),
            "balance": [float(b) for b in self._balance],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up ``state_dict()``."""
        self._sampled = {k: deque([(s, v) for s, v in pairs], maxlen=SAMPLES) for k, pairs in state["samples"].items()}
        self._told = set(state["told"])
        self._balance = deque(state.get("balance", ()), maxlen=3)


def _growing(place: str, pairs: Sequence[tuple[int, float]], slope: float, p: float) -> Finding:
    return Finding(
        kind="logit_growth",
        severity=Severity.WARNING,
        step=pairs[-1][0],
        subject=place,
        action=Action.WARN,
        premise=f"the logits of {place!r} reach {pairs[-1][1]:.4g} and double every {math.log(2) / slope:.0f} steps",
        implies="the softmax is all but one-hot: its gradient vanishes where it is right and is of full size where it "
        "is wrong, which precedes divergence",
        expected_effect="normalising queries and keys, a z-loss on the output, weight decay or a lower learning rate "
        "keep logits bounded",
        confidence=1.0 - p,
        evidence=(
            Evidence(name="largest_logit", value=pairs[-1][1]),
            Evidence(name="first_sample", value=pairs[0][1]),
            Evidence(name="doubling_steps", value=math.log(2) / slope),
        ),
    )


def few(x: Any) -> Any:
    """At most 4 sequences and 64 positions of (..., t, d): (b, t, d)."""
    x = x.detach()
    x = x.reshape(-1, *x.shape[-2:])[:SEQUENCES] if x.ndim > 2 else x[None]
    return x[:, :: max(-(-x.shape[1] // POSITIONS), 1)]


def some(output: Any, width: int) -> Any:
    """A few queries or keys by head: (b, t, h, d), in float32; one head where ``width`` is 0 or does not divide."""
    x = few(output).float()
    return x.unflatten(-1, (-1, width)) if width and x.shape[-1] % width == 0 else x.unsqueeze(-2)


def trend(pairs: Sequence[tuple[int, float]]) -> tuple[float, float, float]:
    """(slope, its lower 95 % bound, p) of the log value per step: Theil and Sen's, and Kendall's test of none."""
    from scipy.stats import kendalltau, theilslopes  # type: ignore[import-untyped]  # scipy ships no types

    logs, steps = [math.log(v) for _, v in pairs], [float(s) for s, _ in pairs]
    if min(logs) == max(logs) or steps[0] == steps[-1]:
        return 0.0, 0.0, 1.0
    found = theilslopes(logs, steps, 0.95)
    return float(found.slope), float(found.low_slope), float(kendalltau(steps, logs).pvalue)
