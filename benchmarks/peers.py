"""Published releases to measure against: each installed in a folder of its own and loaded side by side.

All releases share one import name, so each is imported from its folder and then taken out of ``sys.modules``; the
module objects live on in the references that :func:`load` returns.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).resolve().parent / ".peers"
NAME = "stabilityguard"
VERSIONS = ("0.2.0", "0.3.0")


def install(version: str) -> Path:
    """The folder that holds ``stabilityguard==version``, installed from the package index if it is not there yet.

    Raises RuntimeError with pip's own words when it can't be had.
    """
    folder = FOLDER / f"{NAME}-{version}"
    if not (folder / NAME).is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        done = subprocess.run(
            [*command, "--target", str(folder), f"{NAME}=={version}"], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{NAME} {version} can't be installed: {done.stderr.strip()}")
    return folder


def load(version: str) -> ModuleType:
    """The package of that release, whatever other release was loaded before."""
    folder = install(version)
    _forget()
    sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module(NAME)
    finally:
        sys.path.remove(str(folder))
        _forget()
    if module.__file__ is None or not Path(module.__file__).is_relative_to(folder):
        raise RuntimeError(f"{NAME} {version} was not loaded from {folder} but from {module.__file__}")
    return module


def _forget() -> None:
    for name in [name for name in sys.modules if name == NAME or name.startswith(f"{NAME}.")]:
        del sys.modules[name]


def gradtracer(version: str, module: str) -> Any:
    """A module of one release of gradtracer, e.g. ``analyzers.embedding``, installed into a folder of its own.

    Raises RuntimeError with pip's own words when it can't be had.
    """
    folder = FOLDER / f"gradtracer-{version}"
    if not (folder / "gradtracer").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        done = subprocess.run([*command, f"gradtracer=={version}"], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"gradtracer {version} can't be installed: {done.stderr.strip()}")
    for name in [name for name in sys.modules if name.split(".")[0] == "gradtracer"]:
        del sys.modules[name]
    # The package's own __init__ wants plotting libraries; its analyzers do not.
    package = ModuleType("gradtracer")
    package.__path__ = [str(folder / "gradtracer")]
    sys.modules["gradtracer"] = package
    return importlib.import_module(f"gradtracer.{module}")
