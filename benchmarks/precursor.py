"""Does anything foretell a loss spike? The scores of ``precursor`` and published rules on natural spikes, by lead.

    python benchmarks/precursor.py [--out FILE] [--only gpt shift] [--most RUNS]   # resumable: one JSON line a run
    python benchmarks/precursor.py --table [--out FILE]                            # the table, in Markdown

Runs: a byte-level transformer that learns 64 windows of Python's own library by heart, an MLP on clusters that move,
and a full-batch regression, under Adam with b2 = .999; "hot" at learning rates far too high, "clean" at ordinary ones.
Nothing is planted.

A spike is defined by the loss alone, before any score is looked at: a step whose loss lies above the median of the 50
before it by more than 6 standard deviations (1.4826 MAD), a quarter of that median and 0.02, and stays above that
line on average over 3 steps (a single bad batch is no spike). Its onset is the first such step; the next spike
begins at the earliest 30 steps after the last step above. Steps below 100 are left out.

A score foretells a spike at lead L if it alarms at some step from 20 to L before the onset (it is known before the
update of its step). What that is worth is told by "chance": the share of windows as long, in the same runs but with no
spike in them, nor 30 steps before or after them, that hold an alarm too. Thresholds are fixed beforehand: 2.3 for RMS
(Wortsman et al. 2023, arXiv 2304.13013, section 3.4), 1.5 for updates (``peak`` of precursor), 2.5 and 6 as published;
or such that clean runs at seeds 100 and up, which are not evaluated, alarm at 1 step in 1,000.
AUC needs no threshold: how often a window before a spike scores higher than one without.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import mannwhitneyu  # type: ignore[import-untyped]  # scipy ships no types
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import zoo
from benchmarks.rules import Seen, SixSigma, ZClip
from dynguard import FlowManager, hookimpl
from dynguard_plugins.stability.precursor_updates import Updates, exact

STEPS, WARM, WINDOW = 900, 100, 50
SIGMAS, SHARE, LEAST, STAYS, APART = 6.0, 0.25, 0.02, 3, 30
BACK, LEADS = 20, (1, 4, 8)
# Chosen at seeds 200 and 201 by the number of spikes alone.
RATES = {
    "gpt": {"hot": (0.05, 0.06), "clean": (2e-3,)},
    "shift": {"hot": (0.006, 0.01), "clean": (1e-3,)},
    "fit": {"hot": (0.03, 0.05), "clean": (1e-3,)},
}
SEEDS = {"hot": tuple(range(8)), "clean": tuple(range(8))}
CALIBRATION = (100, 101, 102, 103)
FIXED = {
    "precursor: g over sqrt(v) by layer": 2.3,
    "precursor: update to come by layer": 1.5,
    "RMS of g / sqrt(v), any layer": 2.3,
    "RMS of g / sqrt(v), embedding or first": 2.3,
    "RMS of the update, any layer": 1.5,
    "ZClip": 2.5,
    "6 sigma of the gradient norm": 6.0,
}


class Scores:
    """What every rule says at every step, before the update."""

    def __init__(self) -> None:
        self.rows: dict[str, list[float]] = {name: [] for name in FIXED}
        self._updates = Updates()
        self._zclip, self._sigma = ZClip(), SixSigma()

    @hookimpl
    def on_gradients(self, event: Any) -> None:
        norms, total = event.norms.numpy(), event.global_norm.numpy()
        by_layer = to_come = 0.0
        self._updates.settle(event)
        if self._updates.ready(event, norms):
            with np.errstate(all="ignore"):
                screen = self._updates.look(event, norms, total)
            by_layer, to_come = float(screen.ratio.max()), float(screen.peak.max())
        rms = np.nan_to_num(event.rms_ratio.numpy())
        updates = [exact(event, i, 1)[0] for i in range(len(norms))]
        # the loss is left out: here the rules watch the gradient
        seen = Seen({}, float(total), 1.0)
        values = (
            by_layer,
            to_come,
            rms.max(),
            rms[0],
            np.nan_to_num(updates).max(),
            self._zclip.step(seen).score,
            self._sigma.step(seen).score,
        )
        for row, value in zip(self.rows.values(), values, strict=True):
            row.append(round(float(value), 4) if math.isfinite(value) else 0.0)


def gpt(seed: int) -> tuple[nn.Module, Callable[[int], Any], Callable[[Any], Tensor]]:
    """64 windows of 32 bytes of Python's library, 16 of them a step."""
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(10_000 + seed)
    data, model = zoo.text(), zoo.GPT()
    at = torch.randint(0, len(data) - 33, (64,), generator=g)
    windows = torch.stack([data[i : i + 33] for i in at.tolist()])

    def batch(_: int) -> Tensor:
        return windows[torch.randint(0, 64, (16,), generator=g)]

    return model, batch, lambda b: F.cross_entropy(model(b[:, :-1]).flatten(0, 1), b[:, 1:].flatten())


