"""The examples run as they stand, from any directory, and say what they promise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SAYS = {
    "quickstart.py": ["step 120: nan_", "step 160: grad_spike", "all weights are finite: True"],
    "custom_detector.py": ["step 60: dead_layer in 2.weight"],
    "custom_sink.py": ["skip,1.weight", "40 steps, interventions: 1"],
}


def test_every_example_is_tested() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SAYS)


@pytest.mark.parametrize("name", sorted(SAYS))
def test_the_example_runs(name: str, tmp_path: Path) -> None:
    root = EXAMPLES.parent
    paths = os.pathsep.join(str(root / part) for part in (".", "plugins", "contrib"))
    done = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / name],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [text for text in SAYS[name] if text not in done.stdout] == [], done.stdout + done.stderr
