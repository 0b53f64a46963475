"""How good the curvature is that ``helene`` clips by, and what it costs.

    python benchmarks/helene.py [--quick] [--only correlation|cost] [--seed 0]

*Correlation.* Small classifiers, on one batch: the diagonal of ``J^T H J`` written out (``torch.func.jacrev`` of the
logits, ``H = diag(p) - p p^T``) against the mean of 1, 10 and 100 estimates at the same weights, over all entries
together and as the median over parameters (a scale between layers makes the former look good). Then in training: after
AdamW steps on fresh batches, the plugin's own running mean against the exact diagonal at the final weights on 8
batches. The squared gradient of the true labels (the fallback) is beside them.

*Cost.* ``adjust_gradients`` over one period of ``every`` steps, estimate included, in units of ``every`` backward
passes of the same model and batch, the two timed in turns; split into the estimate and the clip.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import torch
from scipy.stats import spearmanr  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn import functional as F

from benchmarks.timing import QUICK, Effort, Figure, interleave, quiet, ratios
from benchmarks.workloads import GPT, WORKLOADS, Batch
from dynguard.events import GradientEvent
from dynguard.testing import FakeTraining
from dynguard.torch.gauss_newton import diagonal
from dynguard.torch.probe import Probe
from dynguard.torch.statistics import Statistics
from dynguard_plugins.stability.helene import Helene

DRAWS = (1, 10, 100)


class Training(FakeTraining):
    """What the plugin asks of a source."""

    def __init__(self, model: nn.Module, loss_fn: Callable[[Any, Any], Tensor] | None) -> None:
        super().__init__()
        self.model, self.loss_fn = model, loss_fn


def event(training: Training, step: int, batch: Batch) -> GradientEvent:
    """The event of a step whose backward has run."""
    named = list(training.model.named_parameters())
    gradients = [p.grad for _, p in named]
    return GradientEvent(
        step=step,
        source="",
        names=tuple(name for name, _ in named),
        statistics=Statistics(gradients),
        parameters=[p for _, p in named],
        gradients=gradients,
        batches=[batch],
        training=training,
    )


# -- correlation


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross entropy over all positions; the classes are last."""
    return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


def exact(model: nn.Module, batch: Batch) -> list[Tensor]:
    """Diagonal of the Gauss-Newton matrix of the mean cross entropy, one tensor per parameter, in float64."""
    named = {name: p.detach() for name, p in model.named_parameters()}
    totals = [torch.zeros(p.shape, dtype=torch.float64) for p in named.values()]
    terms = batch[1].numel()
    for row in batch[0]:  # the nets have no layers over batches

        def logits(p: dict[str, Tensor], row: Tensor = row) -> Tensor:
            found: Tensor = functional_call(model, p, (row[None],)).flatten(0, -2)
            return found

        p = torch.softmax(logits(named), -1).double()
        for total, jacobian in zip(totals, jacrev(logits)(named).values(), strict=True):
            j = jacobian.double().flatten(2)  # (positions, classes, entries)
            second = torch.einsum("pc,pce->e", p, j**2) - torch.einsum("pc,pce->pe", p, j).square().sum(0)
            total += second.view(total.shape) / terms
    return totals


def agreement(found: list[Tensor], truth: list[Tensor]) -> dict[str, float]:
    """Pearson and Spearman over all entries, and the medians over parameters that have any spread."""
    pairs = [(f.double().flatten(), t.flatten()) for f, t in zip(found, truth, strict=True)]
    pairs = [(f, t) for f, t in pairs if len(f) > 2 and float(t.std()) > 0]
    together = torch.cat([f for f, _ in pairs]), torch.cat([t for _, t in pairs])
    each = [(pearson(f, t), float(spearmanr(f, t).statistic)) for f, t in pairs]
    middle = torch.tensor(each).nanmedian(0).values.tolist()
    return {
        "pearson": pearson(*together),
        "spearman": float(spearmanr(*together).statistic),
        "pearson by layer": middle[0],
        "spearman by layer": middle[1],
        "trace": float(together[0].sum() / together[1].sum()),
    }


def pearson(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1])


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 5))


def _conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, stride=2), nn.ReLU(), nn.Conv2d(6, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 5)
    )


def _transformer() -> nn.Module:
    return GPT(layers=1, width=16, heads=2, vocabulary=12, context=8)


def _vectors(rows: int) -> Batch:
    truth = torch.randn(8, 5, generator=torch.Generator().manual_seed(1))
    x = torch.randn(rows, 8)
    return x, torch.distributions.Categorical(logits=2 * x @ truth).sample()  # type: ignore[no-untyped-call] # torch leaves it untyped


def _images(rows: int) -> Batch:
    truth = torch.randn(49 + 32, 5, generator=torch.Generator().manual_seed(1))
    x = torch.randn(rows, 1, 9, 9)
    return x, torch.distributions.Categorical(logits=x.flatten(1) @ truth).sample()  # type: ignore[no-untyped-call] # torch leaves it untyped


def _text(rows: int) -> Batch:
    chain = torch.softmax(2 * torch.randn(12, 12, generator=torch.Generator().manual_seed(1)), 1)
    tokens = [torch.randint(12, (rows,))]
    for _ in range(8):
        tokens.append(torch.multinomial(chain[tokens[-1]], 1)[:, 0])
    whole = torch.stack(tokens, 1)
    return whole[:, :-1], whole[:, 1:]


