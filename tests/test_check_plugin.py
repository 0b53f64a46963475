"""``check_plugin``: what obeys the contract passes, and each way of breaking it is told in words."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from dynguard import Action, Finding, Signal, hookimpl, validated
from dynguard.testing import MemorySink, check_plugin, gradient_event, loss_event


class Good:
    """A detector with options, state and all that the contract asks for."""

    @validated
    def __init__(self, *, limit: float = 50.0) -> None:
        self.limit = limit
        self.count: Any = 0

    @hookimpl
    def on_gradients(self, event: Any) -> Signal:
        fired = ~(event.norms <= self.limit)
        self.count = self.count + fired.any()
        return Signal(self.count, fired, lambda: self.explain(event, fired), Action.SKIP)

    def explain(self, event: Any, fired: Any) -> Iterator[Finding]:
        for name, hit in zip(event.names, fired.tolist(), strict=True):
            if hit:
                yield Finding(kind="grad_spike", subject=name, action=Action.SKIP)

    def state_dict(self) -> dict[str, Any]:
        return {"count": int(self.count)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def violations(plugin: object, **more: Any) -> list[str]:
    try:
        check_plugin(plugin, **more)
    except AssertionError as error:
        title, *rest = str(error).splitlines()
        assert title.endswith("breaks the plugin contract:")
        return [line.removeprefix("  - ") for line in rest]
    return []


@pytest.mark.parametrize("arrays", ["numpy", "torch", None])
@pytest.mark.parametrize(
    "plugin", [Good, Good(limit=2.0), MemorySink, MemorySink()], ids=["class", "instance", "sink", "a sink"]
)
def test_what_obeys_the_contract_passes(plugin: object, arrays: Any) -> None:
    check_plugin(plugin, arrays=arrays)


def test_an_instance_is_tried_on_copies() -> None:
    plugin = Good()
    check_plugin(plugin)
    assert plugin.count == 0


def test_options_reach_the_plugin() -> None:
    check_plugin(Good, options={"limit": 3.0})
    assert "unknown option 'limt'" in violations(Good, options={"limt": 3.0})[0]


class Quiet:
    @hookimpl
    def on_loss(self, event: Any) -> None: ...


class UnknownHook:
    @hookimpl
    def on_gradient(self, event: Any) -> None: ...


class UnknownArgument:
    @hookimpl
    def on_loss(self, event: Any, model: Any) -> None: ...


class Unmarked(Quiet):
    def on_gradients(self, event: Any) -> None: ...


class Both(Quiet):
    @hookimpl
    def adjust_gradients(self, event: Any) -> None: ...


class Wrapper:
    @hookimpl(wrapper=True)
    def on_loss(self, event: Any) -> Any:
        return (yield)


class Positional(Quiet):
    @validated
    def __init__(self, limit: float = 1.0) -> None: ...


class Unvalidated(Quiet):
    def __init__(self, *, limit: float = 1.0) -> None: ...


class Swallows(Quiet):
    @validated
    def __init__(self, *, limit: float = 1.0, **rest: Any) -> None: ...


class Untyped(Quiet):
    @validated
    def __init__(self, *, limit=1.0) -> None: ...  # type: ignore[no-untyped-def]


@pytest.mark.parametrize(
    ("plugin", "words"),
    [
        (None, "NoneType"),
        (np, "module"),
        (check_plugin, "function"),
        (object, "no hook"),
        (UnknownHook, "'on_gradient', which is no hook. Did you mean 'on_gradients'"),
        (UnknownArgument, "on_loss wants 'model', but the hook gives (event)"),
        (Unmarked, "on_gradients is not marked @hookimpl"),
        (Both, "make that two plugins"),
        (Wrapper, "hook wrapper"),
        (Positional, "'limit' is not keyword-only"),
        (Unvalidated, "decorate __init__ with @validated"),
        (Swallows, "an unknown option is accepted in silence"),
        (Untyped, "option 'limit' has no type"),
    ],
)
def test_a_plugin_that_is_built_wrong_is_told_how(plugin: object, words: str) -> None:
    assert any(words in violation for violation in violations(plugin)), violations(plugin)


def test_all_violations_are_told_together() -> None:
    class Wrong(Both, UnknownHook, Positional):
        pass

    assert len(violations(Wrong)) >= 3


# Each of these answers on_gradients; what is wrong with it is said in words.
FINDING = Finding(kind="grad_spike", action=Action.SKIP)


def in_place(event: Any) -> None:
    if event.gradients[0] is not None:
        event.gradients[0].mul_(2.0)


def shared_statistics(event: Any) -> None:
    event.norms.clamp_(max=0.5)


def replaced(event: Any) -> None:
    event.gradients[0] = None


def raises_on_nan(event: Any) -> None:
    # A fair way to look at numbers on the host in a test; in a plugin it is the read that is reported.
    norms = np.array(event.norms.tolist())
    if np.isnan(norms).any():
        raise ArithmeticError("no numbers")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (in_place, "changes the event: gradients.0; detectors only observe (at step 0 (clean))"),
        (shared_statistics, "changes the event: statistics.norms"),
        (replaced, "changes the event: gradients.0"),
        (raises_on_nan, "raised ArithmeticError: no numbers (at step 62 (NaN in one entry))"),
        (lambda event: event.norms.max() > 1, "returned Tensor tensor(False); it should return a Signal or None"),
        (
            lambda event: Signal(0.0, bool(event.norms.max() > 1), list),
            "reads the device: Tensor.__bool__ at test_check",
        ),
        (lambda event: Signal(event.norms.sum().item(), False, list), "reads the device: Tensor.item at test_check"),
        (lambda event: Signal(0.0, event.norms[None] > 1, list), "fired has 2 dimensions"),
        (lambda event: Signal(0.0, event.norms, list), "fired is torch.float32, not bool"),
        (lambda event: Signal(event.norms[None], False, list), "score has 2 dimensions"),
        (lambda event: Signal("high", False, list), "score is str 'high'"),
        (lambda event: Signal(0.0, False, [FINDING]), "explain is list"),  # type: ignore[arg-type]
        (lambda event: Signal(0.0, True, lambda: ["spike"]), "explain() gave str 'spike'"),  # type: ignore[list-item]
        (lambda event: Signal(0.0, True, lambda: [FINDING]), "action=warn whose finding asks for more: skip"),
        (lambda event: Signal(0.0, True, lambda: 1 / 0), "explain() raised ZeroDivisionError"),  # type: ignore[arg-type,return-value]
        (lambda event: Signal(event.norms, False, list, learn=lambda x: x[9]), "learn() raised IndexError"),
    ],
)
def test_a_detector_that_answers_wrong_is_told_how(answer: Any, words: str) -> None:
    class Detector:
        @hookimpl
        def on_gradients(self, event: Any) -> Any:
            return answer(event)

    assert any(words in violation for violation in violations(Detector)), violations(Detector)


def test_a_violation_is_told_once_with_the_first_event_that_showed_it() -> None:
    class Detector:
        @hookimpl
        def on_loss(self, event: Any) -> Any:
            return 3

    assert violations(Detector) == ["on_loss returned int 3; it should return a Signal or None (at step 0 (loss 1))"]


def test_arrays_that_are_on_the_cpu_anyway_may_be_read() -> None:
    class Quick:
        @hookimpl
        def on_gradients(self, event: Any) -> Signal:
            norms = event.norms.numpy() if event.norms.device.type == "cpu" else event.norms
            return Signal(norms.max(), norms.max() > 1e9, list)

    check_plugin(Quick)


def test_arrays_of_the_plugins_own_belong_on_the_device_of_the_event() -> None:
    class Mixes:
        def __init__(self) -> None:
            self.level = torch.ones(6)

        @hookimpl
        def on_gradients(self, event: Any) -> None:
            if len(event.norms) == 6:
                self.level = self.level + event.norms

    (found,) = violations(Mixes)
    assert found.startswith("on_gradients raised RuntimeError off the CPU: ")
    assert "meta" in found


def test_scores_are_handed_back_as_the_bus_does() -> None:
    learnt: list[list[float]] = []

    class Learner:
        @hookimpl
        def on_loss(self, event: Any) -> Any:
            return None if event.loss is None else Signal(event.loss, event.loss > 1e9, list, learn=learnt.append)

    check_plugin(Learner)
    assert learnt[:2] == [[1.0], [pytest.approx(0.9)]]


def test_a_guard_may_edit_gradients_but_not_read_them() -> None:
    class Halve:
        @hookimpl
        def adjust_gradients(self, event: Any) -> None:
            for gradient in event.gradients:
                if gradient is not None:
                    gradient.mul_(0.5)

    class Look(Halve):
        @hookimpl
        def adjust_gradients(self, event: Any) -> None:
            if event.global_norm > 1:
                super().adjust_gradients(event)

    check_plugin(Halve)
    assert "adjust_gradients reads the device: Tensor.__bool__" in violations(Look)[0]


def test_further_events_are_tried_too() -> None:
    class Picky:
        @hookimpl
        def on_gradients(self, event: Any) -> None:
            if event.step == 4711:
                raise LookupError("never seen")

    check_plugin(Picky, events=[loss_event(4711)])
    found = violations(Picky, events=[gradient_event(4711, gradients={"a": torch.ones(2)})])
    assert found == ["on_gradients raised LookupError: never seen (at your GradientEvent)"]


def test_slow_hooks_give_findings_and_sections() -> None:
    class Slow:
        @hookimpl
        def diagnose(self) -> Any:
            return ["stuck"]

        @hookimpl
        def summarize(self) -> Any:
            return {"title": "x"}

        @hookimpl
        def on_intervention(self, intervention: Any) -> None:
            raise KeyError(intervention.action.value)

    found = " ".join(violations(Slow))
    assert "diagnose gave str 'stuck'; it should give a Finding" in found
    assert "summarize gave dict {'title': 'x'}; it should give a Section" in found
    assert "on_intervention raised KeyError: 'proceed'" in found


# -- state


class Forgets(Good):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads nothing."""


class Halfway(Good):
    """Saves and loads the same thing, but it is not all that it goes by."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    @hookimpl
    def on_gradients(self, event: Any) -> Signal:
        self.seen += 1
        return Signal(float(self.seen), False, list)


class Unpicklable(Good):
    def state_dict(self) -> dict[str, Any]:
        return {"lock": threading.Lock()}


class OnlySaves:
    @hookimpl
    def on_gradients(self, event: Any) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}


class BadLoader(Good):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["counts"]


@pytest.mark.parametrize(
    ("plugin", "words"),
    [
        (Forgets, "gives another state_dict(): count"),
        (Halfway, "answers otherwise than before: on_gradients at step 1"),
        (Unpicklable, "can't be pickled: TypeError"),
        (OnlySaves, "belong together"),
        (BadLoader, "raised KeyError: 'counts'"),
    ],
)
def test_state_that_does_not_survive_is_told(plugin: type, words: str) -> None:
    assert any(words in violation for violation in violations(plugin)), violations(plugin)
