"""The wheel, the import weight and the README: what a user gets, checked from outside the source tree."""

from __future__ import annotations

import ast
import email
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"dynguard", "dynguard_plugins", "dynguard_contrib"}
SHIPPED = ("dynguard", "plugins", "contrib", "tests", "examples")
FILES = ("pyproject.toml", "README.md", "LICENSE")


def run(code: str, *, cwd: Path) -> str:
    """Standard output of a fresh interpreter that runs ``code``; its traceback fails the test."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy, so that nothing is written into the tree and nothing stale gets in."""
    tree = tmp_path_factory.mktemp("tree")
    for folder in SHIPPED:
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for file in FILES:
        shutil.copy(ROOT / file, tree / file)
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


@pytest.fixture(scope="session")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel unpacked, as pip would lay it out."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def metadata_file(site: Path, name: str) -> str:
    (folder,) = site.glob("dynguard-*.dist-info")
    return (folder / name).read_text(encoding="utf-8")


def test_roots_of_the_wheel_are_the_three_packages(names: list[str]) -> None:
    roots = {name.split("/")[0] for name in names}
    info = {root for root in roots if root.endswith(".dist-info")}
    assert roots - info == PACKAGES
    assert len(info) == 1


def test_every_package_is_marked_as_typed(names: list[str]) -> None:
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)


