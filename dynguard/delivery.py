"""Delivery: carries records from the training thread to the sinks, each on its own queue and worker thread.

The training thread only appends to bounded queues; a sink that is slow, raises or hangs costs neither the run nor the
other sinks anything but its own records, and those are counted.

Records keep their order. Metrics have a queue of their own beside that of all other records, both numbered, so that
the oldest Metrics can make room for a finding without a search and without a lock that a signal handler, a garbage
collection or a fork could run into.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from time import monotonic, perf_counter
from typing import NamedTuple, TypeAlias

from dynguard.findings import Metrics, Record

Failed: TypeAlias = Callable[[str, str, BaseException], bool]

EXIT_TIMEOUT = 3.0
"""Seconds that an interpreter which ends waits for sinks that nobody closed."""

_PATIENCE = 5.0  # what a sink's flush(timeout) and close(timeout) are told outside of a shutdown, s
_WRITING_SHARE = 0.8  # of a shutdown's time is for writing, so that some is left to flush and close


class Lane(NamedTuple):
    """One sink, as its hooks.

    They are held for as long as the worker lives: they must not refer to the owner of the Delivery, or it is not freed.
    """

    name: str
    write: Callable[[Record], object] | None
    flush: Callable[[float], object] | None = None
    close: Callable[[float], object] | None = None


class Delivery:
    """Carries records to sinks.

    Args:
        sinks: the sinks; their names must differ.
        capacity: records that may wait for one sink. Beyond it the oldest Metrics are dropped, then whatever comes.
        interval: seconds between two looks at a queue; urgent records do not wait for it.
        failed: called from the worker as ``failed(sink, hook, exception)`` when a hook raises (SystemExit too);
            answers whether the sink is now switched off.
    """

    def __init__(
        self, sinks: Iterable[Lane], *, capacity: int = 10_000, interval: float = 0.25, failed: Failed | None = None
    ) -> None:
        self._failed = failed
        owner = weakref.ref(self)
        self._all = tuple(_Worker(Lane(*sink), max(capacity, 1), interval, owner) for sink in sinks)
        self._workers = self._all  # emptied in a forked child
        self._started = False
        self._closed: dict[str, str] | None = None
        _DELIVERIES.add(self)
        _WORKERS.update(self._all)
        weakref.finalize(self, _abandon, self._all).atexit = False

    def put(self, record: Record, urgent: bool = False) -> None:
        """Queue a record for all sinks. Never blocks and never raises; ``urgent`` wakes the workers at once."""
        if not self._started:
            self._start()
        for worker in self._workers:
            worker.put(record)
            if urgent:
                worker.wake()

    def flush(self, timeout: float) -> bool:
        """Wait until all that was put is written and flushed; False where that took longer than ``timeout`` s."""
        self._start()
        deadline = monotonic() + timeout
        waiting = [worker.request() for worker in self._workers if worker.thread is not threading.current_thread()]
        for event in waiting:
            event.wait(max(0.0, deadline - monotonic()))
        return all(event.is_set() for event in waiting)

    def close(self, timeout: float) -> dict[str, str]:
        """Write, flush and close all sinks within ``timeout`` s altogether; names those that did not finish, and why.

        What could not be delivered counts as dropped. Later calls return the same.
        """
        if self._closed is None:
            self._start()
            self._closed = {}
            self._closed.update(_shut(self._workers, timeout))
        return self._closed

    @property
    def dropped(self) -> dict[str, int]:
        """Records that a sink was never given, or had not taken when its time was up, by sink."""
        return {worker.lane.name: worker.dropped for worker in self._all}

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds that the worker spent in the hooks of each sink."""
        return {worker.lane.name: worker.seconds for worker in self._all}

    @property
    def calls(self) -> dict[str, int]:
        """How often a hook of each sink was called."""
        return {worker.lane.name: worker.calls for worker in self._all}

    def _start(self) -> None:
        self._started = True
        for worker in self._workers:
            worker.start()

    def _report(self, name: str, hook: str, error: BaseException) -> bool:
        return bool(self._failed(name, hook, error)) if self._failed is not None else False


