"""The command line: what each command says, where, and with which exit code."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynguard import Action, Evidence, Finding, Metrics, Section, Severity, Table, cli, registry, report
from dynguard.actions import Intervention
from dynguard.findings import Prescription, RunEnd, RunStart
from dynguard.history import HistoryWriter

ROOT = Path(__file__).parents[1]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def dynguard(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Runs a command in an empty folder, as a terminal of 80 columns would; its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["dynguard", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


SPIKE = Finding(
    kind="grad_spike", severity=Severity.ERROR, step=118, subject="h.3.mlp.weight", action=Action.SKIP,
    detector="spike",
    evidence=(Evidence(name="gradient_norm", value=41.25), Evidence(name="ratio", value=900.0),
              Evidence(name="update", value=0.5, unit="nats")),
    premise="the gradient is 900 times its baseline", implies="one step would undo many",
    expected_effect="the weights stay", confidence=0.9991,
    prescriptions=(Prescription(parameter="lr", current=0.001, proposed=0.0003, why="twice now", undo="lr=0.001"),),
)  # fmt: skip
SKIPPED = Intervention(step=118, action=Action.SKIP, subject="h.3.mlp.weight", detector="spike", reason="grad_spike")
END = RunEnd(run="night", time=2000.0, steps=400)


@pytest.fixture
def keep(tmp_path: Path) -> Callable[..., Path]:
    """Writes a run's history; the run directory."""

    def write(*records: Any, name: str = "night", losses: Sequence[float] = (), source: str = "") -> Path:
        directory = tmp_path / "dynguard-runs" / name
        directory.mkdir(parents=True)
        writer = HistoryWriter(directory)
        writer.write(RunStart(run=name, time=1000.0))
        for step, loss in enumerate(losses):
            norms = np.array([1.0, 2.0], dtype=np.float32)
            writer.write(Metrics(step, {"loss": loss, "lr": 0.1}, {"gradient_norm": norms}, source, time=1000.0 + step))
        for record in records:
            writer.write(record)
        writer.close()
        return directory

    return write


def flat(text: str) -> str:
    return " ".join(text.split())


def test_version(dynguard: Run) -> None:
    assert dynguard("--version") == (0, f"dynguard {version('dynguard')}\n", "")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ((), ["demo", "run", "report", "plugins", "new-plugin", "--version"]),
        (("demo",), ["--quick", "--out", "--device", "planted"]),
        (("run",), ["SCRIPT", "ARGS", "-m", "--plugins", "--run-dir", "--mode", "observe|guard", "--config"]),
        (("report",), ["RUN", "newest"]),
        (("plugins",), ["--json", "hooks"]),
        (("new-plugin",), ["NAME", "entry point"]),
    ],
)
def test_help(dynguard: Run, command: tuple[str, ...], words: list[str]) -> None:
    code, out, _ = dynguard(*command, "--help")
    assert code == 0
    for word in words:
        assert word in flat(out)
    assert max(map(len, out.splitlines())) <= 80


def test_a_misspelt_command_or_option(dynguard: Run) -> None:
    for arguments in (["plugin"], ["plugins", "--jsno"], ["run", "--plugin", "spike", "train.py"], ["run"]):
        code, _, err = dynguard(*arguments)
        assert code == 2
        assert "Traceback" not in err


def test_plugins_lists_those_that_the_distribution_declares(dynguard: Run) -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["dynguard"]
    code, out, _ = dynguard("plugins")
    assert code == 0
    for name in declared:
        assert re.search(rf"\b{name}\b", out)
    assert max(map(len, out.splitlines())) <= 80
    told = {entry["name"]: entry for entry in json.loads(dynguard("plugins", "--json")[1])}
    for name, target in declared.items():
        assert told[name]["target"] == target
        assert told[name]["distribution"] == "dynguard"
        assert told[name]["version"] == version("dynguard")
    assert "on_gradients" in told["spike"]["hooks"]
    assert "ratio" in [option[0] for option in told["spike"]["options"]]
    assert [told[name]["order"] for name in sorted(declared)] == sorted(told[name]["order"] for name in declared)


