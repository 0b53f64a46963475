"""Use of a vector quantiser's codebook, counted by forward hooks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dynguard import Action, Evidence, Finding, Severity
from dynguard.torch.module_hooks import ModuleHook
from dynguard_plugins.embeddings.collapse_outputs import looks_away, roots

CODEBOOKS = (r"(^|[._])(codebooks?|vq\w*|quanti[sz](er?|e[dr]?)s?|vector_?quanti\w*)([._\d]|$)",)
CLASSES = re.compile(r"vector_?quanti|codebook|^vq|quantizer$", re.IGNORECASE)
SIZES = ("codebook_size", "num_embeddings", "n_embeddings", "n_embed", "num_codes", "n_codes", "n_e")
LEAST_SIZE = 16
LOOKUPS = 10  # a window has at least so many per entry
KEPT = 200


@dataclass(slots=True)
class Codebook:
    """One codebook under watch."""

    size: int
    used: Any = None  # (size + 1,) int64 of the window under way; the last entry counts masked codes
    lookups: int = 0
    begun: int = 0
    windows: list[tuple[int, Any]] = field(default_factory=list)  # (step, perplexity)
    told: bool = False

    def read(self) -> list[tuple[int, float]]:
        """Perplexity by window."""
        self.windows = [(s, float(v)) for s, v in self.windows]
        return [(s, v) for s, v in self.windows if np.isfinite(v)]


class Codebooks:
    """Counts which codes are looked up, in windows of ``every`` steps with ten look-ups an entry or more."""

    def __init__(self, every: int, patterns: Sequence[str] | None, share: float) -> None:
        self.every = every
        self.share = share
        self.patterns = [re.compile(p, re.IGNORECASE) for p in (CODEBOOKS if patterns is None else patterns)]
        self.books: dict[str, Codebook] = {}
        self.step = 0
        self._handles: list[Any] = []

    def watch(self, model: Any) -> None:
        """Put hooks on the codebooks of a model."""
        self.detach()
        for prefix, root in roots(model).items():
            for name, module, size in codebooks(root, self.patterns):
                book = self.books.setdefault(prefix + name, Codebook(size))
                if isinstance(module, nn.Embedding):
                    self._handles.append(module.register_forward_pre_hook(ModuleHook(self._looked_up(book))))
                else:
                    self._handles.append(module.register_forward_hook(ModuleHook(self._quantised(book))))

    def detach(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _looked_up(self, book: Codebook) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            self._count(book, module, args[:1])

        return hook

    def _quantised(self, book: Codebook) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._count(book, module, output if isinstance(output, tuple | list) else (output,))

        return hook

    def _count(self, book: Codebook, module: nn.Module, candidates: Sequence[Any]) -> None:
        if looks_away(module):
            return
        ids = next((x for x in candidates if isinstance(x, Tensor) and x.dtype in (torch.int64, torch.int32)), None)
        if ids is None or not ids.numel():
            return
        flat = ids.detach().reshape(-1).long()
        if book.used is None or book.used.device != flat.device:
            book.used, book.lookups, book.begun = flat.new_zeros(book.size + 1), 0, self.step
        outside = (flat < 0) | (flat >= book.size)
        book.used.index_add_(0, torch.where(outside, book.size, flat), torch.ones_like(flat))
        book.lookups += flat.shape[0]
        if book.lookups >= LOOKUPS * book.size and self.step - book.begun >= self.every:
            book.windows = [*book.windows[-KEPT:], (self.step, _perplexity(book.used[:-1]))]
            book.used, book.lookups = None, 0

    def findings(self) -> Iterator[Finding]:
        """Codebooks of which the last two windows used next to nothing; the first window is warm-up."""
        for name, book in self.books.items():
            windows = book.read()
            if book.told or len(windows) < 3 or max(v for _, v in windows[-2:]) >= self.share * book.size:
                continue
            book.told = True
            yield _tell(name, book.size, windows)

    def state_dict(self) -> dict[str, Any]:
        """As plain numbers; a window under way starts anew."""
        for book in self.books.values():
            book.read()
        return {
            name: {"size": b.size, "windows": [[s, v] for s, v in b.windows], "told": b.told}
            for name, b in self.books.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up ``state_dict()``."""
        for name, saved in state.items():
            book = self.books.setdefault(name, Codebook(saved["size"]))
            book.windows, book.told = [(s, v) for s, v in saved["windows"]], saved["told"]


def codebooks(root: nn.Module, patterns: Sequence[re.Pattern[str]]) -> Iterator[tuple[str, nn.Module, int]]:
    """(name, module, entries): embeddings named as codebooks are, or within a quantiser; and quantisers without one."""
    named = dict(root.named_modules())
    quantisers = [n for n, m in named.items() if n and CLASSES.search(type(m).__name__)]
    for name, module in named.items():
        within = any(name.startswith(f"{q}.") for q in quantisers) or any(p.search(name) for p in patterns)
        if isinstance(module, nn.Embedding):
            if within and module.num_embeddings >= LEAST_SIZE:
                yield name, module, module.num_embeddings
        elif name in quantisers and not any(isinstance(m, nn.Embedding) for m in module.modules()):
            sizes = (getattr(module, attribute, None) for attribute in SIZES)
            size = next((s for s in sizes if isinstance(s, int) and s >= LEAST_SIZE), None)
            if size is not None:
                yield name, module, size


def _perplexity(counts: Tensor) -> Tensor:
    shares = counts.float() / counts.sum()
    return torch.exp(-torch.special.xlogy(shares, shares).sum())


def _tell(name: str, size: int, windows: list[tuple[int, float]]) -> Finding:
    return Finding(
        kind="codebook_collapse",
        severity=Severity.WARNING,
        step=windows[-1][0],
        subject=name,
        action=Action.WARN,
        premise=f"of {size} codes in {name!r} as many are in use as {windows[-1][1]:.1f} equally frequent ones",
        implies="most of the codebook is never chosen, and what is never chosen is never trained",
        expected_effect="re-seeding unused codes from encoder outputs, k-means initialisation, or a smaller codebook "
        "brings its use up",
        evidence=(
            Evidence(name="perplexity", value=windows[-1][1]),
            Evidence(name="perplexity_at_start", value=windows[0][1]),
            Evidence(name="codes", value=size),
            Evidence(name="windows", value=len(windows)),
        ),
    )