Net = tuple[Callable[[], nn.Module], Callable[[int], Batch]]
NETS: dict[str, Net] = {"mlp": (_mlp, _vectors), "conv": (_conv, _images), "transformer": (_transformer, _text)}


def at_fixed_weights(build: Callable[[], nn.Module], draw: Callable[[int], Batch], most: int) -> dict[str, Any]:
    """Means of more and more estimates, and the squared gradient, against the exact diagonal."""
    model, batch = build(), draw(32)
    truth = exact(model, batch)
    probe = Probe(model, loss_of, batch, list(model.parameters()))
    found: dict[str, Any] = {"squared gradient": agreement([g**2 for g in probe.gradients()], truth)}
    means = [torch.zeros_like(t) for t in truth]
    for k in range(1, most + 1):
        for mean, one in zip(means, diagonal(probe, k), strict=True):
            mean += (one - mean) / k
        if k in DRAWS:
            found[f"{k} draws"] = agreement(means, truth)
    return found


def in_training(build: Callable[[], nn.Module], draw: Callable[[int], Batch], steps: int) -> dict[str, Any]:
    """The plugin's running mean after training, of sampled labels and of the fallback."""
    found = {}
    for name, loss in (("running mean", loss_of), ("fallback's running mean", None)):
        torch.manual_seed(0)
        model = build()
        optimizer, plugin = torch.optim.AdamW(model.parameters(), lr=1e-3), Helene()
        training = Training(model, loss)
        for step in range(steps):
            batch = draw(32)
            optimizer.zero_grad()
            loss_of(model, batch).backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
            plugin.adjust_gradients(event(training, step, batch))
            optimizer.step()
        truths = [exact(model, draw(32)) for _ in range(8)]
        truth = [torch.stack(parts).mean(0) for parts in zip(*truths, strict=True)]
        found[name] = agreement(curvature(plugin, truth), truth)
    return found


def curvature(plugin: Helene, like: list[Tensor]) -> list[Tensor]:
    """h of a plugin's only source."""
    values = plugin._watched[""].curvature.values
    return [values.get(i, torch.zeros_like(t)) for i, t in enumerate(like)]


def correlations(seed: int, *, small: bool) -> None:
    """Print the table."""
    print(f"{'net':12} {'estimate':24} " + " ".join(f"{c:>18}" for c in agreement(*[[torch.randn(9).double()]] * 2)))
    for net, (build, draw) in NETS.items():
        torch.manual_seed(seed)
        rows = at_fixed_weights(build, draw, 10 if small else max(DRAWS))
        rows |= in_training(build, draw, 50 if small else 1000)
        for what, numbers in rows.items():
            print(f"{net:12} {what:24} " + " ".join(f"{value:18.3f}" for value in numbers.values()))


# -- cost


def cost(name: str, effort: Effort, share: float) -> list[Figure]:
    """Of a period of steps, in backward passes a step."""
    workload = WORKLOADS[name]
    model = workload.build()
    batches = workload.batches()
    batch = next(batches)
    training = Training(model, workload.loss)
    workload.loss(model, batch).backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
    steps = iter(range(10**9))
    plugin = Helene(share=share)
    call = functools.partial(_call, plugin, training, batch, steps)
    for _ in range(31):  # past the warm-up; the next estimate is due in 10 steps, 1 of them is that with it
        call()
    losses: list[Tensor] = []

    def forward() -> None:
        losses[:] = [workload.loss(model, batch)]

    def backward() -> None:
        torch.autograd.grad(losses.pop(), list(model.parameters()))

    def period() -> None:
        for _ in range(plugin.every):
            call()

    seconds: dict[str, list[float]] = {"backward": [], "period": [], "clip": []}
    for _ in range(effort.rounds):
        one = interleave({"backward": backward}, 1, max(effort.calls, 3), forward)
        two = interleave({"period": period}, 1, 1)
        # Clips alone: the nine steps after an estimate.
        three = interleave({"clip": call}, 1, plugin.every - 1)
        period_rest(plugin, call)
        seconds["backward"] += one["backward"]
        seconds["period"] += [s / plugin.every for s in two["period"]]
        seconds["clip"] += three["clip"]
    whole, clip = ratios(seconds, "period", "backward"), ratios(seconds, "clip", "backward")
    estimate = [a - b for a, b in zip(whole, clip, strict=True)]
    part = f"share {share:g}"
    return [
        Figure.of(part, name, what, "backward passes a step", values)
        for what, values in (("whole", whole), ("estimate", estimate), ("clip", clip))
    ]


def _call(plugin: Helene, training: Training, batch: Batch, steps: Any) -> None:
    plugin.adjust_gradients(event(training, next(steps), batch))


def period_rest(plugin: Helene, call: Callable[[], None]) -> None:
    """The rest of a period, so that each round begins at the same place of one."""
    while plugin._watched[""].since:
        call()


def costs(effort: Effort) -> None:
    """Print the table."""
    print(f"{'model':8} {'batch part':12} {'what':10} {'median':>8} {'quartiles':>18}")
    for name in ("mlp", "gpt"):
        for share in (0.5, 0.25):
            with quiet():
                figures = cost(name, effort, share)
            for f in figures:
                print(f"{f.model:8} {f.part:12} {f.what:10} {f.median:8.3f} {f.low:8.3f} - {f.high:.3f}")


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few rounds only, to see that it runs")
    parser.add_argument("--only", choices=("correlation", "cost"))
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.only != "cost":
        correlations(given.seed, small=given.quick)
    if given.only != "correlation":
        costs(QUICK if given.quick else Effort())


if __name__ == "__main__":
    main()
