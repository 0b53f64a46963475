"""``dynguard new-plugin``: what it writes is installable, works and passes its own tests."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from dynguard import registry, scaffold
from dynguard.errors import SetupError
from dynguard.testing import hooks_of

ROOT = Path(__file__).parents[1]
SOURCES = os.pathsep.join(str(ROOT / part) for part in (".", "plugins", "contrib"))


def test_it_writes_a_package_with_an_entry_point(tmp_path: Path) -> None:
    made = scaffold.create("loss-watch", tmp_path / "new")
    assert made == tmp_path / "new" / "loss-watch"
    written = sorted(str(path.relative_to(made)) for path in made.rglob("*") if path.is_file())
    assert written == [
        "README.md",
        "pyproject.toml",
        "src/loss_watch/__init__.py",
        "src/loss_watch/py.typed",
        "tests/test_plugin.py",
    ]
    project = tomllib.loads((made / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] == "loss-watch"
    assert project["entry-points"]["dynguard"] == {"loss_watch": "loss_watch:LossWatch"}
    texts = [path.read_text(encoding="utf-8") for path in made.rglob("*") if path.is_file()]
    assert [text for text in texts if "$" in text] == []


def run(folder: Path, *command: str) -> None:
    environment = {**os.environ, "PYTHONPATH": SOURCES}
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_its_tests_pass_as_they_are(tmp_path: Path) -> None:
    run(scaffold.create("loss_watch", tmp_path), "pytest", "-q", "-W", "error")


@pytest.mark.parametrize("command", ["check", "format --check --line-length=120"])
def test_its_code_is_tidy(tmp_path: Path, command: str) -> None:
    pytest.importorskip("ruff")
    run(scaffold.create("loss_watch", tmp_path), "ruff", *command.split(), "--no-cache", ".")


def test_its_module_is_a_plugin_that_the_entry_point_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = scaffold.create("quiet-layer", tmp_path)
    monkeypatch.syspath_prepend(str(made / "src"))
    plugin = metadata.EntryPoint("quiet_layer", "quiet_layer:QuietLayer", registry.GROUP).load()
    assert set(hooks_of(plugin())) == {"on_gradients"}


@pytest.mark.parametrize("name", ["a", "loss_watch", "loss-watch", "v2-guard", "a-b-c1"])
def test_names_that_are_fine(tmp_path: Path, name: str) -> None:
    assert scaffold.create(name, tmp_path).name == name.replace("_", "-")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "can't name a plugin"),
        ("LossWatch", "e.g. 'loss-watch'"),
        ("my plugin", "e.g. 'my-plugin'"),
        ("2fast", "e.g. 'fast'"),
        ("a--b", "e.g. 'a-b'"),
        ("../evil", "e.g. 'evil'"),
        ("\u00e9t\u00e9", "can't name a plugin"),
        ("class", "word of Python's own"),
        ("spike", "installed already (dynguard_plugins.stability.spike:Spike)"),
        ("deep", "preset"),
        ("numpy", "installed Python module 'numpy'"),
        ("json5-", "can't name a plugin"),
        ("email", "installed Python module 'email'"),
        ("dynguard", "installed Python module 'dynguard'"),
    ],
)
def test_names_that_are_refused(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(SetupError) as caught:
        scaffold.create(name, tmp_path)
    assert words in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_what_exists_is_not_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "loss-watch"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(SetupError, match="not an empty folder"):
        scaffold.create("loss-watch", tmp_path)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_an_empty_folder_is_filled_and_a_file_in_the_way_is_not(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    assert (scaffold.create("one", tmp_path) / "pyproject.toml").is_file()
    (tmp_path / "two").touch()
    with pytest.raises(SetupError, match="not an empty folder"):
        scaffold.create("two", tmp_path)


def test_a_folder_of_the_same_name_where_one_stands_is_no_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "watcher").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert scaffold.create("watcher", tmp_path).is_dir()


def test_where_nothing_can_be_written_it_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match="can't write"):
        scaffold.create("loss-watch", tmp_path / "file")
