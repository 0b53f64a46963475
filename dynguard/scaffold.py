"""``dynguard new-plugin``: writes an installable package around a small working detector."""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from pathlib import Path
from string import Template

import dynguard
from dynguard import registry
from dynguard.errors import SetupError

PYPROJECT = Template("""\
[build-system]
requires = ["hatchling>=1.26"]
build-backend = "hatchling.build"

[project]
name = "$distribution"
version = "0.1.0"
description = "$title: a plugin for dynguard."
readme = "README.md"
requires-python = ">=3.11"
dependencies = ["dynguard>=$version"]

[project.optional-dependencies]
test = ["pytest>=8"]

# The name on the left is what users write: FlowManager(model, optimizer, plugins=["default", "$plugin"])
[project.entry-points.dynguard]
$plugin = "$plugin:$cls"

[tool.hatch.build.targets.wheel]
packages = ["src/$plugin"]

[tool.pytest.ini_options]
pythonpath = ["src"]
testpaths = ["tests"]
""")

MODULE = Template('''\
"""$title: a plugin for dynguard."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from dynguard import Action, Evidence, Finding, Severity, Signal, hookimpl, validated
from pydantic import Field


class $cls:
    """Skips the update when the gradient of a layer is larger than a limit."""

    @validated
    def __init__(self, *, limit: Annotated[float, Field(gt=0)] = 1000.0) -> None:
        self.limit = limit

    @hookimpl
    def on_gradients(self, event: Any) -> Signal:
        """Answer with arrays that stay on the device: no float(), no if, no print here."""
        fired = event.norms > self.limit
        return Signal(event.norms, fired, lambda: self.explain(event, fired), action=Action.SKIP)

    def explain(self, event: Any, fired: Any) -> Iterator[Finding]:
        """Called only when an entry of ``fired`` is true; here reading is allowed."""
        for name, hit, norm in zip(event.names, fired.tolist(), event.norms.tolist(), strict=True):
            if hit:
                yield Finding(
                    kind="large_gradient",
                    severity=Severity.ERROR,
                    step=event.step,
                    subject=name,
                    action=Action.SKIP,
                    evidence=(Evidence(name="gradient_norm", value=norm), Evidence(name="limit", value=self.limit)),
                    premise=f"the gradient of {name} has norm {norm:.3g}, above {self.limit:g}",
                    implies="this update would move the layer far from where it is",
                    expected_effect="weights and optimizer state stay as they are",
                )
''')

TEST = Template("""\
import pytest
from dynguard import Action
from dynguard.errors import OptionError
from dynguard.testing import call, check_plugin, gradient_event

from $plugin import $cls


def test_it_obeys_the_contract():
    check_plugin($cls)


def test_a_large_gradient_is_found_and_its_layer_named():
    event = gradient_event(step=3, norms={"a": 1.0, "b": 5000.0})
    signal = call($cls(limit=100), "on_gradients", event=event)
    (finding,) = signal.explain()
    assert (finding.subject, finding.step, finding.action) == ("b", 3, Action.SKIP)
    assert finding.value("gradient_norm") == 5000.0


def test_ordinary_gradients_are_left_alone():
    signal = call($cls(), "on_gradients", event=gradient_event(norms={"a": 1.0, "b": 2.0}))
    assert not signal.fired.any()


def test_a_wrong_option_is_refused():
    with pytest.raises(OptionError, match="limit"):
        $cls(limit=-1)
""")

README = Template("""\
# $distribution

$title: a plugin for dynguard.

    pip install -e '.[test]'
    pytest
    dynguard plugins

The last command lists `$plugin` with its hooks and options. Enable it by name:

```python
from dynguard import FlowManager

flow = FlowManager(model, optimizer, plugins=["default", ("$plugin", {"limit": 500.0})])
```

or in `dynguard.toml`:

```toml
plugins = ["default", "$plugin"]

[plugin.$plugin]
limit = 500.0
```
""")


def create(name: str, directory: Path = Path(".")) -> Path:
    """Write a package for a plugin called ``name`` into a new folder of ``directory``, and return that folder.

    Dashes become underscores in the plugin's name and module (``my-plugin`` is enabled as ``my_plugin``), underscores
    become dashes in the names of the distribution and the folder.

    Raises:
        SetupError: the name can't be a plugin's, is taken, or the folder exists and is not empty.
    """
    plugin = _checked(name)
    folder = Path(directory) / plugin.replace("_", "-")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SetupError(f"{folder} exists already and is not an empty folder; choose another name or directory")
    words = plugin.split("_")
    names = {
        "plugin": plugin,
        "distribution": plugin.replace("_", "-"),
        "cls": "".join(word.capitalize() for word in words),
        "title": " ".join(words).capitalize(),
        "version": dynguard.__version__,
    }
    for path, template in {
        "pyproject.toml": PYPROJECT,
        "README.md": README,
        f"src/{plugin}/__init__.py": MODULE,
        "tests/test_plugin.py": TEST,
    }.items():
        _write(folder / path, template.substitute(names))
    (folder / "src" / plugin / "py.typed").touch()
    return folder


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SetupError(f"can't write {path}: {error.strerror or error}") from error


def _checked(name: str) -> str:
    """The plugin's name as a Python identifier; SetupError where it can't be one or is taken."""
    plugin = name.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", plugin):
        raise SetupError(
            f"{name!r} can't name a plugin: use lower-case letters, digits and single dashes, a letter first"
            f"{_better(name)}"
        )
    if keyword.iskeyword(plugin) or keyword.issoftkeyword(plugin):
        raise SetupError(f"{name!r} is a word of Python's own; choose another, e.g. {name + '-guard'!r}")
    if plugin in registry.available():
        offer = registry.available()[plugin]
        raise SetupError(f"a plugin called {plugin!r} is installed already ({offer.value}); choose another name")
    if plugin in registry.PRESETS:
        raise SetupError(f"{name!r} is the name of a preset; choose another")
    if plugin in sys.stdlib_module_names or _importable(plugin):
        raise SetupError(f"{name!r} would hide the installed Python module {plugin!r}; choose another name")
    return plugin


def _better(name: str) -> str:
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name)
    better = re.sub(r"[^a-z0-9]+", "-", spaced.lower()).strip("-").lstrip("0123456789-")
    return f", e.g. {better!r}" if better else ""


def _importable(module: str) -> bool:
    """Whether a module of that name is installed; a mere folder of that name (a namespace) is not one."""
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None
