"""Delivery where processes begin and end: fork and interpreter exit."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

LONG = 60.0  # seconds; only a broken build waits that long


def run_script(script: str, *args: str) -> subprocess.CompletedProcess[str]:
    head = """
    import os, sys, threading, time
    from dynguard.delivery import Delivery, Lane
    from dynguard.findings import Metrics
    """
    code = textwrap.dedent(head) + textwrap.dedent(script)
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=LONG, check=False)


@pytest.mark.skipif(not hasattr(sys, "getdlopenflags"), reason="needs fork")
def test_a_forked_child_is_inert() -> None:
    done = run_script(
        """
        lines = []
        delivery = Delivery([Lane("out", lambda record: lines.append(f"{os.getpid()} {record.step}"))], interval=0.01)
        for step in range(200):
            delivery.put(Metrics(step, {}))
            if step % 50 == 10:
                child = os.fork()
                if child == 0:
                    for _ in range(20_000):
                        delivery.put(Metrics(-1, {}), urgent=True)
                    assert delivery.flush(30) and delivery.close(30) == {} and delivery.dropped == {"out": 0}
                    assert threading.active_count() == 1
                    sys.exit(7)  # through atexit, as a script's child would
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert delivery.close(30) == {}
        assert lines == [f"{os.getpid()} {step}" for step in range(200)]
        print("parent ends")
        """
    )
    assert (done.stdout, done.stderr, done.returncode) == ("parent ends\n", "", 0)


def test_at_interpreter_exit_records_arrive_and_the_traceback_stands() -> None:
    done = run_script(
        """
        def write(record):
            time.sleep(0.001)
            print(record.step, flush=True)
        def failed(name, hook, error):
            raise SystemExit(5)
        def bad(record):
            raise SystemExit(4)
        delivery = Delivery([Lane("out", write), Lane("bad", bad)], interval=100, failed=failed)
        for step in range(100):
            delivery.put(Metrics(step, {}))
        raise ValueError("the user's own error")
        """
    )
    assert done.stdout.split() == [str(step) for step in range(100)]
    assert done.stderr.endswith("ValueError: the user's own error\n")
    assert done.stderr.count("Traceback") == 1
    assert done.returncode == 1


@pytest.mark.parametrize("hook", ["write", "flush", "close"])
def test_at_interpreter_exit_a_hung_sink_is_left_behind(hook: str) -> None:
    done = run_script(
        """
        import dynguard.delivery
        dynguard.delivery.EXIT_TIMEOUT = 0.2
        hooks = dict.fromkeys(["write", "flush", "close"])
        hooks[sys.argv[1]] = lambda argument: time.sleep(1000)
        delivery = Delivery([Lane("hung", **hooks)], interval=0.01)
        delivery.put(Metrics(0, {}), urgent=True)
        time.sleep(0.1)
        sys.exit(9)
        """,
        hook,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 9)