class _Worker:
    """One lane: its queues, its thread and its counts."""

    def __init__(self, lane: Lane, capacity: int, interval: float, owner: weakref.ref[Delivery]) -> None:
        self.lane, self.capacity, self.interval, self.owner = lane, capacity, interval, owner
        self.metrics: deque[tuple[int, Record]] = deque()
        self.others: deque[tuple[int, Record]] = deque()
        self.number = 0  # of the next record; all with smaller numbers are in the queues
        self.control: queue.SimpleQueue[threading.Event | None] = queue.SimpleQueue()  # its put is reentrant
        self.done = threading.Event()
        self.thread: threading.Thread | None = None
        self.off = False
        self.write_until = self.stop_at = math.inf  # set when it is to stop, s of the monotonic clock
        self.hook = ""  # the one that is running
        self.offered = self.evicted = self.handled = self.left = self.calls = 0
        self.seconds = 0.0

    # From the training thread.

    def start(self) -> None:
        if self.thread is None and not self.done.is_set():
            self.thread = threading.Thread(target=self.run, name=f"dynguard-{self.lane.name}", daemon=True)
            try:
                self.thread.start()
            except RuntimeError:  # no more threads, or the interpreter is ending: everything counts as dropped
                self.thread, self.off = None, True
                self.done.set()

    def put(self, record: Record) -> None:
        self.offered += 1
        number = self.number
        full = len(self.metrics) + len(self.others) >= self.capacity
        if self.off or (full and not self.make_room()):
            self.evicted += 1
            return
        if type(record) is Metrics:
            self.metrics.append((number, record))
        else:
            self.others.append((number, record))
        self.number = number + 1

    def make_room(self) -> bool:
        """Drop the oldest Metrics; False where none waits."""
        try:
            self.metrics.popleft()
        except IndexError:
            return False
        self.evicted += 1
        return True

    def wake(self) -> None:
        if self.control.empty():
            self.control.put(None)

    def request(self) -> threading.Event:
        """An event that is set once everything put so far is written and flushed."""
        event = threading.Event()
        self.control.put(event)
        if self.done.is_set():
            event.set()
        return event

    def stop(self, timeout: float) -> None:
        now = monotonic()
        self.write_until, self.stop_at = now + _WRITING_SHARE * timeout, now + timeout
        self.control.put(None)

    @property
    def dropped(self) -> int:
        over = self.done.is_set() or monotonic() >= self.stop_at
        return self.offered - self.handled if over else self.evicted

    def excuse(self) -> str:
        """Why it did not finish, or "" where it did."""
        if self.done.is_set():
            return f"{self.left} records were not written in time" if self.left else ""
        waiting = self.offered - self.evicted - self.handled
        rest = f", {waiting} records were not written" if waiting else ""
        return f"still in its {self.hook or 'worker'} when the time was up{rest}"

    # From the worker thread.

    def run(self) -> None:
        stopping = False
        while not (stopping or self.off):
            waiting = self.wait()
            stopping = self.stop_at < math.inf
            wrote = self.drain()
            if (wrote or waiting or stopping) and not self.off:
                self.call("flush", self.lane.flush, self.remaining())
            for event in waiting:
                event.set()
        self.left = 0 if self.off else len(self.metrics) + len(self.others)
        self.off = True
        self.metrics.clear()
        self.others.clear()
        self.call("close", self.lane.close, self.remaining())
        self.done.set()
        for event in _waiting(self.control):
            event.set()

    def wait(self) -> list[threading.Event]:
        """Sleep until it is time to look again; the flushes that were asked for."""
        with contextlib.suppress(queue.Empty):
            first = self.control.get(timeout=self.interval)
            return ([first] if first else []) + _waiting(self.control)
        return []

    def drain(self) -> bool:
        """Write what waits, in order; whether there was anything."""
        limit = self.number
        before = self.handled
        other = metrics = None
        while not self.off and monotonic() < self.write_until:
            other = other or _pop(self.others)
            metrics = metrics or _pop(self.metrics)
            if metrics is not None and metrics[0] < limit and (other is None or metrics[0] < other[0]):
                self.hand_over(metrics[1])
                metrics = None
            elif other is not None and other[0] < limit:
                self.hand_over(other[1])
                other = None
            else:
                break
        if other is not None:
            self.others.appendleft(other)
        if metrics is not None:
            self.metrics.appendleft(metrics)
        return self.handled > before

    def hand_over(self, record: Record) -> None:
        self.call("write", self.lane.write, record)
        self.handled += 1

    def call(self, hook: str, function: Callable[..., object] | None, argument: object) -> None:
        if function is None:
            return
        self.hook = hook
        self.calls += 1
        started = perf_counter()
        try:
            function(argument)
        except BaseException as error:  # noqa: BLE001 - SystemExit and all: the sink failed, the thread goes on
            self.fail(hook, error)
        finally:
            self.seconds += perf_counter() - started
            self.hook = ""

    def fail(self, hook: str, error: BaseException) -> None:
        owner = self.owner()
        if owner is None or monotonic() >= self.stop_at:
            return  # nobody is there to be told any more
        with contextlib.suppress(BaseException):  # whoever is told of failures may fail as well
            self.off = owner._report(self.lane.name, hook, error) or self.off

    def remaining(self) -> float:
        return max(0.0, min(_PATIENCE, self.stop_at - monotonic()))

    def forget(self) -> None:
        """In a forked child: the thread is the parent's, and so is every record."""
        self.lane = Lane(self.lane.name, None)
        self.metrics.clear()
        self.others.clear()
        self.offered = self.evicted = self.handled = 0
        self.thread, self.off = None, True
        self.done = threading.Event()  # the parent's may be locked for ever by a thread that is not here
        self.done.set()


