"""Findings of dynguard about itself."""

from __future__ import annotations

from dynguard.findings import Evidence, Finding, Severity


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