def test_wheel_holds_all_modules_and_nothing_else(names: list[str]) -> None:
    folders = [ROOT / "dynguard", ROOT / "plugins" / "dynguard_plugins", ROOT / "contrib" / "dynguard_contrib"]
    source = {f"{f.name}/{p.relative_to(f).as_posix()}" for f in folders for p in f.rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == source
    stray = re.compile(r"(^|/)(tests?|conftest|examples|benchmarks|__pycache__)(/|$|\.)")
    assert [name for name in names if stray.search(name)] == []


def test_version_is_the_same_everywhere(site: Path, tmp_path: Path) -> None:
    told = email.message_from_string(metadata_file(site, "METADATA"))
    code = f"import sys; sys.path.insert(0, {str(site)!r}); import dynguard as d; print(d.__version__, d.__file__)"
    version, file = run(code, cwd=tmp_path).splitlines()[0].split(maxsplit=1)
    assert Path(file).is_relative_to(site)
    assert told["Version"] == version
    assert told["License-Expression"] == "MIT"


def test_required_dependencies_are_light(site: Path) -> None:
    told = email.message_from_string(metadata_file(site, "METADATA"))
    required = [line for line in told.get_all("Requires-Dist", []) if "extra ==" not in line]
    found = {match.group() for line in required if (match := re.match(r"[a-z0-9-]+", line))}
    assert found == {"numpy", "scipy", "pluggy", "pydantic", "rich", "typer"}


def entry_points(site: Path) -> dict[str, dict[str, str]]:
    parser = ConfigParser(delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment,method-assign] # names are case-sensitive
    parser.read_string(metadata_file(site, "entry_points.txt"))
    return {section: dict(parser[section]) for section in parser.sections()}


def test_entry_points_resolve_inside_the_wheel(site: Path, tmp_path: Path) -> None:
    declared = entry_points(site)
    assert declared["dynguard"].keys() >= {"spike", "console", "history", "json", "memory"}
    targets = [*declared["dynguard"].values(), *declared["console_scripts"].values()]
    code = f"""
import importlib, inspect, sys
sys.path.insert(0, {str(site)!r})
for target in {targets!r}:
    module, attribute = target.split(":")
    module = importlib.import_module(module)
    assert module.__file__.startswith({str(site)!r}), module.__file__
    kind = "class" if inspect.isclass(getattr(module, attribute)) else "function"
    print(target, kind)
"""
    lines = dict(line.split() for line in run(code, cwd=tmp_path).splitlines())
    assert {lines[target] for target in declared["dynguard"].values()} == {"class"}
    assert lines[declared["console_scripts"]["dynguard"]] == "function"


def test_source_tree_keeps_its_layout() -> None:
    for folder in ("plugins", "contrib", "tests"):
        assert (ROOT / folder).is_dir()
        assert not (ROOT / folder / "__init__.py").exists()


HEAVY = ("torch", "xgboost", "lightgbm", "catboost", "rich", "scipy", "pandas", "matplotlib", "sklearn")


@pytest.mark.parametrize(
    ("module", "banned"),
    [
        ("dynguard", (*HEAVY, "typer")),
        ("dynguard.registry", (*HEAVY, "typer")),
        ("dynguard.bus", (*HEAVY, "typer")),
        ("dynguard.flow", (*HEAVY, "typer")),
        ("dynguard.cli", HEAVY),
    ],
)
def test_import_is_light(module: str, banned: tuple[str, ...], tmp_path: Path) -> None:
    code = f"import sys, {module}; print(*[name for name in {banned!r} if name in sys.modules])"
    assert run(code, cwd=tmp_path).split() == []


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """README's Python blocks run as one session, from top to bottom: its folder, and what was printed.

    Their own assertions are part of it. The last line is added here: the evidence of the first gradient spike.
    """
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("readme")
    first, *rest = blocks(ROOT / "README.md", "python")
    first += "print([[e.name for e in f.evidence] for f in flow.findings if f.kind == 'grad_spike'][0])\n"
    return folder, [line for line in run("\n".join([first, *rest]), cwd=folder).splitlines() if line.startswith("[")]


def test_readme_code_finds_what_it_plants(session: tuple[Path, list[str]]) -> None:
    folder, (findings, interventions, _) = session
    assert {step for step, _ in ast.literal_eval(findings)} == {200, 250}
    assert {(step, action) for step, action, _ in ast.literal_eval(interventions)} == {(200, "skip"), (250, "skip")}
    assert list((folder / "dynguard-runs").glob("*/history.sqlite"))


def test_readme_shows_the_panel_that_is_printed(session: tuple[Path, list[str]]) -> None:
    """Not the numbers, which may differ between machines, but every line that the panel has."""
    panel = next(block for block in blocks(ROOT / "README.md", "text") if "grad_spike (error)" in block)
    shown = re.findall(r"^│ (\w+)", panel, flags=re.MULTILINE)
    evidence = ast.literal_eval(session[1][-1])
    assert shown == ["layer", "seen", *evidence, "means", "action", "confidence", "report"]


def test_readme_configuration_is_accepted(tmp_path: Path) -> None:
    (block,) = blocks(ROOT / "README.md", "toml")
    (tmp_path / "dynguard.toml").write_text(block, encoding="utf-8")
    code = "from dynguard import registry as r; c = r.load_config(); print(*dict(r.resolve(c.plugins, c.options)))"
    default = "collapse console health history json popularity rows spike trees"
    assert run(code, cwd=tmp_path).split() == default.split()
    assert tomllib.loads(block)["flow"] == {"mode": "observe"}


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/index.md", "docs/evidence.md"])
def test_links_between_pages_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    missing = [link for link in links if link and not (ROOT / page).parent.joinpath(link).exists()]
    assert missing == []


def test_readme_names_the_commands_that_the_makefile_has() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in ("demo", "test"):
        assert re.search(rf"^    make {target}$", readme, flags=re.MULTILINE)
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)
    assert "make --no-print-directory test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_presets_load_no_heavy_library(tmp_path: Path) -> None:
    """Who trains trees has no torch, and a script run under the watch may still have to set its environment up."""
    code = (
        "import sys; from dynguard import registry\n"
        "registry.resolve('deep')\n"
        "print([m for m in ('torch', 'xgboost', 'lightgbm', 'catboost', 'scipy', 'pandas') if m in sys.modules])"
    )
    assert run(code, cwd=tmp_path).strip() == "[]"
