"""Recall and false alarms of dynguard and of published rules, on the same healthy runs with planted faults.

    python benchmarks/detection.py [--seeds 100 101 102 103] [--kinds cnn gpt] [--json OUT]

Every run of the zoo trains as it would; at random steps (from step 60 on, 60 to 180 apart) a fault is planted: one
layer's gradient times 5, 20 or 100, one NaN or infinite entry in one layer, a mis-scaled or garbage batch, a batch with
shuffled labels. What is planted is kept from the weights whoever noticed it, so that all rules see one and the same
run; each rule's own state takes in what the rule lets in. dynguard runs as a user would run it, in ``guard`` mode.
Steps without a fault are clean, and an alarm there is false. Slow faults (a layer's gradient growing 2% a step, the
learning rate times 10) are planted for good, in runs of their own. The seeds differ from those that the thresholds'
constants were chosen on (0, 1, 2).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks import peers, zoo
from benchmarks.rules import Peer, Ratio, Rule, Said, Seen, SixSigma, ZClip
from dynguard import FlowManager, Severity

SCALES = {"x5": 5.0, "x20": 20.0, "x100": 100.0}
ENTRIES = {"nan": math.nan, "inf": math.inf}
SPIKES = (
    "grad_spike",
    "loss_spike",
    "grad_drift",
    "lr_jump",
    "nan_grad",
    "inf_grad",
    "nan_loss",
    "inf_loss",
    "empty_batch",
    "update_spike",
)


@dataclass
class Tally:
    """What one rule did over all runs of a kind."""

    clean: int = 0
    false: int = 0
    planted: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    caught: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    named: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    right: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    clean_scores: list[float] = field(default_factory=list)
    fault_scores: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, other: Tally) -> None:
        self.clean += other.clean
        self.false += other.false
        for key in ("planted", "caught", "named", "right"):
            for fault, count in getattr(other, key).items():
                getattr(self, key)[fault] += count
        self.clean_scores += other.clean_scores
        for fault, scores in other.fault_scores.items():
            self.fault_scores[fault] += scores


def layers_of(run: zoo.Run, source: str) -> dict[str, list[tuple[str, nn.Parameter]]]:
    """The layers that an optimizer trains: module name -> its named parameters."""
    mine = {id(p) for group in run.optimizers[source].param_groups for p in group["params"]}
    found: dict[str, list[tuple[str, nn.Parameter]]] = defaultdict(list)
    for key, model in run.models.items():
        for name, parameter in model.named_parameters():
            if id(parameter) in mine:
                full = f"{key}.{name}" if key else name
                found[full.rsplit(".", 1)[0]].append((full, parameter))
    return found


class Guard:
    """dynguard as one more rule: a real FlowManager whose findings are read after each optimizer step."""

    def __init__(self, run: zoo.Run) -> None:
        single = set(run.models) == {""}
        models: Any = run.models[""] if single else run.models
        optimizers: Any = run.optimizers[""] if set(run.optimizers) == {""} else run.optimizers
        self.flow = FlowManager(models, optimizers, plugins=["spike", "health"], close_timeout=1.0)
        self.told = 0

    def said(self, source: str) -> Said:
        """What was said since the last call; the score is the largest z of the three streams."""
        waiting = self.flow.plugin("spike")._watched[source].pending
        streams = [z for z in (waiting or {}).get("streams") or [] if math.isfinite(z)]
        judge = self.flow._judge
        fresh = [f for f in list(judge.findings)[self.told :] if f.severity >= Severity.WARNING and f.kind in SPIKES]
        self.told = len(judge.findings)
        layers = [f.subject for f in fresh if f.subject]
        bad = any(f.kind.startswith(("nan", "inf")) for f in fresh)
        return Said(math.inf if bad else max(streams, default=math.nan), bool(fresh), layers[0] if layers else None)


def norms_of(layers: dict[str, list[tuple[str, nn.Parameter]]]) -> dict[str, float]:
    """Gradient norm by parameter."""
    pairs = [(n, p) for members in layers.values() for n, p in members]
    return {n: 0.0 if p.grad is None else float(torch.linalg.vector_norm(p.grad)) for n, p in pairs}


def plant(layers: dict[str, list[tuple[str, nn.Parameter]]], kind: str, dice: random.Random) -> str:
    """Put a gradient fault into a random layer that has a gradient; its name."""
    alive = [name for name, members in layers.items() if all(p.grad is not None and p.grad.any() for _, p in members)]
    name = dice.choice(alive or list(layers))
    for i, (_, parameter) in enumerate(layers[name]):
        assert parameter.grad is not None
        if kind in SCALES:
            parameter.grad.mul_(SCALES[kind])
        elif i == 0:
            parameter.grad.view(-1)[dice.randrange(parameter.grad.numel())] = ENTRIES[kind]
    return name


def one_run(kind: str, seed: int, rules: dict[str, Any]) -> dict[str, Tally]:
    """Train one run with faults; what each rule made of it."""
    run = zoo.make(kind, seed)
    dice = random.Random(seed)
    guard = Guard(run)
    live: dict[str, dict[str, Rule]] = {name: {s: make() for s in run.optimizers} for name, make in rules.items()}
    tallies = {name: Tally() for name in ("dynguard", *rules)}
    layers = {source: layers_of(run, source) for source in run.optimizers}
    faults = [*SCALES, *ENTRIES, *run.spoil]
    due = {source: 60 + dice.randrange(100) for source in run.optimizers}
    buffers = [b for m in run.models.values() for b in m.buffers()]
    hold = {source: Hold(optimizer) for source, optimizer in run.optimizers.items()}
    for step in range(run.steps):
        run.set_rate(step)
        batch = run.batch(step)
        kept = [b.clone() for b in buffers]
        fault = None
        lucky = next((s for s, at in due.items() if at <= step), None)
        if lucky is not None:
            fault = dice.choice(faults)
            due[lucky] = step + dice.randrange(60, 181)
        bad_batch = fault in run.spoil
        spoiled = run.spoil[fault](batch) if fault is not None and bad_batch else batch
        for source, loss in run.phases(spoiled):
            optimizer = run.optimizers[source]
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
            hit = fault is not None and (bad_batch or source == lucky)
            layer = plant(layers[source], fault, dice) if hit and fault is not None and not bad_batch else None
            norms = norms_of(layers[source])
            seen = Seen(norms, math.hypot(*norms.values()), float(loss.detach()))
            guard.flow.observe(loss=loss)
            hold[source].armed = hit
            optimizer.step()
            said = {"dynguard": guard.said(source), **{n: live[n][source].step(seen) for n in rules}}
            for name, answer in said.items():
                note(tallies[name], answer, fault if hit else None, layer)
        if fault is not None:
            for buffer, value in zip(buffers, kept, strict=True):
                buffer.copy_(value)
    guard.flow.close()
    return tallies


class Hold:
    """Keeps a planted fault from the weights, after all who watch have seen it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.armed = False
        optimizer.register_step_pre_hook(self.before)

    def before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.armed:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None


