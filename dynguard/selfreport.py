"""Findings of dynguard about itself."""

from __future__ import annotations

import math
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import dynguard
from dynguard.actions import Action
from dynguard.events import RunInfo
from dynguard.findings import Evidence, Finding, Severity

if TYPE_CHECKING:
    from dynguard.settings import Settings
    from dynguard.torch.source import Source
    from dynguard.torch.watch import Watch


def plugin_failed(name: str, hook: str, error: BaseException, failures: int, step: int) -> Finding:
    """A plugin was switched off after too many exceptions."""
    return Finding(
        kind="plugin_failed",
        severity=Severity.WARNING,
        step=step,
        subject=name,
        detector="dynguard",
        premise=f"plugin {name!r} raised {type(error).__name__} in {hook}: {error}",
        implies="it is switched off for the rest of this run; training and the other plugins are not affected",
        evidence=(Evidence(name="failures", value=failures),),
    )


def sink_dropped(sink: str, count: int, step: int) -> Finding:
    """Records did not reach a sink."""
    return Finding(
        kind="sink_dropped",
        severity=Severity.WARNING,
        step=step,
        subject=sink,
        detector="dynguard",
        premise=f"sink {sink!r} could not keep up or failed: {count} records were not delivered to it",
        implies="what this sink shows is incomplete; training was not held up",
        evidence=(Evidence(name="dropped_records", value=count),),
    )


def dropped_loss(losses: Sequence[float], step: int, source: str) -> list[Finding]:
    """A GradScaler dropped a step whose observed loss is non-finite: no overflow of the scale, a fault of the batch."""
    bad = [value for value in losses if not math.isfinite(value)]
    if not bad:
        return []
    nan = any(math.isnan(value) for value in bad)
    return [
        Finding(
            kind="nan_loss" if nan else "inf_loss",
            severity=Severity.ERROR,
            step=step,
            source=source,
            action=Action.SKIP,
            detector="dynguard",
            premise=f"the loss is {bad[0]}, and the GradScaler has dropped the step",
            implies="this is no overflow of scaled gradients: the unscaled loss is not finite",
            expected_effect="weights stay as they were, and what the forward wrote into buffers is undone",
            confidence=1.0,
            evidence=(Evidence(name="loss", value=bad[0]), Evidence(name="micro_batches", value=len(losses))),
        )
    ]


def run_info(
    run: str,
    directory: Path | None,
    plugins: tuple[str, ...],
    settings: Settings,
    watch: Watch | None,
    sources: Sequence[Source],
    rank: int,
) -> RunInfo:
    """What ``on_run_start`` is told."""
    torch = sys.modules.get("torch")
    return RunInfo(
        run=run,
        directory=directory,
        parameters={s.name: s.names for s in sources},
        plugins=plugins,
        rank=rank,
        world_size=1 if watch is None else watch.world_size,
        ranks=1 if watch is None or watch.ranks is None else watch.ranks.size,
        info={
            "dynguard": dynguard.__version__,
            "python": platform.python_version(),
            "torch": str(getattr(torch, "__version__", "")) or None,
            "plugins": list(plugins),
            "settings": settings.model_dump(mode="json"),
            "optimizers": {s.name: type(s.optimizer).__name__ for s in sources},
        },
    )
