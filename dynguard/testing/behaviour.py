"""The part of ``check_plugin`` that calls hooks: what they answer, touch and forget."""

from __future__ import annotations

import pickle
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from dynguard.findings import Finding, Section
from dynguard.hookspecs import DETECTORS
from dynguard.signals import Signal
from dynguard.testing.calls import call, hooks_of, problems
from dynguard.testing.fingerprints import changed, fingerprint
from dynguard.testing.statistics import is_tensor
from dynguard.testing.trials import Arrays, Trial, interventions, records, start_of_run, trials

# A sink that takes longer than this to close after being told to take a second is called hanging.
DEADLINE_S = 10.0
Make = Callable[[], object]


def event_violations(make: Make, arrays: Arrays, extra: Sequence[Any]) -> Iterator[str]:
    """Detectors and guards, put through all trials and then through the author's own events."""
    plugin = make()
    yield from problems(plugin, "on_run_start", run=start_of_run())
    own = [(_hook_for(event), _as_trial(event)) for event in extra]
    for hook, series in trials(arrays).items():
        if hook in hooks_of(plugin):
            yield from _series(plugin, hook, [*series, *(trial for wanted, trial in own if wanted == hook)])
    for intervention in interventions():
        yield from problems(plugin, "on_intervention", intervention=intervention)
    yield from _slow_hooks(plugin)
    yield from problems(plugin, "on_run_end", run=start_of_run(), error=None)


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


def _series(plugin: object, hook: str, series: Sequence[Trial]) -> Iterator[str]:
    """Each violation once, with the first event that showed it."""
    told: set[str] = set()
    for trial in series:
        for violation in _one_event(plugin, hook, trial.make()):
            if violation not in told:
                told.add(violation)
                yield f"{hook} {violation} (at {trial.label})"


def _one_event(plugin: object, hook: str, event: Any) -> Iterator[str]:
    before = fingerprint(event)
    try:
        answer = call(plugin, hook, event=event)
    except Exception as error:  # noqa: BLE001 - a stranger's code; told as a violation
        yield f"raised {_tell(error)}"
        return
    if hook in ("adjust_embeddings", "adjust_gradients"):
        if answer is not None:
            yield f"returned {_short(answer)}; it changes gradients or the update and returns nothing"
        return
    touched = [path for path in changed(before, fingerprint(event)) if path]
    if touched:
        yield f"changes the event: {', '.join(touched[:3])}; detectors only observe"
    yield from _answer_violations(answer)


def _answer_violations(answer: Any) -> Iterator[str]:
    if answer is None:
        return
    if not isinstance(answer, Signal):
        yield f"returned {_short(answer)}; it should return a Signal or None"
        return
    yield from _shape_violations(answer)
    if not callable(answer.explain):
        yield f"answers a Signal whose explain is {_short(answer.explain)}, not a function"
        return
    try:
        _learn(answer)
    except Exception as error:  # noqa: BLE001 - a stranger's code; told as a violation
        yield f"answers a Signal whose learn() raised {_tell(error)}"
    if _any(answer.fired):
        yield from _explain_violations(answer)


def _shape_violations(signal: Signal) -> Iterator[str]:
    for field in ("score", "fired"):
        value = getattr(signal, field)
        dimensions = getattr(value, "ndim", 0)
        if dimensions > 1:
            yield f"answers a Signal whose {field} has {dimensions} dimensions; it should have 0 or 1"
    kind = getattr(signal.fired, "dtype", type(signal.fired))
    if "bool" not in str(kind):
        yield f"answers a Signal whose fired is {kind}, not bool"
    if isinstance(signal.score, str) or not hasattr(signal.score, "__float__"):
        yield f"answers a Signal whose score is {_short(signal.score)}, not a number or an array"


def _explain_violations(signal: Signal) -> Iterator[str]:
    try:
        findings = list(signal.explain())
    except Exception as error:  # noqa: BLE001 - a stranger's code; told as a violation
        yield f"answers a Signal whose explain() raised {_tell(error)}"
        return
    for finding in findings:
        if not isinstance(finding, Finding):
            yield f"answers a Signal whose explain() gave {_short(finding)}; it should give Findings"
        elif finding.action > signal.action:
            yield f"answers a Signal with action={signal.action} whose finding asks for more: {finding.action}"


def _slow_hooks(plugin: object) -> Iterator[str]:
    yield from _slow_hook(plugin, "diagnose", Finding, lambda answer: list(answer or ()))
    yield from _slow_hook(plugin, "summarize", Section, lambda answer: [] if answer is None else [answer])


def _slow_hook(plugin: object, hook: str, kind: type, unpack: Callable[[Any], list[Any]]) -> Iterator[str]:
    if hook not in hooks_of(plugin):
        return
    try:
        items = unpack(call(plugin, hook))
    except Exception as error:  # noqa: BLE001 - a stranger's code; told as a violation
        yield f"{hook} raised {_tell(error)}"
        return
    yield from (f"{hook} gave {_short(i)}; it should give a {kind.__name__}" for i in items if not isinstance(i, kind))


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
        list(problems(one, "on_run_start", run=start_of_run()))
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
    """Fingerprints of the answers and findings, event by event; an exception counts as an answer."""
    return [_answer(plugin, hook, trial) for hook, trial in series]


def _answer(plugin: object, hook: str, trial: Trial) -> Any:
    try:
        answer = call(plugin, hook, event=trial.make())
        if isinstance(answer, Signal):
            _learn(answer)
        findings = list(answer.explain()) if isinstance(answer, Signal) and _any(answer.fired) else []
    except Exception as error:  # noqa: BLE001 - told already where the hooks are tried
        return _tell(error)
    return fingerprint(answer), fingerprint(findings)


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
    found += [text + suffix for text in problems(sink, "on_run_start", run=start_of_run(directory))]
    for record in records():
        raised = problems(sink, "write", record=record)
        found += [f"{text}, given {type(record).__name__}{suffix}" for text in raised]
    for hook in ("flush", "close"):
        found += [text + suffix for text in problems(sink, hook, timeout=1.0)]


def _learn(signal: Signal) -> None:
    """Hand the scores back, as the bus does once it has read them and before anything is explained."""
    if signal.learn is not None:
        signal.learn([float(score) for score in np.ravel(_on_host(signal.score))])


def _on_host(value: Any) -> Any:
    return value.detach().cpu().float().numpy() if is_tensor(value) else value


def _any(fired: Any) -> bool:
    return bool(fired.any()) if is_tensor(fired) or hasattr(fired, "any") else bool(fired)


def _tell(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _short(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