@pytest.fixture
def broken_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    info = tmp_path / "site" / "tilted-3.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tilted\nVersion: 3.1\n")
    (info / "entry_points.txt").write_text("[dynguard]\nlean = tilted_module:Lean\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    registry.refresh()
    yield
    registry.refresh()


@pytest.mark.usefixtures("broken_plugin")
def test_a_plugin_that_does_not_load_is_listed_with_the_reason(dynguard: Run) -> None:
    code, out, _ = dynguard("plugins")
    assert code == 0
    assert "lean" in out
    assert "3.1" in out
    assert "No module named 'tilted_module'" in flat(out)
    (lean,) = (entry for entry in json.loads(dynguard("plugins", "--json")[1]) if entry["name"] == "lean")
    assert "tilted_module" in lean["error"]


def test_new_plugin(dynguard: Run, tmp_path: Path) -> None:
    code, out, _ = dynguard("new-plugin", "calm_waters")
    assert code == 0
    (made,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert (made / "pyproject.toml").is_file()
    assert f"pip install -e {made.name}" in out
    assert dynguard("new-plugin", "not a name")[0] == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "gone.py"],
        ["run", "-m", "gone"],
        ["run", "--config", "gone.toml", "train.py"],
        ["run", "--plugins", "spiek", "train.py"],
        ["run", "--mode", "gard", "train.py"],
        ["report", "gone"],
        ["report"],
        ["report", "train.py"],
    ],
)
def test_what_can_not_be_done_is_said_in_a_line(dynguard: Run, tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "train.py").write_text("raise AssertionError('the script was started')\n")
    code, out, err = dynguard(*arguments)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert err.startswith("dynguard: ")


