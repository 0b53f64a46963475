"""Error and cost of the sharpness that ``eos`` measures, against exact eigenvalues and beside published packages.

    python benchmarks/sharpness.py [--quick] [--steps 300] [--seeds 0]

Nets train as they would while ``eos`` follows them. At each of its checks (the first three, from a random start, are
left out) the largest eigenvalue is also worked out exactly, at the same weights on the same batch: from the dense
Hessian (``torch.func.hessian``) below 2,000 parameters, else by ``scipy.sparse.linalg.eigsh`` on products by double
backward, to 1e-6. For Adam it is that of ``P^-1/2 H P^-1/2``, ``P = (1 - b1^t) (sqrt(v / (1 - b2^t)) + eps)`` (Cohen
et al. 2022, arXiv:2207.14484), written down here anew from the optimizer's state. The peers get the same weights and
batch, at their own defaults and at the number of gradient evaluations that ``eos`` spent; each of their products (a
double backward, about two gradients) is counted as one, in their favour. None of them preconditions.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import itertools
import subprocess
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh  # type: ignore[import-untyped]
from torch import Tensor, nn

from benchmarks.peers import FOLDER
from dynguard import FlowManager, hookimpl
from dynguard_plugins.stability.eos import Eos

DENSE = 2000
SKIPPED = 3
EVERY = 10
# What each peer needs beside torch, numpy and scipy, which the environment has; --no-deps keeps another torch out.
PEERS = {
    "pyhessian": ["pyhessian==0.1"],
    "curvlinops": [
        "curvlinops-for-pytorch==3.0.1", "backpack-for-pytorch", "einops", "einconv", "opt-einsum", "unfoldNd",
        "linear-operator", "jaxtyping", "wadler-lindig", "typeguard", "mpmath", "tqdm",
    ],
}  # fmt: skip


def peer(name: str) -> ModuleType | None:
    """A published package out of a folder of its own, or None (and why) where it can't be had."""
    folder = FOLDER / name
    if not folder.is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        done = subprocess.run(
            [*command, "--target", str(folder), *PEERS[name]], capture_output=True, text=True, check=False
        )
        if done.returncode:
            print(f"{name} can't be installed: {done.stderr.strip()[-300:]}", file=sys.stderr)
            return None
    sys.path.append(str(folder))
    try:
        return importlib.import_module(name)
    except ImportError as error:
        print(f"{name} can't be imported: {error}", file=sys.stderr)
        return None


# -- exact values


