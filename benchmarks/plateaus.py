"""The edge of stability, redone: plateaus at the published thresholds, and how well ``eos`` foretells the crossing.

    python benchmarks/plateaus.py [--quick] [--figure docs/figures/edge_of_stability.svg]

Plateaus: full-batch training of a small tanh MLP at three learning rates and three seeds. Gradient descent's sharpness
should hover at 2 / lr (Cohen et al. 2021, arXiv:2103.00065, figure 1), the preconditioned sharpness of Adam with
b1 = 0.9, b2 = 0.999 at 38 / lr (Cohen et al. 2022, arXiv:2207.14484, figure 1). Printed is the median of the ratio to
the threshold over the second half of each run.

Forecasts: runs at learning rates from such that never cross to such that do at once. A second ``eos`` with eight
products by double backward follows the ratio every 5 steps; the crossing is the first of two in a row at 1 or above. A
forecast is a hit if the crossing falls into its interval; "within 2x" if the time to it is between half and twice what
was said; off if it comes within twice the horizon all the same, false if not. A run that crosses after step 100 and was
not told of it before is a miss; earlier crossings leave ``eos`` too few checks for a trend, and are counted apart.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dynguard import FlowManager, hookimpl
from dynguard_plugins.stability.eos import HORIZON, Eos

EVERY = 10  # of the eos that forecasts
DENSE_EVERY = 5  # of the one that is believed
TOO_SOON = 100
# High enough for the edge to be reached in the first half of the run: below, sharpening is too slow or ends too soon.
PLATEAU_RATES = {"GD": (0.08, 0.1, 0.2), "Adam": (3e-3, 4e-3, 8e-3)}
FORECAST_RATES = {
    "GD": (0.005, 0.02, 0.04, 0.06, 0.07, 0.08, 0.1, 0.15),
    "Adam": (1e-4, 3e-4, 5e-4, 1e-3, 2e-3, 3e-3, 4e-3, 6e-3),
}
STEPS = {"GD": 2000, "Adam": 1500}


@dataclass
class Trace:
    """One run: ratios by step, and what was forecast."""

    method: str
    lr: float
    seed: int
    steps: list[int]
    ratios: list[float]
    forecasts: list[tuple[int, float, float, float]]  # (step, steps to the crossing, earliest, latest)
    losses: list[float]

    @property
    def crossing(self) -> int | None:
        """The first step of two in a row at the edge or past it."""
        above = [r >= 1 for r in self.ratios]
        return next((s for s, a, b in zip(self.steps, above, above[1:], strict=False) if a and b), None)

    @property
    def plateau(self) -> float:
        """Median ratio over the second half."""
        return float(np.median([r for s, r in zip(self.steps, self.ratios, strict=True) if s >= self.steps[-1] / 2]))


def data(seed: int) -> tuple[Tensor, Tensor]:
    """128 points in 6 dimensions with the sign of a product to learn."""
    x = torch.randn(128, 6, generator=torch.Generator().manual_seed(seed))
    return x, torch.sign(x[:, :1] * x[:, 1:2])


def follow(method: str, lr: float, seed: int, steps: int) -> Trace:
    """Train with one ``eos`` that forecasts and one that is measured densely."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer: Any = (
        torch.optim.SGD(model.parameters(), lr=lr) if method == "GD" else torch.optim.Adam(model.parameters(), lr=lr)
    )
    x, y = data(seed)
    told, true = Eos(every=EVERY), Eos(every=DENSE_EVERY, products=8, method="double_backward")
    losses = []
    with tempfile.TemporaryDirectory() as folder:
        flow = FlowManager(
            model, optimizer, plugins=[told, Dense(true)], mode="observe", run_dir=f"{folder}/run", strict=True,
            loss_fn=lambda m, batch: (m(batch[0]) - batch[1]).square().mean(),
        )  # fmt: skip
        with flow:
            for _ in range(steps):
                loss = (model(x) - y).square().mean()
                flow.observe(loss=loss, batch=(x, y))
                losses.append(loss.item())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if not math.isfinite(losses[-1]):
                    break
    forecasts = [
        (f.step, *(float(_value(f, name)) for name in ("steps_to_crossing", "earliest", "latest")))
        for f in flow.findings
        if f.kind == "edge_of_stability" and any(e.name == "steps_to_crossing" for e in f.evidence)
    ]
    checks = true.checks()
    return Trace(method, lr, seed, [c.step for c in checks], [c.ratio for c in checks], forecasts, losses)  # type: ignore[arg-type]


def _value(finding: Any, name: str) -> float:
    """Evidence by name; the end of an interval that is open is not among it."""
    return next((float(e.value) for e in finding.evidence if e.name == name), math.inf)


class Dense:
    """Another ``eos`` whose findings are kept apart."""

    def __init__(self, inner: Eos) -> None:
        self.inner = inner

    @hookimpl
    def on_gradients(self, event: Any) -> None:
        self.inner.on_gradients(event)


