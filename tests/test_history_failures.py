"""History of runs that live, fork, were killed or met a full disk, and of files that are damaged."""

from __future__ import annotations

import random
import signal
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynguard.errors import RunDirectoryError
from dynguard.findings import (
    Finding,
    Metrics,
    Names,
    RunStart,
)
from dynguard.history import History, HistoryWriter

LONG = 60.0  # seconds; only a broken build waits that long


def fill(path: Path, records: list[Any], **options: Any) -> HistoryWriter:
    writer = HistoryWriter(path, **options)
    for record in records:
        writer.write(record)
    writer.close()
    return writer


def run_script(script: str, *args: str, **options: Any) -> subprocess.Popen[str]:
    head = """
    import os, signal, sys, time
    from pathlib import Path
    import numpy as np
    from dynguard.findings import *
    from dynguard.history import History, HistoryWriter
    """
    code = textwrap.dedent(head) + textwrap.dedent(script)
    return subprocess.Popen([sys.executable, "-c", code, *args], stdout=subprocess.PIPE, text=True, **options)


# -- other processes


def test_a_run_can_be_read_while_it_lives_and_after_it_was_killed(tmp_path: Path) -> None:
    script = """
        writer = HistoryWriter(Path(sys.argv[1]))
        writer.write(RunStart(run="alive", time=1.0))
        writer.write(Finding(kind="grad_spike", step=0))
        for step in range(10**9):
            now = time.time()
            writer.write(Metrics(step, {"loss": 1.0}, {"norm": np.ones(50, np.float32)}, time=now))
            print(step, now, flush=True)
            time.sleep(0.005)  # so slow that only the time can be what brings records out
    """
    run = run_script(script, str(tmp_path))
    assert run.stdout is not None
    try:
        seen: list[int] = []
        line = run.stdout.readline()
        while len(seen) < 3:  # three looks, each of which shows more than the one before
            with History(tmp_path) as history:
                found = len(history.metrics("loss"))
                if found > (seen[-1] if seen else 0):
                    seen.append(found)
                    assert history.vectors("norm").mean.sum() >= 50 * found
                    assert history.findings() == [Finding(kind="grad_spike", step=0)]
                    assert history.end is None
                    assert history.problems == []
            for _ in range(20):
                line = run.stdout.readline()
                assert line, "the writer died"
        for _ in range(300):
            line = run.stdout.readline()
    finally:
        run.send_signal(signal.SIGKILL)
        rest = run.communicate(timeout=LONG)[0].splitlines()
    last_step, last_time = (rest[-1] if rest else line).split()
    with History(tmp_path) as history:
        steps, _ = history.metrics("loss")
        np.testing.assert_array_equal(steps, range(len(steps)))
        assert len(steps) <= int(last_step) + 2
        assert history.metrics("loss").times[-1] > float(last_time) - 1.0  # all but the last second
        assert history.run == RunStart(run="alive", time=1.0)
        assert history.problems == []


def test_a_forked_child_that_ends_does_no_harm(tmp_path: Path) -> None:
    script = """
        import gc
        writer = HistoryWriter(Path(sys.argv[1]))
        for step in range(300):
            writer.write(Metrics(step, {"loss": 1.0}))
            if step % 100 == 50:
                writer.flush()
                child = os.fork()
                if child == 0:
                    writer.write(Metrics(9999, {"loss": 1.0}))
                    writer.flush()
                    writer.close()
                    del writer
                    gc.collect()
                    sys.exit(0)
                assert os.waitpid(child, 0)[1] == 0
        writer.close()
    """
    run = run_script(script, str(tmp_path))
    run.communicate(timeout=LONG)
    assert run.returncode == 0
    with History(tmp_path) as history:
        assert history.metrics("loss").steps.tolist() == list(range(300))
        assert history.problems == []


def test_a_full_disk_costs_records_and_nothing_else(tmp_path: Path) -> None:
    script = """
        import logging, resource
        logging.disable()
        writer = HistoryWriter(Path(sys.argv[1]))
        def write(first, last):
            for step in range(first, last):
                values = {"loss": 1.0} | ({"lr": 0.1} if first else {})  # a new column while nothing can be written
                writer.write(Metrics(step, values, {"norm": np.ones(500, np.float32)}))
                if step % 100 == 0:
                    writer.flush()
        write(0, 200)
        writer.flush()
        assert not writer.problem
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
        write(200, 3000)
        assert writer.problem and writer.lost >= 500, (writer.problem, writer.lost)
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        write(3000, 3100)
        writer.flush()
        assert not writer.problem, writer.problem
        writer.close()
        print(writer.lost)
    """
    run = run_script(script, str(tmp_path))
    lost = int(run.communicate(timeout=LONG)[0])
    with History(tmp_path) as history:
        steps, _ = history.metrics("loss")
        assert len(steps) + lost == 3100
        assert history.metrics("lr").steps.tolist() == [step for step in steps if step >= 200]
        assert set(range(200)) < set(steps.tolist())
        assert set(range(2900, 3100)) < set(steps.tolist())  # the newest is what is kept while waiting
        assert history.lost == lost
        assert any(f"{lost} records were lost" in problem for problem in history.problems)