def parameters_of(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that train."""
    return [p for p in model.parameters() if p.requires_grad]


def roots(optimizer: Any, parameters: list[nn.Parameter]) -> Tensor | None:
    """(d,) entries of P^-1/2 before the coming update, None for gradient descent."""
    if not isinstance(optimizer, torch.optim.Adam):
        return None
    b1, b2 = optimizer.param_groups[0]["betas"]
    eps = optimizer.param_groups[0]["eps"]
    rows = []
    for p in parameters:
        state = optimizer.state[p]
        t = float(state["step"])
        v = state["exp_avg_sq"].double() / (1 - b2**t)
        rows.append(((1 - b1**t) * (v.sqrt() + eps)).rsqrt().flatten())
    return torch.cat(rows)


def exact(model: nn.Module, loss_of: Callable[[nn.Module], Tensor], scale: Tensor | None) -> float:
    """Largest algebraic eigenvalue of the Hessian in float64, scaled from both sides where ``scale`` is given."""
    twin = copy.deepcopy(model).double()
    parameters = parameters_of(twin)
    size = sum(p.numel() for p in parameters)
    factor = torch.ones(size, dtype=torch.float64) if scale is None else scale
    if size < DENSE:
        matrix = factor[:, None] * dense_hessian(twin, loss_of) * factor
        return float(torch.linalg.eigvalsh(matrix)[-1])
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss_of(twin), parameters, create_graph=True)])

    def product(vector: Any) -> Any:
        v = torch.from_numpy(np.ascontiguousarray(vector).reshape(-1)) * factor
        found = torch.autograd.grad(gradient, parameters, v, retain_graph=True)
        return (torch.cat([h.flatten() for h in found]) * factor).numpy()

    operator = LinearOperator((size, size), matvec=product, dtype=np.float64)
    start = np.random.default_rng(0).standard_normal(size)
    return float(eigsh(operator, k=1, which="LA", tol=1e-6, v0=start, return_eigenvectors=False)[0])


def dense_hessian(model: nn.Module, loss_of: Callable[[Any], Tensor]) -> Tensor:
    """(d, d) Hessian by torch.func."""
    named = {name: p.detach() for name, p in model.named_parameters()}
    shapes = [p.shape for p in named.values()]

    def loss(flat: Tensor) -> Tensor:
        parts = torch.split(flat, [s.numel() for s in shapes])
        values = {name: part.view(s) for name, part, s in zip(named, parts, shapes, strict=True)}
        return loss_of(lambda x: torch.func.functional_call(model, values, (x,)))

    matrix: Tensor = torch.func.hessian(loss)(torch.cat([p.flatten() for p in named.values()]))
    return matrix


# -- peers


class Counted:
    """A linear operator that counts its products."""

    def __init__(self, operator: Any) -> None:
        self.products = 0
        self._operator = operator
        self.scipy = LinearOperator(operator.shape, matvec=self._product, dtype=operator.dtype)

    def _product(self, vector: Any) -> Any:
        self.products += 1
        return self._operator @ np.asarray(vector, self._operator.dtype).reshape(-1)


def by_pyhessian(module: Any, model: nn.Module, loss: Any, batch: Any, budget: int | None) -> tuple[float, int]:
    """(largest eigenvalue by power iteration, gradient evaluations)."""
    twin = copy.deepcopy(model)
    count = [0]
    inner = module.hessian.__init__.__globals__["hessian_vector_product"]

    def counting(*arguments: Any) -> Any:
        count[0] += 1
        return inner(*arguments)

    space = module.hessian.eigenvalues.__globals__
    space["hessian_vector_product"] = counting
    try:
        warnings.filterwarnings("ignore", message="Using backward\\(\\) with create_graph")  # its own; broken below
        solver = module.hessian(twin, loss, data=batch, cuda=False)
        options = {} if budget is None else {"maxIter": budget - 1, "tol": 0.0}
        values, _ = solver.eigenvalues(**options)
    finally:
        space["hessian_vector_product"] = inner
        for p in twin.parameters():
            p.grad = None  # it holds a graph that refers to itself
    return float(values[0]), count[0] + 1


def by_curvlinops(module: Any, model: nn.Module, loss: Any, batch: Any, budget: int | None) -> tuple[float, int]:
    """(largest eigenvalue by scipy's eigsh on its operator, gradient evaluations), NaN where none has converged."""
    twin = copy.deepcopy(model)
    operator = module.HessianLinearOperator(twin, loss, parameters_of(twin), [batch], check_deterministic=False)
    counted = Counted(operator.to_scipy())
    options: dict[str, Any] = {} if budget is None else {"ncv": max(budget - 1, 3), "maxiter": 1}
    start = np.random.default_rng(counted.scipy.shape[0]).standard_normal(counted.scipy.shape[0])
    try:
        values = eigsh(
            counted.scipy, k=1, which="LA", v0=start.astype(counted.scipy.dtype), return_eigenvectors=False, **options
        )
    except ArpackNoConvergence as error:
        values = error.eigenvalues
    return float(values[0]) if len(values) else float("nan"), counted.products + 1


METHODS = {"pyhessian": by_pyhessian, "curvlinops": by_curvlinops}


# -- runs


@dataclass
class Run:
    """One training run."""

    title: str
    model: nn.Module
    optimizer: Any
    loss: nn.Module
    batches: Callable[[int], tuple[Tensor, Tensor]]
    compared: bool = True  # with peers


class Attention(nn.Module):
    """One head of attention over four tokens, from operations that have second derivatives."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out, self.head = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(n, 4 width) -> (n, 4)."""
        tokens = x.unflatten(1, (4, -1))  # type: ignore[no-untyped-call] # torch leaves it untyped
        q, k, v = self.qkv(tokens).chunk(3, dim=-1)
        weights = (q @ k.transpose(1, 2) / k.shape[-1] ** 0.5).softmax(-1)
        found: Tensor = self.head(torch.tanh(tokens + self.out(weights @ v)).mean(1))
        return found


def runs(seed: int) -> list[Run]:
    """Full-batch and mini-batch, gradient descent and Adam, below and above DENSE parameters."""
    torch.manual_seed(seed)

    def regression(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 8)
        return x, torch.sign(x[:, :1] * x[:, 1:2])

    def classes(count: int, width: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, width)
        return x, (x @ torch.randn(width, 4, generator=torch.Generator().manual_seed(seed))).argmax(1)

    def mlp(*widths: int) -> nn.Module:
        layers = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.Tanh())]
        return nn.Sequential(*layers[:-1])

    full, images = regression(128), classes(256, 64)
    small, adam, large, head = mlp(8, 24, 24, 1), mlp(8, 24, 24, 1), mlp(64, 64, 64, 4), Attention(16)
    conv = nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 12, 3), nn.Tanh(), nn.Conv2d(12, 16, 3), nn.Tanh(), nn.Flatten(),
        nn.Linear(256, 4),
    )  # fmt: skip
    return [
        Run("MLP, GD", small, torch.optim.SGD(small.parameters(), lr=0.1), nn.MSELoss(), lambda _: full),
        Run("MLP, Adam", adam, torch.optim.Adam(adam.parameters(), lr=2e-3), nn.MSELoss(), lambda _: full, False),
        Run("wider MLP, GD", large, torch.optim.SGD(large.parameters(), lr=0.2), nn.CrossEntropyLoss(),
            lambda _: images),
        Run("conv net, SGD, batch 256", conv, torch.optim.SGD(conv.parameters(), lr=0.1), nn.CrossEntropyLoss(),
            lambda _: classes(256, 64)),
        Run("attention, Adam, batch 256", head, torch.optim.Adam(head.parameters(), lr=2e-3), nn.CrossEntropyLoss(),
            lambda _: classes(256, 64), False),
    ]  # fmt: skip


