"""The part of ``check_plugin`` that calls hooks: what they answer, touch, read and forget."""

from __future__ import annotations

import pickle
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from dynguard.findings import Finding, Section
from dynguard.hookspecs import DETECTORS
from dynguard.signals import Signal
from dynguard.testing.calls import call, hooks_of
from dynguard.testing.fingerprints import changed, fingerprint
from dynguard.testing.reads import count_reads
from dynguard.testing.statistics import is_tensor
from dynguard.testing.trials import Arrays, Trial, interventions, records, start_of_run, trials

# A sink that takes longer than this to close after being told to take a second is called hanging.
DEADLINE_S = 10.0
Make = Callable[[], object]


def event_violations(make: Make, arrays: Arrays, extra: Sequence[Any]) -> Iterator[str]:
    """Detectors and guards, put through all trials and then through the author's own events."""
    plugin = make()
    yield from _quiet_call(plugin, "on_run_start", run=start_of_run())
    for hook, series in trials(arrays).items():
        if hook in hooks_of(plugin):
            for trial in series:
                yield from _one_event(plugin, hook, trial)
    for event in extra:
        if _hook_for(event) in hooks_of(plugin):
            yield from _one_event(plugin, _hook_for(event), _as_trial(event))
    for intervention in interventions():
        yield from _quiet_call(plugin, "on_intervention", intervention=intervention)
    yield from _slow_hooks(plugin)
    yield from _quiet_call(plugin, "on_run_end", run=start_of_run(), error=None)


def _as_trial(event: Any) -> Trial:
    return Trial(f"your {type(event).__name__}", lambda: event)


def _hook_for(event: Any) -> str:
    return {
        "LossEvent": "on_loss",
        "GradientEvent": "on_gradients",
        "ParameterEvent": "on_parameters",
        "EmbeddingEvent": "on_embeddings",
        "TreeEvent": "on_trees",
    }[type(event).__name__]


def _quiet_call(plugin: object, hook: str, **arguments: Any) -> Iterator[str]:
    """Call a hook that answers nothing, if the plugin has it."""
    if hook not in hooks_of(plugin):
        return
    try:
        answer = call(plugin, hook, **arguments)
    except Exception as error:  # noqa: BLE001 - a stranger's code; told as a violation
        yield f"{hook} raised {_tell(error)}"
        return
    if answer is not None:
        yield f"{hook} returned {_short(answer)}; it should return nothing"


def _one_event(plugin: object, hook: str, trial: Trial) -> Iterator[str]:
    event = trial.make()
    before = fingerprint(event)
    try:
        with count_reads() as reads:
            answer = call(plugin, hook, event=event)
    except Exception as error:  # noqa: BLE001 - a stranger's code; told as a violation
        yield f"{hook} raised {_tell(error)} at {trial.label}"
        return
    for place in reads.places:
        yield f"{hook} reads the device: {place}; answer with arrays and read in explain()"
    if hook == "adjust_gradients":
        if answer is not None:
            yield f"{hook} returned {_short(answer)}; it edits event.gradients in place and returns nothing"
        return
    touched = [path for path in changed(before, fingerprint(event)) if path]
    if touched:
        yield f"{hook} changes the event at {trial.label}: {', '.join(touched[:3])}; detectors only observe"
    yield from (f"{hook} at {trial.label}: {problem}" for problem in _answer_violations(answer))


def _answer_violations(answer: Any) -> Iterator[str]:
    if answer is None:
        return
    if not isinstance(answer, Signal):
        yield f"returned {_short(answer)}; it should return a Signal or None"
        return
    yield from _shape_violations(answer)
    if not callable(answer.explain):
        yield f"Signal.explain is {_short(answer.explain)}, not a function"
    elif _any(answer.fired):
        yield from _explain_violations(answer)


def _shape_violations(signal: Signal) -> Iterator[str]:
    for field in ("score", "fired"):
        value = getattr(signal, field)
        dimensions = getattr(value, "ndim", 0)
        if dimensions > 1:
            yield f"Signal.{field} has {dimensions} dimensions; it should have 0 or 1"
    kind = getattr(signal.fired, "dtype", type(signal.fired))
    if "bool" not in str(kind):
        yield f"Signal.fired is {kind}, not bool"
    if isinstance(signal.score, str) or not hasattr(signal.score, "__float__"):
        yield f"Signal.score is {_short(signal.score)}, not a number or an array"