def test_what_can_not_be_written_by_the_end_is_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = HistoryWriter(tmp_path)
    writer.write(Metrics(0, {"loss": 1.0}))
    writer.flush()
    blocker = sqlite3.connect(tmp_path / "history.sqlite", isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    writer.write(Metrics(1, {"loss": 1.0}))
    writer.write(Finding(kind="grad_spike"))
    writer.close()
    blocker.close()
    assert writer.lost == 2
    assert "locked" in writer.problem
    assert "2 records lost" in caplog.text
    with History(tmp_path) as history:
        assert len(history.metrics("loss")) == 1


# -- damage


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("healthy")
    records: list[Any] = [RunStart(run="r", time=1.0), Names("norm", tuple(f"layer{i}" for i in range(100)))]
    records += [Metrics(s, {"loss": 1.0}, {"norm": np.full(100, s, np.float32)}) for s in range(600)]
    records += [Finding(kind="grad_spike", step=s, subject="x" * 300) for s in range(600)]
    fill(path, records)
    return (path / "history.sqlite").read_bytes()


def look(history: History) -> tuple[int, int]:
    """(findings, steps) that can be read; looks at all the rest as well."""
    _ = (
        history.run,
        history.end,
        history.steps,
        history.sources,
        history.lost,
        history.interventions(),
        history.sections(),
    )
    vectors = history.vectors("norm")
    assert len(vectors.names) == vectors.mean.shape[1] or not len(vectors)
    return len(history.findings()), len(history.metrics("loss"))


@pytest.mark.parametrize("seed", range(40))
def test_whatever_is_damaged_the_rest_is_read(healthy: bytes, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    content = bytearray(healthy)
    if seed % 2:
        del content[rng.randrange(len(content)) :]
    for _ in range(rng.choice([0, 1, 10])):
        at, length = rng.randrange(len(healthy)), rng.choice([1, 20, 5000])
        content[at : at + length] = rng.randbytes(length)[: max(0, len(content) - at)]
    (tmp_path / "history.sqlite").write_bytes(content)
    try:
        with History(tmp_path) as history:
            findings, steps = look(history)
            assert 0 <= findings <= 600
            assert 0 <= steps <= 600
            assert history.problems or (findings, steps) == (600, 600)
    except RunDirectoryError as error:
        if "newer dynguard" not in str(error):  # then the version itself was hit
            raise


def test_most_of_a_shortened_file_is_read(healthy: bytes, tmp_path: Path) -> None:
    (tmp_path / "history.sqlite").write_bytes(healthy[: len(healthy) * 6 // 10])
    with History(tmp_path) as history:
        findings, steps = look(history)
        assert findings + steps > 400
        assert history.run == RunStart(run="r", time=1.0)
        assert history.problems


def test_one_bad_page_costs_only_what_was_on_it(healthy: bytes, tmp_path: Path) -> None:
    content = bytearray(healthy)
    at = content.index(b'"step":300,"subject"') // 4096 * 4096  # in the middle of the findings
    content[at : at + 4096] = b"\xff" * 4096
    (tmp_path / "history.sqlite").write_bytes(content)
    with History(tmp_path) as history:
        findings, steps = look(history)
        assert 580 <= findings < 600
        assert steps == 600
        assert [f.step for f in history.findings()] == sorted({f.step for f in history.findings()})
        assert any("record" in problem for problem in history.problems)


@pytest.mark.parametrize("content", [b"", b"not a database at all" * 500, b"SQLite format 3\0" + bytes(5000)])
def test_a_file_that_is_no_history(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "history.sqlite").write_bytes(content)
    with History(tmp_path) as history:
        assert look(history) == (0, 0)
        assert history.problems
    if content:
        with pytest.raises(RunDirectoryError, match=r"can't write the history.*Give another run_dir"):
            HistoryWriter(tmp_path)


def test_where_there_is_no_run(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(RunDirectoryError, match="there is no run in"):
            History(path)