@dataclass
class Errors:
    """Relative errors and gradient evaluations of one method in one kind of run."""

    errors: list[float] = field(default_factory=list)
    gradients: list[int] = field(default_factory=list)

    def add(self, value: float, true: float, gradients: int) -> None:
        """One measurement."""
        self.errors.append(abs(value - true) / abs(true))
        self.gradients.append(gradients)


class Exact:
    """Works out the truth, and what the peers say, at the very weights and batch of each check."""

    def __init__(self, run: Run, peers: Mapping[str, ModuleType]) -> None:
        self.run, self.peers = run, peers
        self.true: dict[int, float] = {}
        self.said: dict[str, dict[int, tuple[float, int]]] = defaultdict(dict)

    @hookimpl(tryfirst=True)
    def on_gradients(self, event: Any) -> None:
        """Before the update, as ``eos``."""
        if not event.step or event.step % EVERY or event.step <= SKIPPED * EVERY:
            return
        model, (x, y) = self.run.model, event.batches[-1]
        with torch.enable_grad():
            self._measure(event.step, model, x, y)

    def _measure(self, step: int, model: nn.Module, x: Tensor, y: Tensor) -> None:
        wide = y.double() if y.is_floating_point() else y
        scale = roots(self.run.optimizer, parameters_of(model))
        self.true[step] = exact(model, lambda m: self.run.loss(m(x.double()), wide), scale)
        if not self.run.compared:
            return
        for name, module in self.peers.items():
            method = METHODS[name]
            self.said[f"{name}, default"][step] = method(module, model, self.run.loss, (x, y), None)
            self.said[f"{name}, same budget"][step] = method(module, model, self.run.loss, (x, y), 4)


def follow(run: Run, steps: int, peers: Mapping[str, ModuleType]) -> dict[str, Errors]:
    """Train and compare."""
    eos, truth = Eos(every=EVERY), Exact(run, peers)
    with tempfile.TemporaryDirectory() as folder:
        flow = FlowManager(
            run.model, run.optimizer, plugins=[truth, eos], mode="observe", run_dir=f"{folder}/run",
            loss_fn=lambda model, batch: run.loss(model(batch[0]), batch[1]), strict=True,
        )  # fmt: skip
        with flow:
            for step in range(steps):
                x, y = run.batches(step)
                loss = run.loss(run.model(x), y)
                flow.observe(loss=loss, batch=(x, y))
                loss.backward()
                run.optimizer.step()
                run.optimizer.zero_grad()
    found: dict[str, Errors] = defaultdict(Errors)
    for check in eos.checks():
        if check.step in truth.true and check.sharpness is not None:
            found["eos"].add(check.sharpness, truth.true[check.step], check.gradients)
    for name, said in truth.said.items():
        for step, (value, gradients) in said.items():
            found[name].add(value, truth.true[step], gradients)
    found["eos"].errors += [float("nan")] * (len(truth.true) - len(found["eos"].errors))  # checks not believed
    return found


def table(results: Mapping[tuple[str, str], Errors]) -> str:
    """Markdown, a row per kind of run and method."""
    lines = [
        "| run | method | median error | 90th percentile | gradients a check | no answer | checks |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for (title, method), e in results.items():
        known = [v for v in e.errors if np.isfinite(v)]
        low, high = np.percentile(known, [50, 90]) if known else (float("nan"),) * 2
        lines.append(
            f"| {title} | {method} | {low:.2%} | {high:.2%} | {np.median(e.gradients) if e.gradients else 0:.0f} "
            f"| {len(e.errors) - len(known)} | {len(e.errors)} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--quick", action="store_true", help="60 steps, one seed, no peers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    modules = {} if options.quick else {name: module for name in PEERS if (module := peer(name)) is not None}
    results: dict[tuple[str, str], Errors] = defaultdict(Errors)
    for seed in options.seeds[:1] if options.quick else options.seeds:
        for run in runs(seed):
            for method, errors in follow(run, 60 if options.quick else options.steps, modules).items():
                results[run.title, method].errors += errors.errors
                results[run.title, method].gradients += errors.gradients
    print(table(results))


if __name__ == "__main__":
    main()
