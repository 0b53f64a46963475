"""How large the logits are: of the output, and of attention, sampled by forward hooks."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dynguard import Action, Evidence, Finding, Severity

if TYPE_CHECKING:
    from dynguard.events import GradientEvent

QUERY = re.compile(r"(^|[._])(q|query|q_proj|wq|to_q|q_lin)$")
KEY = re.compile(r"(^|[._])(k|key|k_proj|wk|to_k|k_lin)$")
HEADS = ("num_heads", "n_head", "n_heads", "num_attention_heads", "heads")
SAMPLES = 40
LEAST = 8
SATURATED = 50.0  # nats: a softmax over logits this far apart is one-hot, and its gradient is gone
GROWN = 2.0  # over the samples that are kept


class Logits:
    """Samples of the largest logit by place: the head's output, and |q| |k| / sqrt(d) for attention.

    The product of the largest query and key norms bounds every attention logit (Dehghani et al. 2023, arXiv 2302.05442,
    section 2: logits beyond 50,000 before divergence; Wortsman et al. 2023, arXiv 2309.14322, section 3.1). Hooks are
    put on projections that are modules of their own; attention inside one fused module is not seen. A hook looks at
    one in ``every`` forward passes of training and keeps a 0-d tensor on the device; nothing is read until
    ``diagnose``.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._handles: list[Any] = []
        self._calls: dict[str, int] = {}
        self._sampled: dict[str, deque[tuple[int, Any]]] = {}
        self._queries: dict[str, Any] = {}
        self._told: set[str] = set()
        self._step = 0
        self._model: int | None = None

    def watch(self, event: GradientEvent) -> None:
        """Put the hooks on, once per model."""
        self._step = event.step
        model = event.training.model if event.training is not None else None
        if model is None or id(model) == self._model:
            return
        self.detach()
        self._model = id(model)
        for name, module, kind in places(model):
            self._handles.append(module.register_forward_hook(self._hook(name, kind, module)))

    def detach(self) -> None:
        """Take them off."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._model = [], None

    def _hook(self, name: str, kind: tuple[str, str, float], module: Any) -> Any:
        import torch

        from dynguard.torch.probe import probing

        what, place, width = kind

        def hook(module: Any, args: Any, output: Any) -> None:
            if torch.compiler.is_compiling() or not module.training or not torch.is_grad_enabled() or probing():
                return
            self._calls[name] = calls = self._calls.get(name, -1) + 1
            if calls % self.every or not isinstance(output, torch.Tensor) or not output.numel():
                return
            with torch.no_grad():
                if what == "head":
                    self._keep(place, output.detach().abs().amax().float())
                    return
                largest = torch.linalg.vector_norm(output.detach(), dim=-1, dtype=torch.float32).amax()
                if what == "query":
                    self._queries[place] = largest
                elif place in self._queries:
                    self._keep(place, self._queries.pop(place) * largest / math.sqrt(width))

        return hook

    def _keep(self, place: str, value: Any) -> None:
        self._sampled.setdefault(place, deque(maxlen=SAMPLES)).append((self._step, value))

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
            slope, low = trend(finite)
            if low <= 0 or slope * (finite[-1][0] - finite[0][0]) < math.log(GROWN):
                continue
            self._told.add(place)
            yield Finding(
                kind="logit_growth",
                severity=Severity.WARNING,
                step=finite[-1][0],
                subject=place,
                action=Action.WARN,
                premise=f"the logits of {place!r} reach {finite[-1][1]:.4g} and double every {math.log(2) / slope:.0f} "
                "steps",
                implies="the softmax is all but one-hot: its gradient vanishes where it is right and is of full size "
                "where it is wrong, which precedes divergence",
                expected_effect="normalising queries and keys, a z-loss on the output, weight decay or a lower "
                "learning rate keep logits bounded",
                confidence=0.95,  # the level of the trend's interval
                evidence=(
                    Evidence(name="largest_logit", value=finite[-1][1]),
                    Evidence(name="first_sample", value=finite[0][1]),
                    Evidence(name="doubling_steps", value=math.log(2) / slope),
                ),
            )

    def state_dict(self) -> dict[str, Any]:
        """The samples, read, and what was told."""
        return {"samples": {k: [list(p) for p in v] for k, v in self.samples().items()}, "told": sorted(self._told)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up ``state_dict()``."""
        self._sampled = {k: deque([(s, v) for s, v in pairs], maxlen=SAMPLES) for k, pairs in state["samples"].items()}
        self._told = set(state["told"])


def trend(pairs: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """(slope, its lower 95 % bound) of the log value per step, by Theil and Sen."""
    from scipy.stats import theilslopes  # type: ignore[import-untyped]  # scipy ships no types

    logs = [math.log(v) for _, v in pairs]
    if min(logs) == max(logs) or pairs[0][0] == pairs[-1][0]:
        return 0.0, 0.0
    found = theilslopes(logs, [float(s) for s, _ in pairs], 0.95)
    return float(found.slope), float(found.low_slope)


def places(model: Any) -> Iterator[tuple[str, Any, tuple[str, str, float]]]:
    """(module's name, module, (head / query / key, place, width of one head)) of all that is hooked."""
    from torch import nn

    from dynguard.torch import names as naming

    head: tuple[str, Any] | None = None
    models = naming.modules_by_key(model)
    for key, top in models.items():
        for path, module in naming.unwrap(top).named_modules():
            name = ".".join(part for part in (key, path) if part)
            if not isinstance(module, nn.Linear):
                continue
            head = (name, module) if module.out_features > 1 else head
            what = "query" if QUERY.search(name) else "key" if KEY.search(name) else ""
            if what:
                parent = name.rpartition(".")[0]
                heads = next((int(n) for n in _heads(top, path)), 1)
                yield name, module, (what, parent, max(module.out_features / max(heads, 1), 1.0))
    if head is not None and not QUERY.search(head[0]) and not KEY.search(head[0]):
        yield head[0], head[1], ("head", head[0], 1.0)


def _heads(top: Any, path: str) -> Iterator[int]:
    parent = dict(top.named_modules()).get(path.rpartition(".")[0])
    for name in HEADS:
        value = getattr(parent, name, None)
        if isinstance(value, int) and value > 0:
            yield value