def _pop(records: deque[tuple[int, Record]]) -> tuple[int, Record] | None:
    try:
        return records.popleft()
    except IndexError:
        return None


def _waiting(control: queue.SimpleQueue[threading.Event | None]) -> list[threading.Event]:
    events = []
    with contextlib.suppress(queue.Empty):
        while True:
            if (event := control.get_nowait()) is not None:
                events.append(event)
    return events


def _shut(workers: Sequence[_Worker], timeout: float) -> dict[str, str]:
    deadline = monotonic() + timeout
    for worker in workers:
        worker.stop(timeout)
    late = {}
    for worker in workers:
        if worker.thread is not threading.current_thread():  # a sink that closes its own delivery can't wait for itself
            worker.done.wait(max(0.0, deadline - monotonic()))
        if excuse := worker.excuse():
            late[worker.lane.name] = excuse
    return late


_DELIVERIES: weakref.WeakSet[Delivery] = weakref.WeakSet()
_WORKERS: weakref.WeakSet[_Worker] = weakref.WeakSet()


def _abandon(workers: Sequence[_Worker]) -> None:
    """The Delivery was garbage collected: its workers finish what they have and end."""
    for worker in workers:
        if worker.stop_at == math.inf:
            worker.stop(_PATIENCE)


def _at_exit() -> None:
    """Nobody closed: save what can be saved in a short time, in silence, whatever ended the interpreter."""
    with contextlib.suppress(BaseException):
        running = [worker for worker in list(_WORKERS) if worker.thread is not None and not worker.done.is_set()]
        _shut([worker for worker in running if monotonic() < worker.stop_at], EXIT_TIMEOUT)


def _after_fork() -> None:
    for delivery in list(_DELIVERIES):
        delivery._workers = ()
    for worker in list(_WORKERS):
        worker.forget()


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