def note(tally: Tally, answer: Said, fault: str | None, layer: str | None) -> None:
    """Count one answer."""
    if fault is None:
        tally.clean += 1
        tally.false += answer.alarm
        tally.clean_scores.append(answer.score)
        return
    tally.planted[fault] += 1
    tally.caught[fault] += answer.alarm
    tally.fault_scores[fault].append(answer.score)
    if answer.alarm and layer is not None and answer.layer is not None:
        tally.named[fault] += 1
        tally.right[fault] += answer.layer.startswith(f"{layer}.") or answer.layer == layer


def slow_fault(kind: str, seed: int, how: str, rules: dict[str, Any]) -> dict[str, int | None]:
    """Steps from a lasting fault's start to each rule's first alarm within 300 steps; None if there is none."""
    run = zoo.make(kind, seed)
    guard = Guard(run)
    source = next(iter(run.optimizers))
    live = {name: make() for name, make in rules.items()}
    layers = layers_of(run, source)
    name = random.Random(seed).choice(list(layers))
    begin, delay = 400, dict.fromkeys(("dynguard", *rules))
    for step in range(begin + 300):
        run.set_rate(step)
        if how == "lr x10" and step >= begin:
            for group in run.optimizers[source].param_groups:
                group["lr"] *= 10
        batch = run.batch(step)
        for current, loss in run.phases(batch):
            optimizer = run.optimizers[current]
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
            if current == source and how == "drift 2%" and step >= begin:
                for _, parameter in layers[name]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(1.02 ** (step - begin))
            norms = norms_of(layers_of(run, current) if current != source else layers)
            guard.flow.observe(loss=loss)
            optimizer.step()
            said = {"dynguard": guard.said(current).alarm}
            if current == source:
                seen = Seen(norms, math.hypot(*norms.values()), float(loss.detach()))
                said.update({n: rule.step(seen).alarm for n, rule in live.items()})
            for rule, alarm in said.items():
                if alarm and step >= begin and delay[rule] is None:
                    delay[rule] = step - begin
    guard.flow.close()
    return delay


