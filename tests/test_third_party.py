"""Somebody else's distributions: installed for real and found, broken ones reported, names claimed twice refused."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dynguard import registry
from dynguard.errors import MissingExtraError, PluginError

ROOT = Path(__file__).parents[1]


# -- for real


def run(python: Path, code: str, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [python, "-c", textwrap.dedent(code)], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment in which examples/thirdparty is installed, without the network."""
    base = tmp_path_factory.mktemp("fresh")
    source, venv = base / "source", base / "venv"
    shutil.copytree(ROOT / "examples" / "thirdparty", source, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    interpreter = venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    # What is installed beside this interpreter (torch, hatchling, dynguard itself) is seen from there; addsitedir also
    # follows the .pth file by which dynguard may be installed editable.
    seen = "; ".join(f"site.addsitedir({path!r})" for path in [*site.getsitepackages(), str(ROOT)])
    packages = run(interpreter, "import sysconfig; print(sysconfig.get_path('purelib'))", base)
    (Path(packages) / "beside.pth").write_text(f"import site; {seen}\n", encoding="utf-8")
    install = ["install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "--python", interpreter, *install, source], check=True)
    return interpreter


def test_an_installed_distribution_is_found_and_not_loaded(python: Path, tmp_path: Path) -> None:
    out = run(
        python,
        """
        import sys
        from dynguard import registry
        for name in ("pulse", "heartbeat"):
            print(name, registry.available()[name].value)
        print([name for name in sys.modules if name.startswith(("dynguard_heartbeat", "dynguard_plugins", "torch"))])
        """,
        tmp_path,
    )
    assert out.splitlines() == [
        "pulse dynguard_heartbeat.pulse:Pulse",
        "heartbeat dynguard_heartbeat.heartbeat:Heartbeat",
        "[]",
    ]


def test_it_is_described_like_a_first_party_plugin(python: Path, tmp_path: Path) -> None:
    out = run(
        python,
        """
        from dynguard import registry
        info = {info.name: info for info in registry.describe()}["pulse"]
        print(info.distribution, info.version, info.hooks, info.error, info.order is not None)
        print(info.summary)
        print([name for name, kind, default in info.options], [default for name, kind, default in info.options])
        """,
        tmp_path,
    )
    assert out.splitlines() == [
        "dynguard-heartbeat 1.0.0 ('on_gradients',) None True",
        "Warns when the norm of all gradients stays below a floor for many steps in a row.",
        "['floor', 'patience'] ['1e-08', '20']",
    ]


def test_it_trains_by_name_with_options_of_a_file_beside_first_party_plugins(python: Path, tmp_path: Path) -> None:
    (tmp_path / "dynguard.toml").write_text(
        'plugins = ["spike", "pulse", "heartbeat"]\n[plugin.pulse]\npatience = 4\n[plugin.heartbeat]\nevery = 0\n',
        encoding="utf-8",
    )
    out = run(
        python,
        """
        import json, torch
        from dynguard import FlowManager
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with FlowManager(model, optimizer, run_dir="run", strict=True) as flow:
            print(*flow.plugins)
            for step in range(10):
                loss = model(torch.ones(1, 3)).sum() * (step < 3)
                flow.observe(loss=loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        print([(finding.kind, finding.step, finding.detector) for finding in flow.findings])
        beat = json.load(open("run/heartbeat.json"))
        print(beat["run"], beat["step"], abs(beat["loss"]), beat["alive"])
        """,
        tmp_path,
    )
    assert out.splitlines() == ["heartbeat pulse spike", "[('stagnation', 6, 'pulse')]", "run 9 0.0 False"]


def test_its_own_tests_pass(python: Path, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples" / "thirdparty" / "tests", tmp_path / "tests")
    run(python, "import sys, pytest; sys.exit(pytest.main(['-q', '-W', 'error', 'tests']))", tmp_path)


# -- broken ones


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Puts a made-up distribution on sys.path: its metadata, its entry points and its modules."""

    def make(name: str, entry_points: str, *, metadata: str | None = None, **modules: str) -> Path:
        place = tmp_path / name
        info = place / f"{name.replace('-', '_')}-2.0.dist-info"
        info.mkdir(parents=True)
        text = metadata if metadata is not None else f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.0\n"
        (info / "METADATA").write_text(text, encoding="utf-8")
        (info / "entry_points.txt").write_text(f"[dynguard]\n{entry_points}\n", encoding="utf-8")
        for module, code in modules.items():
            (place / f"{module}.py").write_text(textwrap.dedent(code), encoding="utf-8")
        monkeypatch.syspath_prepend(str(place))
        registry.refresh()
        return info

    yield make
    monkeypatch.undo()
    registry.refresh()


SINK = """
    from dynguard import hookimpl
    class Sink:
        "Takes everything."
        @hookimpl
        def write(self, record): ...
    """


def test_what_is_installed_is_found_at_the_next_look(install: Callable[..., Path]) -> None:
    assert "fine_sink" not in registry.available()
    install("fine", "fine_sink = fine_module:Sink", fine_module=SINK)
    assert [name for name, _ in registry.resolve(["fine_sink"])] == ["fine_sink"]


def test_two_distributions_with_one_name_is_an_error_that_names_both_once_it_is_used(
    install: Callable[..., Path],
) -> None:
    install("first-one", "doubled = first_module:Sink", first_module=SINK)
    install("second-one", "doubled = second_module:Sink\nsingle = second_module:Sink", second_module=SINK)
    assert registry.create("single") is not None
    with pytest.raises(PluginError) as caught:
        registry.resolve(["default", "doubled"])
    message = str(caught.value)
    assert all(word in message for word in ("'doubled'", "first-one 2.0", "second-one 2.0", "first_module:Sink"))
    info = {info.name: info for info in registry.describe()}["doubled"]
    assert "first-one" in str(info.error)
    assert "second-one" in str(info.error)


def test_a_name_of_ours_may_not_be_taken_over(install: Callable[..., Path]) -> None:
    install("grabber", "spike = grab_module:Sink", grab_module=SINK)
    with pytest.raises(PluginError, match=r"claimed by two distributions: .*grabber"):
        registry.resolve("default")


def test_one_distribution_seen_twice_on_the_path_is_one(
    install: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = install("Same.Name", "same = same_module:Sink", same_module=SINK).parent
    copy = place.parent / "copy"
    shutil.copytree(place, copy)
    metadata = copy / "Same.Name-2.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text(encoding="utf-8").replace("Same.Name", "same-name"), encoding="utf-8")
    monkeypatch.syspath_prepend(str(copy))
    registry.refresh()
    assert registry.create("same") is not None


@pytest.mark.parametrize(
    ("target", "code", "words"),
    [
        ("broken_module:Sink", "import no_such_library_at_all", "No module named 'no_such_library_at_all'"),
        ("broken_module:Sink", "raise RuntimeError('half installed')", "RuntimeError: half installed"),
        ("broken_module:Sink", "def nothing(:", "SyntaxError"),
        ("broken_module:Missing", SINK, "Missing"),
        ("no_module_of_that_name:Sink", SINK, "no_module_of_that_name"),
        ("broken_module:thing", "thing = 3", "not a class but int"),
    ],
)
def test_a_broken_plugin_is_listed_with_the_reason_and_harms_no_other(
    install: Callable[..., Path], target: str, code: str, words: str
) -> None:
    sys.modules.pop("broken_module", None)
    install("broken-one", f"broken = {target}", broken_module=code)
    rows = {info.name: info for info in registry.describe()}
    assert words in str(rows["broken"].error)
    assert rows["broken"].distribution == "broken-one"
    assert rows["spike"].error is None
    with pytest.raises(PluginError, match="'broken'"):
        registry.create("broken")


def test_a_missing_library_that_an_extra_brings_is_told_with_the_command(install: Callable[..., Path]) -> None:
    install(
        "needy", "needy = needy_module:Sink", needy_module="raise ModuleNotFoundError('No wandb', name='wandb.sdk')"
    )
    with pytest.raises(MissingExtraError, match=r"pip install 'dynguard\[wandb\]'"):
        registry.create("needy")
    assert "dynguard[wandb]" in str({info.name: info for info in registry.describe()}["needy"].error)


def test_unreadable_metadata_is_reported_and_not_fatal(install: Callable[..., Path]) -> None:
    info = install("garbled", "garbled = nowhere:Sink")
    (info / "METADATA").write_bytes(b"Metadata-Version: 2.1\nName: garbled\nVersion: 2.0\n\xff\xfe")
    (info / "entry_points.txt").write_bytes(b"[dynguard]\n\xff\xfe = \xff")
    registry.refresh()
    assert any("garbled" in place for place in registry.broken())
    assert "spike" in registry.available()
    assert any("garbled" in row.distribution and row.error for row in registry.describe())


def test_a_distribution_without_metadata_is_not_fatal(install: Callable[..., Path]) -> None:
    info = install("headless", "headless = nowhere:Sink", metadata="")
    (info / "METADATA").unlink()
    registry.refresh()
    assert "spike" in registry.available()
    assert registry.describe()