def shift(seed: int) -> tuple[nn.Module, Callable[[int], Any], Callable[[Any], Tensor]]:
    """Ten clusters whose centres wander, so that what was learnt goes stale."""
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(10_000 + seed)
    centres, way = torch.randn(10, 16, generator=g), torch.randn(10, 16, generator=g)
    model = nn.Sequential(
        nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 10)
    )

    def batch(step: int) -> tuple[Tensor, Tensor]:
        y = torch.randint(0, 10, (64,), generator=g)
        now = centres * math.cos(step / 200) + way * math.sin(step / 200)
        return now[y] + 0.3 * torch.randn(64, 16, generator=g), y

    return model, batch, lambda b: F.cross_entropy(model(b[0]), b[1])


def fit(seed: int) -> tuple[nn.Module, Callable[[int], Any], Callable[[Any], Tensor]]:
    """A smooth function of 8 inputs, all 256 samples at every step."""
    torch.manual_seed(seed)
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(10_000 + seed))
    y = torch.sin(2 * x[:, :1]) * x[:, 1:2] + x[:, 2:3]
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    return model, lambda _: (x, y), lambda b: F.mse_loss(model(b[0]), b[1])


KINDS = {"gpt": gpt, "shift": shift, "fit": fit}


def train(kind: str, rate: float, seed: int) -> dict[str, Any]:
    """One run: its losses, and all scores by step."""
    model, batch, loss_fn = KINDS[kind](seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, betas=(0.9, 0.999))
    scores, losses = Scores(), []
    with tempfile.TemporaryDirectory() as folder:
        flow = FlowManager(model, optimizer, plugins=[scores], run_dir=Path(folder) / "run", strict=True)
        for step in range(STEPS):
            loss = loss_fn(batch(step))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
            optimizer.step()
            losses.append(round(loss.item(), 5))
        flow.close()
    return {"loss": losses, "scores": scores.rows}


def wanted(only: Sequence[str]) -> Iterator[tuple[str, str, float, int]]:
    """(kind, hot or clean, learning rate, seed) of all runs, in turns, so that a part of them is a fair sample."""
    for seed in (*range(8), *CALIBRATION):
        for kind in only:
            for mood, rates in RATES[kind].items():
                if seed in SEEDS[mood] or (mood == "clean" and seed in CALIBRATION):
                    yield from ((kind, mood, rate, seed) for rate in rates)


def spikes(losses: Sequence[float]) -> list[int]:
    """Onsets of the spikes of a run, by its losses alone; see the top of this file."""
    found: list[int] = []
    last = -APART
    for t in range(WINDOW, len(losses) - STAYS):
        past = np.asarray(losses[t - WINDOW : t])
        median = float(np.median(past))
        sigma = 1.4826 * float(np.median(np.abs(past - median)))
        line = median + max(SIGMAS * sigma, SHARE * median, LEAST)
        if not losses[t] > line:
            continue
        if t >= WARM and t - last >= APART and float(np.mean(losses[t : t + STAYS])) > line:
            found.append(t)
        last = t
    return found


def quiet_windows(onsets: Sequence[int], steps: int, lead: int) -> list[range]:
    """Windows as long as those that are searched, far from any spike."""
    near = {s for t in onsets for s in range(t - BACK - APART, t + APART + 1)}
    starts = range(WARM, steps - BACK, BACK)
    windows = [range(s, s + BACK - lead + 1) for s in starts]
    return [w for w in windows if near.isdisjoint(w)]


