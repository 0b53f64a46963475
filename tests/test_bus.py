"""The bus: order, adapting of arguments, isolation, circuit breaker, metering, and what it refuses."""

from __future__ import annotations

import logging

import pytest

from dynguard import hookimpl
from dynguard.bus import Bus
from dynguard.errors import PluginError, TrainingStopped


class Recorder:
    def __init__(self, name: str, log: list[str]) -> None:
        self.label, self.log = name, log

    @hookimpl
    def on_gradients(self, event: object) -> str:
        self.log.append(self.label)
        return self.label


class First(Recorder):
    @hookimpl(tryfirst=True)
    def on_gradients(self, event: object) -> str:
        return super().on_gradients(event)


class Last(Recorder):
    @hookimpl(trylast=True)
    def on_gradients(self, event: object) -> str:
        return super().on_gradients(event)


class Broken:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    @hookimpl
    def on_gradients(self, event: object) -> None:
        raise self.error


def test_plugins_are_called_in_the_order_of_their_names_then_first_and_last() -> None:
    log: list[str] = []
    bus = Bus([("a", Last("a", log)), ("b", Recorder("b", log)), ("c", Recorder("c", log)), ("d", First("d", log))])
    answers = bus.gradients(object())
    assert log == ["d", "b", "c", "a"]
    assert answers == [("d", "d"), ("b", "b"), ("c", "c"), ("a", "a")]


def test_the_untimed_path_gives_the_same_answers_as_the_timed_one() -> None:
    log: list[str] = []
    bus = Bus(
        [("a", Recorder("a", log)), ("b", Broken(ValueError("x"))), ("c", Recorder("c", log))], max_failures=10**6
    )
    answers = [bus.gradients(object()) for _ in range(200)]
    assert answers == [[("a", "a"), ("c", "c")]] * 200
    assert bus.failures == {"b": 200}


def test_a_hook_may_leave_out_arguments_and_take_them_in_any_order() -> None:
    seen: list[object] = []

    class Some:
        @hookimpl
        def on_run_end(self, error: object) -> None:
            seen.append(error)

        @hookimpl
        def on_gradients(self) -> None:
            seen.append("no arguments")

    class Swapped:
        @hookimpl
        def on_run_end(self, error: object, run: object) -> None:
            seen.append((error, run))

    bus = Bus([("a", Some()), ("b", Swapped())])
    bus.channels["on_run_end"].each("the run", "the error")
    bus.gradients(object())
    assert seen == ["the error", ("the error", "the run"), "no arguments"]


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(3), RecursionError()])
def test_a_failing_plugin_is_logged_once_counted_and_switched_off(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[tuple[str, str, bool]] = []
    log: list[str] = []
    bus = Bus(
        [("bad", Broken(error)), ("good", Recorder("good", log))],
        max_failures=3,
        report=lambda name, hook, _, off: told.append((name, hook, off)),
    )
    with caplog.at_level(logging.WARNING, "dynguard"):
        for _ in range(5):
            assert bus.gradients(object()) == [("good", "good")]
    assert told == [("bad", "on_gradients", False), ("bad", "on_gradients", False), ("bad", "on_gradients", True)]
    assert [name for name, _ in bus.plugins] == ["good"]
    assert len(caplog.records) == 2  # the first failure, and the switching off
    assert len(log) == 5


def test_the_users_interrupt_and_a_deliberate_stop_pass_through() -> None:
    for error in (KeyboardInterrupt(), TrainingStopped("stop")):
        with pytest.raises(type(error)):
            Bus([("a", Broken(error))]).gradients(object())


def test_strict_re_raises() -> None:
    with pytest.raises(ValueError, match="boom"):
        Bus([("a", Broken(ValueError("boom")))], strict=True).gradients(object())


def test_every_call_is_counted_however_it_is_timed() -> None:
    log: list[str] = []
    bus = Bus([("a", Recorder("a", log))])
    for _ in range(64 * 10):
        bus.gradients(object())
    assert bus.meters["a"].calls == 64 * 10
    assert bus.meters["a"].seconds > 0


class NoHooks:
    def on_gradients(self, event: object) -> None:
        """Not marked."""


class Misspelt:
    @hookimpl
    def on_gradient(self, event: object) -> None:
        """No such hook."""


class BadArgument:
    @hookimpl
    def on_gradients(self, evnt: object) -> None:
        """No such argument."""


class Wrapper:
    @hookimpl(wrapper=True)
    def on_gradients(self, event: object):  # type: ignore[no-untyped-def]
        return (yield)


class Both:
    @hookimpl
    def on_gradients(self, event: object) -> None:
        """Detects."""

    @hookimpl
    def adjust_gradients(self, event: object) -> None:
        """And guards."""


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        (NoHooks(), "Mark on_gradients"),
        (NoHooks, "is a class; give an instance: NoHooks()"),
        (Misspelt(), "Did you mean 'on_gradients'"),
        (BadArgument(), "evnt"),
        (Wrapper(), "wrapper"),
        (Both(), "detectors observe, guards change"),
    ],
)
def test_what_breaks_the_contract_is_refused_with_a_reason(plugin: object, message: str) -> None:
    with pytest.raises(PluginError) as caught:
        Bus([("p", plugin)])
    assert message in str(caught.value)
