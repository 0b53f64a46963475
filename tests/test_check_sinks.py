"""``check_plugin`` for sinks: every kind of record, on a thread of their own, with and without a directory."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from dynguard import hookimpl
from dynguard.testing import MemorySink, check_plugin


def violations(plugin: object) -> list[str]:
    with pytest.raises(AssertionError, match="breaks the plugin contract") as caught:
        check_plugin(plugin)
    return [line.removeprefix("  - ") for line in str(caught.value).splitlines()[1:]]


def test_a_sink_is_given_every_kind_of_record_on_another_thread() -> None:
    seen: set[str] = set()
    threads: set[int] = set()

    class Sink(MemorySink):
        @hookimpl
        def write(self, record: Any) -> None:
            seen.add(type(record).__name__)
            threads.add(threading.get_ident())

    check_plugin(Sink)
    assert seen == {"RunStart", "Names", "Metrics", "Finding", "Intervention", "Section", "RunEnd"}
    assert threading.get_ident() not in threads


def test_a_sink_that_fails_is_told_with_the_record() -> None:
    class Sink:
        directory: Any = None

        @hookimpl
        def on_run_start(self, run: Any) -> None:
            self.directory = run.directory

        @hookimpl
        def write(self, record: Any) -> None:
            if type(record).__name__ == "Names":
                raise NotImplementedError("names")
            _ = self.directory / "file"

        @hookimpl
        def close(self, timeout: float) -> None:
            raise OSError("gone")

    found = violations(Sink)
    assert "write raised NotImplementedError: names, given Names" in found
    assert "close raised OSError: gone" in found
    assert any("unsupported operand" in text and "without a directory" in text for text in found)


def test_a_sink_that_hangs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from dynguard.testing import behaviour

    monkeypatch.setattr(behaviour, "DEADLINE_S", 0.1)
    release = threading.Event()

    class Hangs(MemorySink):
        @hookimpl
        def close(self, timeout: float) -> None:
            release.wait(30)

    assert any("still works" in text for text in violations(Hangs))
    release.set()