def test_run_hands_arguments_and_exit_code_on(dynguard: Run, tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text("import sys\nprint(sys.argv[1:])\nsys.exit(5)\n")
    code, out, _ = dynguard("run", "--plugins", "spike", "show.py", "--plugins", "x", "-m", "--help", "--", "-v")
    assert code == 5
    assert out == "['--plugins', 'x', '-m', '--help', '--', '-v']\n"


def test_report_of_one_problem(dynguard: Run, keep: Callable[..., Path]) -> None:
    keep(SPIKE, SKIPPED, END, losses=[4.0, 2.0, 1.0])
    code, out, err = dynguard("report", "dynguard-runs/night")
    assert (code, err) == (0, "")
    text = flat(out)
    expected = (
        "1 problem, at step 118 in h.3.mlp.weight: gradient spike x900, skipped; the run ended normally after 400"
    )
    assert f"{expected} steps." in text
    assert text.index(expected) < text.index("Findings") < text.index("Interventions") < text.index("Course")
    for words in (
        "the gradient is 900 times its baseline", "Means: one step would undo many", "gradient_norm 41.25, ratio 900",
        "update 0.5 nats", "lr: 0.001 -> 0.0003. twice now. Undo: lr=0.001", "confidence 0.999",
    ):  # fmt: skip
        assert words in text
    assert re.search(r"loss +4 +1 +1 +4 +█", out)
    assert re.search(r"lr +0\.1 +0\.1 +0\.1 +0\.1 ", out)
    assert max(map(len, out.splitlines())) <= 80


def test_report_of_a_healthy_run(dynguard: Run, keep: Callable[..., Path]) -> None:
    keep(SPIKE.model_copy(update={"severity": Severity.INFO}), END)
    assert "No problems found; the run ended normally after 400 steps." in flat(dynguard("report")[1])


def test_report_of_a_run_that_was_killed_or_goes_on(dynguard: Run, keep: Callable[..., Path]) -> None:
    keep(losses=[1.0] * 7)
    assert "the run is still going on or was killed (last record: step 6, written 2" in flat(dynguard("report")[1])


def test_report_of_a_run_that_failed(dynguard: Run, keep: Callable[..., Path]) -> None:
    keep(END.model_copy(update={"error": "ValueError: no more data"}))
    assert "the run ended after 400 steps with ValueError: no more data." in flat(dynguard("report")[1])


def test_report_of_a_dry_run(dynguard: Run, keep: Callable[..., Path]) -> None:
    keep(SPIKE, SKIPPED.model_copy(update={"carried_out": False}), END)
    assert "gradient spike x900, would have been skipped (mode observe); the run" in flat(dynguard("report")[1])


def test_findings_are_grouped_and_the_most_severe_comes_first(dynguard: Run, keep: Callable[..., Path]) -> None:
    slow = [Finding(kind="dead_layer", step=step, subject="fc2.weight") for step in (100, 200, 300)]
    worst = Finding(kind="nonfinite_param", severity=Severity.CRITICAL, step=350, subject="fc1.bias", source="g_opt")
    keep(*slow, SPIKE, worst, SPIKE.model_copy(update={"subject": "h.4"}), END)
    text = flat(dynguard("report")[1])
    # Two layers at one bad step are one problem, as is a slow fault that was seen three times.
    assert "3 problems, the worst at step 350 in fc1.bias (g_opt): non-finite parameter, reported;" in text
    heads = [
        "CRITICAL non-finite parameter in fc1.bias (g_opt) step 350",
        "ERROR gradient spike in h.3.mlp.weight step 118",
        "ERROR gradient spike in h.4 step 118",
        "WARNING dead layer in fc2.weight 3 times, steps 100, 200, 300",
    ]
    assert sorted(heads, key=text.index) == heads


def test_report_tells_costs_losses_and_sections(dynguard: Run, keep: Callable[..., Path]) -> None:
    section = Section(
        title="Rows", text="As seen.", tables=(Table(columns=("row", "n"), rows=[(i, 2.5) for i in range(30)]),)
    )
    keep(section, END.model_copy(update={"overhead": {"spike": 1.25}, "dropped": {"wandb": 31, "history": 0}}))
    text = flat(dynguard("report")[1])
    assert "Rows" in text
    assert "19 2.5 ... and 10 more" in text
    assert "spike 1.25 s" in text
    assert "31 records did not reach wandb" in text
    assert "did not reach history" not in text


def test_names_can_neither_style_nor_steer_the_terminal(dynguard: Run, keep: Callable[..., Path]) -> None:
    keep(SPIKE.model_copy(update={"subject": "[red]h[/red].\x1b[2J\u202e"}), END, losses=[1.0], source="[bold]")
    out = dynguard("report")[1]
    assert "[red]h[/red].\\x1b[2J\\u202e" in flat(out)
    assert "loss ([bold])" in out
    assert "\x1b" not in out


def test_report_finds_the_newest_run(dynguard: Run, keep: Callable[..., Path]) -> None:
    keep(END, name="a-new-one")
    old = keep(END, name="b-old-one")
    os.utime(old / "history.sqlite", (1000.0, 1000.0))
    assert "Run a-new-one" in dynguard("report")[1]
    assert "Run b-old-one" in dynguard("report", str(old))[1]
    assert "Run b-old-one" in dynguard("report", str(old / "history.sqlite"))[1]


def test_a_damaged_history_is_read_as_far_as_it_goes(dynguard: Run, keep: Callable[..., Path]) -> None:
    file = keep(SPIKE, END, losses=[1.0] * 50) / "history.sqlite"
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    code, out, _ = dynguard("report")
    assert code == 0
    assert "Reading: " in out


def test_curves_count_what_is_not_finite(dynguard: Run, keep: Callable[..., Path]) -> None:
    keep(END, losses=[8.0, float("nan"), 2.0, float("inf"), 1.0])
    out = dynguard("report")[1]
    assert re.search(r"loss +8 +1 +1 +8 +2 +█!▂!▁", out)


def test_sparkline() -> None:
    assert report.sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert report.sparkline([1.0, 10.0, 1e7]) == "▁▂█"  # 1/7 of the way in logarithms
    assert report.sparkline([2.0, 2.0]) == "▁▁"
    assert report.sparkline([]) == ""
    assert report.sparkline([float("nan"), 1.0]) == "!▁"
    spike = [1.0] * 1000
    spike[777] = 50.0
    assert report.sparkline(spike, width=10) == "▁▁▁▁▁▁▁█▁▁"


def test_a_terminal_without_unicode_gets_a_report(keep: Callable[..., Path]) -> None:
    directory = keep(SPIKE.model_copy(update={"subject": "schicht.größe"}), END, losses=[1.0, 2.0])
    done = subprocess.run(
        [sys.executable, "-m", "dynguard.cli", "report", str(directory)], capture_output=True, timeout=60, check=False,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert b"schicht.gr??e" in done.stdout or b"schicht.gr\\xf6\\xdfe" in done.stdout


def test_the_command_starts_without_heavy_libraries() -> None:
    code = "import sys, dynguard.cli; print([m for m in ('torch', 'scipy', 'matplotlib', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
