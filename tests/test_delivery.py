"""Delivery: order, isolation, drops and deadlines."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dynguard.delivery
from dynguard.delivery import Delivery, Lane
from dynguard.findings import Finding, Metrics, Names, Record, RunEnd

LONG = 60.0  # seconds; only a broken build waits that long


class Collector:
    """A sink that keeps what it is given and can be made to hang in any hook."""

    def __init__(self, name: str = "sink", hang: str = "") -> None:
        self.name, self.hang = name, hang
        self.records: list[Record] = []
        self.hooks: list[str] = []
        self.reached, self.gate = threading.Event(), threading.Event()

    def stay(self, hook: str) -> None:
        if hook == self.hang:
            self.reached.set()
            self.gate.wait(LONG)

    def write(self, record: Record) -> None:
        self.stay("write")
        self.records.append(record)
        self.hooks.append("write")

    def flush(self, timeout: float) -> None:
        self.stay("flush")
        self.hooks.append("flush")

    def close(self, timeout: float) -> None:
        self.stay("close")
        self.hooks.append("close")

    @property
    def lane(self) -> Lane:
        return Lane(self.name, self.write, self.flush, self.close)


@pytest.fixture
def hanging() -> Iterator[list[Collector]]:
    """Sinks put in here are let go at the end."""
    sinks: list[Collector] = []
    yield sinks
    for sink in sinks:
        sink.gate.set()


def steps(sink: Collector) -> list[int]:
    return [record.step for record in sink.records if isinstance(record, Metrics)]


def eventually(condition: object) -> bool:
    deadline = time.monotonic() + LONG
    while time.monotonic() < deadline:
        if condition():  # type: ignore[operator]  # a lambda
            return True
        time.sleep(0.005)
    return False


def test_every_sink_gets_every_record_in_order() -> None:
    sinks = [Collector("a"), Collector("b")]
    delivery = Delivery([sink.lane for sink in sinks], interval=0.01)
    records: list[Record] = []
    for step in range(500):
        records.append(Metrics(step, {}) if step % 3 else Finding(kind="grad_spike", step=step))
        delivery.put(records[-1], urgent=step % 50 == 0)
    assert delivery.close(LONG) == {}
    for sink in sinks:
        assert sink.records == records
        assert sink.hooks[-2:] == ["flush", "close"]
        assert sink.hooks.count("close") == 1
    assert delivery.dropped == {"a": 0, "b": 0}
    assert delivery.calls["a"] == len(sinks[0].hooks)
    assert delivery.seconds["a"] > 0


def test_threads_start_with_the_first_record() -> None:
    delivery = Delivery([Collector("lazy-one").lane])
    assert not [thread for thread in threading.enumerate() if "lazy-one" in thread.name]
    delivery.put(Metrics(0, {}))
    assert [thread.daemon for thread in threading.enumerate() if "lazy-one" in thread.name] == [True]
    delivery.close(LONG)


def test_a_hung_sink_holds_up_neither_the_run_nor_the_others(hanging: list[Collector]) -> None:
    hung, good = Collector("hung", hang="write"), Collector("good")
    hanging.append(hung)
    delivery = Delivery([hung.lane, good.lane], capacity=100, interval=0.01)
    for step in range(50):
        delivery.put(Metrics(step, {}))
    assert eventually(lambda: steps(good) == list(range(50)))
    assert hung.records == []
    late = delivery.close(0.3)
    assert list(late) == ["hung"]
    assert "write" in late["hung"]
    assert delivery.dropped == {"hung": 50, "good": 0}


def survivors(records: list[Record], capacity: int) -> list[Record]:
    """The rule in its simplest form: the oldest Metrics make room, then whatever comes is refused."""
    kept: list[Record] = []
    for record in records:
        if len(kept) >= capacity:
            oldest = next((i for i, other in enumerate(kept) if isinstance(other, Metrics)), None)
            if oldest is None:
                continue
            del kept[oldest]
        kept.append(record)
    return kept


@settings(max_examples=60, deadline=None)
@given(kinds=st.lists(st.booleans(), max_size=40), capacity=st.integers(1, 12))
def test_metrics_are_dropped_first_and_all_drops_are_counted(kinds: list[bool], capacity: int) -> None:
    records: list[Record] = [
        Metrics(step, {}) if metric else Finding(kind="grad_spike", step=step) for step, metric in enumerate(kinds)
    ]
    sink = Collector(hang="write")
    delivery = Delivery([sink.lane], capacity=capacity, interval=0.01)
    first = Names("gradient_norm", ("a",))
    delivery.put(first, urgent=True)
    assert sink.reached.wait(LONG)
    for record in records:
        delivery.put(record)
    expected = survivors(records, capacity)
    assert delivery.dropped == {"sink": len(records) - len(expected)}
    sink.gate.set()
    assert delivery.close(LONG) == {}
    assert sink.records == [first, *expected]
    assert delivery.dropped == {"sink": len(records) - len(expected)}


def test_an_urgent_record_does_not_wait_for_the_interval() -> None:
    sink = Collector()
    delivery = Delivery([sink.lane], interval=10 * LONG)
    delivery.put(Metrics(0, {}))
    delivery.put(Finding(kind="grad_spike"), urgent=True)
    assert eventually(lambda: len(sink.records) == 2 and "flush" in sink.hooks)
    delivery.close(LONG)


def test_records_arrive_without_a_flush() -> None:
    sink = Collector()
    delivery = Delivery([sink.lane], interval=0.02)
    delivery.put(Metrics(0, {}))
    assert eventually(lambda: sink.hooks == ["write", "flush"])
    delivery.close(LONG)


def test_flush_waits_for_all_that_was_put(hanging: list[Collector]) -> None:
    sink = Collector()
    delivery = Delivery([sink.lane], interval=10 * LONG)
    for step in range(1000):
        delivery.put(Metrics(step, {}))
    assert delivery.flush(LONG)
    assert steps(sink) == list(range(1000))
    assert sink.hooks[-1] == "flush"
    delivery.close(LONG)
    assert delivery.flush(0.0)  # closed: nothing is left to wait for

    hung = Collector(hang="write")
    hanging.append(hung)
    other = Delivery([hung.lane])
    other.put(Metrics(0, {}))
    assert not other.flush(0.05)
    other.close(0.0)


def test_a_failing_write_is_reported_and_the_rest_goes_on() -> None:
    told: list[tuple[str, str, str]] = []
    written: list[int] = []

    def write(record: Record) -> None:
        assert isinstance(record, Metrics)
        if record.step % 2:
            raise ValueError(f"no {record.step}")
        written.append(record.step)

    def failed(name: str, hook: str, error: BaseException) -> bool:
        told.append((name, hook, repr(error)))
        return False

    delivery = Delivery([Lane("picky", write)], failed=failed)
    for step in range(4):
        delivery.put(Metrics(step, {}))
    assert delivery.close(LONG) == {}
    assert written == [0, 2]
    assert told == [("picky", "write", "ValueError('no 1')"), ("picky", "write", "ValueError('no 3')")]
    assert delivery.dropped == {"picky": 0}


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), MemoryError(), GeneratorExit()])
def test_no_exception_of_a_sink_ends_its_thread(error: BaseException) -> None:
    told: list[BaseException] = []
    written: list[Record] = []

    def write(record: Record) -> None:
        if not told:
            raise error
        written.append(record)

    def failed(name: str, hook: str, error: BaseException) -> bool:
        told.append(error)
        raise RuntimeError("whoever is told fails as well")

    delivery = Delivery([Lane("exits", write)], failed=failed)
    delivery.put(Metrics(0, {}))
    delivery.put(Metrics(1, {}))
    assert delivery.close(LONG) == {}
    assert told == [error]
    assert [record.step for record in written if isinstance(record, Metrics)] == [1]


def test_a_sink_that_is_switched_off_is_closed_and_its_records_count_as_dropped() -> None:
    sink = Collector("bad")
    told: list[str] = []

    def write(record: Record) -> None:
        raise OSError("disk full")

    def failed(name: str, hook: str, error: BaseException) -> bool:
        told.append(hook)
        return len(told) == 3

    good = Collector("good")
    delivery = Delivery([Lane("bad", write, sink.flush, sink.close), good.lane], interval=0.01, failed=failed)
    for step in range(10):
        delivery.put(Metrics(step, {}))
    assert eventually(lambda: "close" in sink.hooks)
    for step in range(10, 15):
        delivery.put(Metrics(step, {}))
    assert delivery.close(LONG) == {}
    assert told == ["write"] * 3
    assert sink.hooks.count("close") == 1
    assert delivery.dropped == {"bad": 12, "good": 0}
    assert steps(good) == list(range(15))


@pytest.mark.parametrize("hook", ["write", "flush", "close"])
def test_close_keeps_its_deadline_whatever_hangs(hook: str, hanging: list[Collector]) -> None:
    hanging += [Collector(f"hung{i}", hang=hook) for i in range(3)]
    good = Collector("good")
    delivery = Delivery([*(sink.lane for sink in hanging), good.lane], interval=0.01)
    for step in range(20):
        delivery.put(Metrics(step, {}))
    began = time.monotonic()
    late = delivery.close(0.5)
    assert time.monotonic() - began < LONG / 4  # three sinks that would hang for a minute each
    assert set(late) == {"hung0", "hung1", "hung2"}
    assert all(f"in its {hook}" in why for why in late.values())
    assert steps(good) == list(range(20))
    assert delivery.dropped["hung0"] == (20 if hook == "write" else 0)
    assert delivery.close(LONG) is late


def test_a_slow_sink_is_closed_in_time_and_what_is_left_is_counted() -> None:
    sink = Collector("slow")

    def write(record: Record) -> None:
        time.sleep(0.02)
        sink.write(record)

    delivery = Delivery([Lane("slow", write, sink.flush, sink.close)], interval=0.01)
    for step in range(1000):
        delivery.put(Metrics(step, {}))
    late = delivery.close(1.0)
    assert sink.hooks[-2:] == ["flush", "close"]  # some of the time is kept for them
    delivered = len(sink.records)
    assert 0 < delivered < 1000
    assert delivery.dropped == {"slow": 1000 - delivered}
    assert f"{1000 - delivered} records" in late["slow"]


def test_close_reaches_a_sink_that_was_given_nothing() -> None:
    sink = Collector()
    delivery = Delivery([sink.lane, Lane("observer", None)])
    assert delivery.close(LONG) == {}
    assert sink.hooks == ["flush", "close"]
    delivery.put(RunEnd(run="late", time=0.0))
    assert sink.records == []
    assert delivery.dropped == {"sink": 1, "observer": 1}


def test_a_sink_that_closes_its_own_delivery_does_not_wait_for_itself() -> None:
    late: list[dict[str, str]] = []
    delivery = Delivery([Lane("selfish", lambda record: late.append(delivery.close(LONG)))], interval=0.01)
    delivery.put(Metrics(0, {}))
    assert eventually(lambda: late)
    assert "selfish" in late[0]


def test_records_from_many_threads_all_arrive() -> None:
    sink = Collector()
    delivery = Delivery([sink.lane], interval=0.001)

    def put(first: int) -> None:
        for step in range(first, first + 2000):
            delivery.put(Metrics(step, {}) if step % 2 else Finding(kind="grad_spike", step=step))

    threads = [threading.Thread(target=put, args=(2000 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert delivery.close(LONG) == {}
    assert sorted(getattr(record, "step", -1) for record in sink.records) == list(range(8000))


def test_order_holds_for_records_that_arrive_between_two_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    sink = Collector()
    delivery = Delivery([sink.lane], interval=10 * LONG)
    late: list[Record] = [Finding(kind="grad_spike", step=1), Metrics(2, {})]
    empty: list[bool] = []
    look = dynguard.delivery._pop

    def meanwhile(waiting: Any) -> Any:
        found = look(waiting)
        empty.append(found is None)
        if late and sum(empty) == 2:  # nothing is left, no finding waits, and now the worker looks for metrics
            for record in (late.pop(0), late.pop(0)):
                delivery.put(record)
        return found

    monkeypatch.setattr(dynguard.delivery, "_pop", meanwhile)
    delivery.put(Metrics(0, {}), urgent=True)
    assert eventually(lambda: not late)
    assert delivery.close(LONG) == {}
    assert [getattr(record, "step", None) for record in sink.records] == [0, 1, 2]


def test_without_threads_nothing_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    sink = Collector()
    delivery = Delivery([sink.lane])
    delivery.put(Metrics(0, {}), urgent=True)
    assert delivery.flush(LONG)
    assert delivery.close(LONG) == {}
    assert delivery.dropped == {"sink": 1}


def test_a_delivery_can_be_garbage_collected_and_still_hands_over() -> None:
    class Owner:
        def __init__(self, sink: Collector) -> None:
            self.delivery = Delivery([sink.lane], interval=10 * LONG, failed=self.failed)

        def failed(self, name: str, hook: str, error: BaseException) -> bool:
            return False

    sink = Collector("forgotten")
    owner = Owner(sink)
    owner.delivery.put(Metrics(0, {}))
    gone = weakref.ref(owner)
    del owner
    gc.collect()
    assert gone() is None
    assert eventually(lambda: sink.hooks == ["write", "flush", "close"])
    assert eventually(lambda: not any("forgotten" in thread.name for thread in threading.enumerate()))