def judge(trace: Trace, steps: int) -> dict[str, Any]:
    """A row of the forecast table."""
    crossing = trace.crossing
    before = [f for f in trace.forecasts if crossing is None or f[0] < crossing]
    row: dict[str, Any] = {"crossing": crossing, "first": before[0] if before else None, "verdicts": []}
    for at, expected, earliest, latest in before:
        patience = 2 * HORIZON * EVERY
        actual = None if crossing is None else crossing - at
        if actual is not None and actual <= patience:
            inside = earliest - DENSE_EVERY <= actual <= latest + DENSE_EVERY
            row["verdicts"].append("hit" if inside else "within 2x" if 0.5 <= actual / expected <= 2 else "off")
        elif at + patience <= steps:
            row["verdicts"].append("false")
        else:
            row["verdicts"].append("open")
    right = [f[0] for f, v in zip(before, row["verdicts"], strict=True) if v in ("hit", "within 2x")]
    row["lead"] = crossing - right[0] if crossing is not None and right else None
    row["missed"] = crossing is not None and not before and crossing > TOO_SOON
    row["soon"] = crossing is not None and not before and crossing <= TOO_SOON
    return row


def plateau_table(traces: list[Trace]) -> str:
    """Markdown: median over seeds of the ratio on the plateau."""
    lines = ["| optimizer | lr | threshold | ratio on the plateau, by seed | median |", "|---|---:|---:|---|---:|"]
    for method, rates in PLATEAU_RATES.items():
        for lr in rates:
            found = [t.plateau for t in traces if (t.method, t.lr) == (method, lr)]
            if found:
                bound = (2 if method == "GD" else 38) / lr
                shown = ", ".join(f"{v:.3f}" for v in found)
                lines.append(f"| {method} | {lr:g} | {bound:g} | {shown} | {np.median(found):.3f} |")
    return "\n".join(lines)


def forecast_table(traces: list[Trace], rows: list[dict[str, Any]]) -> str:
    """Markdown: every run, and the sums."""
    lines = [
        "| optimizer | lr | seed | first forecast at | crossing said | crossing | lead | verdicts |",
        "|---|---:|---:|---:|---|---:|---:|---|",
    ]
    for t, row in zip(traces, rows, strict=True):
        first, crossing = row["first"], row["crossing"]
        said = (
            ""
            if first is None
            else f"{first[0] + first[1]:.0f} ({first[0] + first[2]:.0f} to {first[0] + first[3]:.0f})"
        )
        lead = "" if row["lead"] is None else row["lead"]
        verdict = ", ".join(row["verdicts"]) or ("miss" if row["missed"] else "too soon" if row["soon"] else "silent")
        lines.append(
            f"| {t.method} | {t.lr:g} | {t.seed} | {'' if first is None else first[0]} | {said} "
            f"| {'never' if crossing is None else crossing} | {lead} | {verdict} |"
        )
    return "\n".join([*lines, "", *_sums(rows)])


def _sums(rows: list[dict[str, Any]]) -> list[str]:
    verdicts = [v for row in rows for v in row["verdicts"]]
    crossed = [row for row in rows if row["crossing"] is not None]
    told = [row for row in crossed if row["first"]]
    leads = [row["lead"] for row in crossed if row["lead"] is not None]
    count = {v: verdicts.count(v) for v in ("hit", "within 2x", "off", "false", "open")}
    return [
        f"{len(rows)} runs: {len(crossed)} cross, {sum(row['soon'] for row in rows)} of them before step {TOO_SOON} "
        f"without a forecast; told before: {len(told)}, missed: {sum(row['missed'] for row in rows)}.",
        f"{len(verdicts)} forecasts: {count['hit']} hit their interval, {count['within 2x']} more within 2x, "
        f"{count['off']} further off, {count['false']} false, {count['open']} still open at the end of the run.",
        f"Lead of the first forecast right within 2x, in {len(leads)} runs: median {np.median(leads):.0f} steps "
        f"({min(leads)} to {max(leads)})."
        if leads
        else "No crossing was foretold within 2x.",
    ]


def draw(traces: list[Trace], path: Path) -> None:
    """The published figure: sharpness against step, with the thresholds."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    mpl.rcParams["svg.hashsalt"] = "dynguard"
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for axis, (method, label) in zip(axes, {"GD": "2 / lr", "Adam": "38 / lr"}.items(), strict=True):
        for t in (t for t in traces if t.method == method and t.seed == 0):
            bound = (2 if method == "GD" else 38) / t.lr
            (line,) = axis.plot(t.steps, [r * bound for r in t.ratios], linewidth=1, label=f"lr = {t.lr:g}")
            axis.axhline(bound, color=line.get_color(), linestyle="--", linewidth=1)
        axis.set(xlabel="step", yscale="log", title=f"{'sharpness' if method == 'GD' else 'preconditioned sharpness'}"
                 f", full-batch {method} (dashed: {label})")  # fmt: skip
        axis.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    """Print both tables and save the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", type=Path, default=Path("docs/figures/edge_of_stability.svg"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--quick", action="store_true", help="one seed, one rate each, fewer steps; no figure")
    options = parser.parse_args()
    torch.set_num_threads(1)
    seeds = options.seeds[:1] if options.quick else options.seeds
    shorter = 4 if options.quick else 1

    def run(rates: Mapping[str, tuple[float, ...]], few: list[int]) -> list[Trace]:
        return [
            follow(method, lr, seed, STEPS[method] // shorter)
            for method, values in rates.items()
            for lr in (values[-1:] if options.quick else values)
            for seed in few
        ]

    plateaus = run(PLATEAU_RATES, seeds)
    print(plateau_table(plateaus))
    if not options.quick:
        draw(plateaus, options.figure)
    forecasts = run(FORECAST_RATES, [100 + seed for seed in seeds][:2])
    rows = [judge(t, STEPS[t.method] // shorter) for t in forecasts]
    print()
    print(forecast_table(forecasts, rows))


if __name__ == "__main__":
    main()