def at_equal_false_alarms(tally: Tally, rate: float) -> dict[str, float]:
    """Recall by fault at the threshold that ``rate`` of the clean scores pass."""
    clean = np.array([s for s in tally.clean_scores if not math.isnan(s)])
    if not len(clean):
        return {}
    bound = np.quantile(clean, 1 - rate, method="higher")
    return {f: float(np.mean([s > bound for s in v])) for f, v in tally.fault_scores.items() if v}


def share(tally: Tally, fault: str) -> str:
    return f"{tally.caught[fault] / tally.planted[fault]:.3f}" if tally.planted[fault] else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", nargs="*", type=int, default=[100, 101, 102, 103])
    parser.add_argument("--kinds", nargs="*", default=list(zoo.KINDS))
    parser.add_argument("--no-slow", action="store_true", help="leave the lasting faults out")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rules: dict[str, Any] = {"zclip": ZClip, "mean+6sd/128": SixSigma, "ratio 10": Ratio}
    for version in peers.VERSIONS:
        module = peers.load(version)
        rules[f"stabilityguard {version}"] = lambda m=module: Peer(m)
    console = Console(width=170)
    names = ("dynguard", *rules)
    by_kind: dict[str, dict[str, Tally]] = {}
    began = time.time()
    for kind in options.kinds:
        total = {name: Tally() for name in names}
        for seed in options.seeds:
            for name, tally in one_run(kind, seed, rules).items():
                total[name].add(tally)
        by_kind[kind] = total
        show(console, kind, total)
    everything = {name: Tally() for name in names}
    for total in by_kind.values():
        for name, tally in total.items():
            everything[name].add(tally)
    show(console, "all kinds", everything)
    for kind, total in (*by_kind.items(), ("all kinds", everything)):
        curve(console, kind, total)
    delays = {} if options.no_slow else slow(console, options, rules)
    console.print(f"{time.time() - began:.0f} s")
    if options.json:
        rows = {k: {n: summary(t) for n, t in total.items()} for k, total in (*by_kind.items(), ("all", everything))}
        options.json.write_text(json.dumps({"kinds": rows, "slow": delays}, indent=1))


def slow(console: Console, options: argparse.Namespace, rules: dict[str, Any]) -> dict[str, Any]:
    """Print and return the delays of lasting faults."""
    delays: dict[str, Any] = {}
    for how in ("drift 2%", "lr x10"):
        found = [slow_fault(k, s, how, rules) for k in options.kinds for s in options.seeds[:2]]
        table = Table(title=f"{how}: first alarm within 300 steps", show_header=True)
        for column in ("rule", "seen", "runs", "median delay, steps"):
            table.add_column(column)
        for name in ("dynguard", *rules):
            seen = [d[name] for d in found if d[name] is not None]
            middle = f"{float(np.median(np.array(seen, float))):.0f}" if seen else "-"
            table.add_row(name, str(len(seen)), str(len(found)), middle)
        console.print(table)
        delays[how] = found
    return delays


def summary(tally: Tally) -> dict[str, Any]:
    return {
        "clean": tally.clean, "false": tally.false, "planted": dict(tally.planted), "caught": dict(tally.caught),
        "named": dict(tally.named), "right": dict(tally.right),
    }  # fmt: skip


def show(console: Console, title: str, total: dict[str, Tally]) -> None:
    """Recall by fault, false alarms per 10,000 clean steps, right layer."""
    faults = sorted({f for t in total.values() for f in t.planted})
    table = Table(title=f"{title}: {total['dynguard'].clean} clean steps")
    for column in ("rule", "false/10k", *(f"{f} ({total['dynguard'].planted[f]})" for f in faults), "right layer"):
        table.add_column(column)
    for name, tally in total.items():
        named, right = sum(tally.named.values()), sum(tally.right.values())
        false = f"{tally.false / max(tally.clean, 1) * 1e4:.1f}"
        table.add_row(name, false, *(share(tally, f) for f in faults), f"{right / named:.3f}" if named else "-")
    console.print(table)


def curve(console: Console, title: str, total: dict[str, Tally]) -> None:
    """Recall at equal false alarms: the trade-off of each rule's statistic."""
    table = Table(title=f"{title}: recall at equal false alarms (by each rule's statistic)")
    rates = (1e-3, 3e-4)
    shown = ("x5", "x20", "outlier_batch")
    for column in ("rule", *(f"{f} @ {r * 1e4:.0f}/10k" for r in rates for f in shown)):
        table.add_column(column)
    for name, tally in total.items():
        found = [at_equal_false_alarms(tally, r) for r in rates]
        table.add_row(name, *(f"{row[f]:.3f}" if f in row else "-" for row in found for f in shown))
    console.print(table)


if __name__ == "__main__":
    main()