def _explain_violations(signal: Signal) -> Iterator[str]:
    try:
        findings = list(signal.explain())
    except Exception as error:  # noqa: BLE001 - a stranger's code; told as a violation
        yield f"explain() raised {_tell(error)}"
        return
    for finding in findings:
        if not isinstance(finding, Finding):
            yield f"explain() gave {_short(finding)}; it should give Findings"
        elif finding.action > signal.action:
            yield f"a finding asks for {finding.action} but its Signal has action={signal.action}: raise the Signal's"


def _slow_hooks(plugin: object) -> Iterator[str]:
    for hook, kind in (("diagnose", Finding), ("summarize", Section)):
        if hook not in hooks_of(plugin):
            continue
        try:
            answer = call(plugin, hook)
            items = [] if answer is None and hook == "summarize" else [answer] if hook == "summarize" else list(answer)
        except Exception as error:  # noqa: BLE001 - a stranger's code; told as a violation
            yield f"{hook} raised {_tell(error)}"
            continue
        yield from (
            f"{hook} gave {_short(i)}; it should give {kind.__name__}" for i in items if not isinstance(i, kind)
        )


def state_violations(make: Make, arrays: Arrays) -> Iterator[str]:
    """``state_dict`` and ``load_state_dict``: one that is resumed must go on as one that never stopped."""
    plugin = make()
    has = [callable(getattr(plugin, name, None)) for name in ("state_dict", "load_state_dict")]
    if not any(has):
        return
    if not all(has):
        yield "state_dict and load_state_dict belong together; it has only one of them"
        return
    series = [
        (hook, t) for hook, ts in trials(arrays).items() if hook in hooks_of(plugin) and hook in DETECTORS for t in ts
    ]
    try:
        yield from _resume(plugin, make(), series[0::2], series[1::2])
    except Exception as error:  # noqa: BLE001 - a stranger's code; told as a violation
        yield f"saving and loading its state raised {_tell(error)}"


Series = Sequence[tuple[str, Trial]]


def _resume(plugin: Any, fresh: Any, first: Series, second: Series) -> Iterator[str]:
    for one in (plugin, fresh):
        list(_quiet_call(one, "on_run_start", run=start_of_run()))
    _answers(plugin, first)
    try:
        saved = pickle.dumps(plugin.state_dict())
    except Exception as error:  # noqa: BLE001 - pickle raises what it likes
        yield f"state_dict() can't be pickled: {_tell(error)}"
        return
    fresh.load_state_dict(pickle.loads(saved))
    lost = changed(fingerprint(pickle.loads(saved)), fingerprint(fresh.state_dict()))
    if lost:
        yield f"a fresh instance that loaded the state gives another state_dict(): {', '.join(lost[:3]) or 'all of it'}"
    expected, got = _answers(plugin, second), _answers(fresh, second)
    for (hook, trial), mine, theirs in zip(second, expected, got, strict=True):
        if mine != theirs:
            yield f"after load_state_dict it answers otherwise than before: {hook} at {trial.label}"
            return


def _answers(plugin: object, series: Series) -> list[Any]:
    """Fingerprints of the answers and findings, event by event."""
    given = []
    for hook, trial in series:
        answer = call(plugin, hook, event=trial.make())
        findings = list(answer.explain()) if isinstance(answer, Signal) and _any(answer.fired) else []
        given.append((fingerprint(answer), fingerprint(findings)))
    return given


def sink_violations(make: Make) -> Iterator[str]:
    """``write``, ``flush`` and ``close``, on a thread of their own as in a run, with and without a run directory."""
    if "write" not in hooks_of(make()):
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        for where in (directory, None):
            found: list[str] = []
            worker = threading.Thread(target=_drive_sink, args=(make(), where, found), daemon=True)
            worker.start()
            worker.join(DEADLINE_S)
            yield from found
            if worker.is_alive():
                yield f"the sink still works {DEADLINE_S:g} s after it was told to flush and close within 1 s"


def _drive_sink(sink: object, directory: str | None, found: list[str]) -> None:
    suffix = "" if directory else " (in a run without a directory)"
    found += [text + suffix for text in _quiet_call(sink, "on_run_start", run=start_of_run(directory))]
    for record in records():
        problems = _quiet_call(sink, "write", record=record)
        found += [f"{text}, given {type(record).__name__}{suffix}" for text in problems]
    for hook in ("flush", "close"):
        found += [text + suffix for text in _quiet_call(sink, hook, timeout=1.0)]


def _any(fired: Any) -> bool:
    return bool(fired.any()) if is_tensor(fired) or hasattr(fired, "any") else bool(fired)


def _tell(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _short(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def unique(violations: Iterable[str], limit: int = 20) -> list[str]:
    """Violations without repeats, as many as a person will read."""
    return list(dict.fromkeys(violations))[:limit]