def table(runs: list[dict[str, Any]]) -> str:
    """Recall, chance and false alarms of every score, in Markdown."""
    evaluated = [r for r in runs if r["seed"] not in CALIBRATION]
    hot, clean = ([r for r in evaluated if r["mood"] == mood] for mood in ("hot", "clean"))
    onsets = {id(r): spikes(r["loss"]) for r in evaluated}
    count, calm = sum(len(onsets[id(r)]) for r in hot), sum(len(onsets[id(r)]) for r in clean)
    kinds = ", ".join(f"{k} {sum(len(onsets[id(r)]) for r in hot if r['kind'] == k)}" for k in KINDS)
    lines = [
        f"{count} natural spikes in {len(hot)} hot runs ({kinds}); {len(clean)} clean runs with {calm}; "
        f"{sum(r['seed'] in CALIBRATION for r in runs)} clean runs for thresholds.",
        "",
        "| score | threshold | " + " | ".join(f"recall at lead {n} (chance)" for n in LEADS)
        + " | AUC at " + ", ".join(map(str, LEADS)) + " | in the step itself | false per 1,000 clean steps |",
        "|" + "---|" * (len(LEADS) + 5),
    ]  # fmt: skip
    for name, fixed in FIXED.items():
        pool = np.concatenate([r["scores"][name][WARM:] for r in runs if r["seed"] in CALIBRATION] or [[]])
        levels = [(f"{fixed:g}", fixed)]
        if len(pool):
            level = float(np.quantile(pool, 0.999))
            levels.append((f"{level:.3g} (1 in 1,000)", level))
        for label, level in levels:
            cells = [_recall(name, level, hot, onsets, lead) for lead in LEADS]
            areas = ", ".join(f"{_area(name, hot, onsets, lead):.2f}" for lead in LEADS)
            itself = [r["scores"][name][t] > level for r in hot for t in onsets[id(r)]]
            steps = np.concatenate([r["scores"][name][WARM:] for r in clean])
            lines.append(
                f"| {name} | {label} | "
                + " | ".join(cells)
                + f" | {areas} | {np.mean(itself):.0%} | {1000 * np.mean(steps > level):.2f} |"
            )
    return "\n".join(lines)


def _largest(name: str, hot: list[dict[str, Any]], onsets: dict[int, list[int]], lead: int) -> tuple[Any, Any]:
    """The largest score in every window before a spike, and in every one without."""
    before, without = [], []
    for run in hot:
        scores = np.asarray(run["scores"][name])
        before += [scores[t - BACK : t - lead + 1].max() for t in onsets[id(run)]]
        without += [scores[w.start : w.stop].max() for w in quiet_windows(onsets[id(run)], len(scores), lead)]
    return np.asarray(before), np.asarray(without)


def _area(name: str, hot: list[dict[str, Any]], onsets: dict[int, list[int]], lead: int) -> float:
    """How often a window before a spike scores higher than one without: 0.5 is worth nothing."""
    before, without = _largest(name, hot, onsets, lead)
    if not len(before) or not len(without):
        return math.nan
    return float(mannwhitneyu(before, without).statistic) / (len(before) * len(without))


def _recall(name: str, level: float, hot: list[dict[str, Any]], onsets: dict[int, list[int]], lead: int) -> str:
    before, without = _largest(name, hot, onsets, lead)
    if not len(before) or not len(without):
        return "-"
    return f"{np.mean(before > level):.0%} ({np.mean(without > level):.0%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("precursor.jsonl"))
    parser.add_argument("--only", nargs="*", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--most", type=int, default=10**6, help="runs at most in this call")
    parser.add_argument("--table", action="store_true", help="print the table of what is there")
    options = parser.parse_args()
    have = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    if options.table:
        print(table(have))
        return
    torch.set_num_threads(1)
    done = {(r["kind"], r["mood"], r["rate"], r["seed"]) for r in have}
    left = [job for job in wanted(options.only) if job not in done][: options.most]
    for kind, mood, rate, seed in left:
        start = time.perf_counter()
        run = {"kind": kind, "mood": mood, "rate": rate, "seed": seed, **train(kind, rate, seed)}
        with options.out.open("a") as file:
            file.write(json.dumps(run) + "\n")
        found = spikes(run["loss"])
        print(f"{kind} {mood} lr {rate:g} seed {seed}: {len(found)} spikes, end {run['loss'][-1]:.3g}, "
              f"{time.perf_counter() - start:.1f} s", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
