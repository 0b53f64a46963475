"""Finding plugins by entry point, building them from names and options, and the configuration file.

Discovery is not activation: installed plugins are listed without being imported; only those that are named are loaded.
First-party plugins take the same way as anyone else's: group ``dynguard`` of a distribution's entry points.
"""

from __future__ import annotations

import functools
import importlib.metadata as metadata
import inspect
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dynguard.errors import MissingExtraError, PluginError, nearest
from dynguard.hookspecs import ALL, PROJECT
from dynguard.options import option_table, validated

GROUP = "dynguard"
PRESETS: dict[str, tuple[str, ...]] = {
    "default": ("spike", "health", "rows", "popularity", "collapse", "trees", "console", "history"),
    "deep": (
        "spike", "health", "rows", "popularity", "collapse", "towers", "eos", "precursor", "flow", "trees", "console",
        "history",
    ),
}  # fmt: skip
# Libraries whose absence is mended by an extra of this distribution.
EXTRAS = {
    "torch": "torch",
    "xgboost": "xgboost",
    "lightgbm": "lightgbm",
    "catboost": "catboost",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "tensorboard": "tensorboard",
    "transformers": "huggingface",
    "accelerate": "huggingface",
    "lightning": "lightning",
    "jinja2": "report",
    "plotly": "report",
    "matplotlib": "demo",
}


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """What ``dynguard plugins`` shows of one installed plugin; ``error`` says why it can't be loaded."""

    name: str
    distribution: str
    version: str
    target: str
    hooks: tuple[str, ...] = ()
    options: tuple[tuple[str, str, str], ...] = ()
    order: int | None = None
    error: str | None = None
    summary: str = ""


@dataclass(frozen=True, slots=True)
class _Offer:
    """One entry point with the distribution that makes it."""

    entry: metadata.EntryPoint
    distribution: str
    version: str


@functools.lru_cache(maxsize=1)
def _discover() -> tuple[dict[str, list[_Offer]], dict[str, str]]:
    """All offers by plugin name, and broken distributions with what is wrong. Cached for the life of the process."""
    offers: dict[str, list[_Offer]] = {}
    broken: dict[str, str] = {}
    seen: set[str] = set()
    for distribution in metadata.distributions():
        where = str(getattr(distribution, "_path", distribution))
        try:
            name = distribution.metadata["Name"] or Path(where).name.split("-")[0]
            key = re.sub(r"[-_.]+", "-", name).lower()
            if key in seen:
                continue  # shadowed by an earlier entry of sys.path
            entries = [e for e in distribution.entry_points if e.group == GROUP]
            version = distribution.version or "?"
        except Exception as error:  # noqa: BLE001 - a stranger's broken metadata is reported, not fatal
            broken[where] = f"{type(error).__name__}: {error}"
            continue
        seen.add(key)
        for entry in entries:
            offers.setdefault(entry.name, []).append(_Offer(entry, name, version))
    return offers, broken


def refresh() -> None:
    """Forget what was discovered; the next look reads the environment again."""
    _discover.cache_clear()


def available() -> dict[str, metadata.EntryPoint]:
    """Installed plugins by name, without importing any. Names claimed twice are there too; using one is an error."""
    return {name: offers[0].entry for name, offers in sorted(_discover()[0].items())}


def broken() -> dict[str, str]:
    """Distributions whose metadata can't be read: place -> what is wrong."""
    return dict(_discover()[1])


def _offer(name: str) -> _Offer:
    offers = _discover()[0]
    if name not in offers:
        raise PluginError(f"no plugin is called {name!r}.{nearest(name, [*offers, *PRESETS])}")
    if len(offers[name]) > 1:
        both = " and ".join(f"{o.distribution} {o.version} ({o.entry.value})" for o in offers[name])
        raise PluginError(
            f"plugin name {name!r} is claimed by two distributions: {both}. "
            f"Uninstall one, or pass an instance: plugins=[TheClass()]"
        )
    return offers[name][0]


def load(name: str) -> type:
    """The class behind a plugin name.

    Raises:
        PluginError: no such name (nearest ones offered), claimed twice, or it can't be imported.
        MissingExtraError: a library it needs is not installed; the message has the pip command.
    """
    offer = _offer(name)
    try:
        target = offer.entry.load()
    except MissingExtraError:
        raise
    except ModuleNotFoundError as error:
        library = (error.name or "").split(".")[0]
        if library in EXTRAS:
            raise MissingExtraError(library, EXTRAS[library], f"plugin {name!r}") from error
        raise PluginError(f"plugin {name!r} ({offer.distribution} {offer.version}) can't be loaded: {error}") from error
    except Exception as error:
        raise PluginError(
            f"plugin {name!r} ({offer.distribution} {offer.version}) can't be loaded: {type(error).__name__}: {error}"
        ) from error
    if not inspect.isclass(target):
        raise PluginError(
            f"plugin {name!r}: entry point {offer.entry.value!r} is not a class but {type(target).__name__}"
        )
    return target


def create(name: str, options: Mapping[str, Any] | None = None) -> object:
    """An instance of the plugin ``name`` with validated ``options``; see load() for the errors, and OptionError."""
    return build(load(name), options or {})


def build(plugin: type, options: Mapping[str, Any]) -> object:
    """An instance of a plugin class whose options are validated even if its author left ``@validated`` out."""
    init = plugin.__init__  # type: ignore[misc]
    if init is object.__init__ or getattr(init, "__dynguard_validated__", False):
        if init is object.__init__ and options:
            raise PluginError(f"plugin {plugin.__name__!r} takes no options; got {', '.join(map(repr, options))}")
        return plugin(**options)
    instance: object = object.__new__(plugin)
    validated(init)(instance, **options)
    return instance


def hooks_of(plugin: object) -> tuple[str, ...]:
    """Names of the hooks that a plugin or plugin class implements, in the order of a step."""
    return tuple(name for name in ALL if hasattr(getattr(plugin, name, None), f"{PROJECT}_impl"))


def describe() -> list[PluginInfo]:
    """All installed plugins in the order of dispatch; each is imported, and why one can't be loaded is in ``error``."""
    rows = [_describe(name, position) for position, name in enumerate(sorted(_discover()[0]))]
    for where, error in broken().items():
        rows.append(PluginInfo(name="?", distribution=Path(where).name, version="?", target="", error=error))
    return rows


def _describe(name: str, position: int) -> PluginInfo:
    offers = _discover()[0][name]
    first = offers[0]
    base = PluginInfo(name, first.distribution, first.version, first.entry.value)
    try:
        plugin = load(name)
        summary = (inspect.getdoc(plugin) or "").split("\n")[0]
        return replace(
            base, hooks=hooks_of(plugin), options=tuple(option_table(plugin)), order=position, summary=summary
        )
    except Exception as error:  # noqa: BLE001 - the listing tells what is wrong with each, whatever it is
        return replace(base, error=str(error))


def default_name(plugin: object) -> str:
    """The name of an instance: its ``name`` attribute, its entry point's name, or its class in snake case."""
    own = getattr(plugin, "name", None)
    if isinstance(own, str) and own:
        return own
    cls = type(plugin)
    target = f"{cls.__module__}:{cls.__qualname__}"
    for name, entry in available().items():
        if entry.value.replace(" ", "") == target:
            return name
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()


Wanted = str | tuple[str, Mapping[str, Any]] | object


def resolve(
    wanted: Iterable[Wanted] | Wanted, options: Mapping[str, Mapping[str, Any]] | None = None
) -> list[tuple[str, object]]:
    """(name, instance) of every plugin asked for, sorted by name, which is the order of dispatch.

    Args:
        wanted: names, ``(name, options)`` pairs, instances, the presets ``"default"`` and ``"deep"``; ``"-name"``
            leaves out one that a preset brings. What is named itself replaces the preset's plugin of the same name.
        options: options by name from a configuration file, for plugins that are given by name alone.
    """
    if isinstance(wanted, str) or not isinstance(wanted, Iterable) or _is_pair(wanted):
        wanted = [wanted]
    options = options or {}
    from_preset: dict[str, object] = {}
    named: list[tuple[str, object]] = []
    dropped: set[str] = set()
    for item in wanted:
        if isinstance(item, str) and item in PRESETS:
            from_preset.update(dict.fromkeys(PRESETS[item]))
        elif isinstance(item, str) and item.startswith("-"):
            dropped.add(item[1:])
        else:
            named.append(_one(item, options))
    unknown = dropped - set(from_preset) - set(available())
    if unknown:
        raise PluginError(
            f"can't leave out {min(unknown)!r}: no such plugin.{nearest(min(unknown), list(available()))}"
        )
    taken = {name for name, _ in named}
    chosen = {n: create(n, options.get(n)) for n in from_preset if n not in taken and n not in dropped}
    for name, plugin in named:
        chosen[_unique(name, chosen)] = plugin
    return sorted(chosen.items())


def _is_pair(item: object) -> bool:
    return isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], Mapping)


def _one(item: Wanted, options: Mapping[str, Mapping[str, Any]]) -> tuple[str, object]:
    if isinstance(item, str):
        return item, create(item, options.get(item))
    if isinstance(item, tuple):
        if not _is_pair(item):
            raise PluginError(f"a plugin as a tuple is (name, options), e.g. ('spike', {{'ratio': 10}}); got {item!r}")
        return item[0], create(item[0], item[1])
    if inspect.isclass(item):
        raise PluginError(f"{item.__name__} is a class; give an instance: plugins=[{item.__name__}()]")
    if not hooks_of(item):
        raise PluginError(
            f"{item!r} is neither a plugin's name, nor (name, options), nor an instance with methods marked @hookimpl"
        )
    return default_name(item), item


def _unique(name: str, taken: Mapping[str, object]) -> str:
    if name not in taken:
        return name
    number = 2
    while f"{name}-{number}" in taken:
        number += 1
    return f"{name}-{number}"


@dataclass(frozen=True, slots=True)
class Config:
    """A configuration file: which plugins, their options by name, and keywords of FlowManager."""

    plugins: Sequence[Wanted] | None = None
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    flow: Mapping[str, Any] = field(default_factory=dict)
    path: Path | None = None


def load_config(path: str | Path | None = None) -> Config:
    """Read ``dynguard.toml``, or ``[tool.dynguard]`` of ``pyproject.toml``, in the working directory; or ``path``.

    The file holds ``plugins = [...]``, a table ``[plugin.NAME]`` of options for each, and ``[flow]``. With options but
    without ``plugins``, the default preset and the plugins that have a table are enabled.

    Raises PluginError when the file is named but can't be read, is not TOML, or has an unknown key.
    """
    if path is not None:
        return _parse(Path(path), must=True)
    for name in ("dynguard.toml", "pyproject.toml"):
        if Path(name).is_file():
            config = _parse(Path(name), must=name == "dynguard.toml")
            if config.path is not None:
                return config
    return Config()


def _parse(path: Path, *, must: bool) -> Config:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        if not must:
            return Config()  # somebody else's pyproject.toml is not ours to judge
        raise PluginError(f"configuration {path}: {error}") from None
    if path.name == "pyproject.toml":
        data = data.get("tool", {}).get("dynguard")
        if data is None:
            return Config()
    known = ("plugins", "plugin", "flow")
    for key in data:
        if key not in known:
            raise PluginError(f"configuration {path}: unknown key {key!r}.{nearest(key, known)}")
    options = data.get("plugin", {})
    if not isinstance(options, dict) or not all(isinstance(v, dict) for v in options.values()):
        raise PluginError(f"configuration {path}: write the options of a plugin as a table, e.g. [plugin.spike]")
    plugins = data.get("plugins", ["default", *options] if options else None)
    if isinstance(plugins, dict):
        raise PluginError(f"configuration {path}: options of a plugin go in [plugin.NAME], not [plugins.NAME]")
    if plugins is not None and not (isinstance(plugins, list) and all(isinstance(p, str) for p in plugins)):
        raise PluginError(f'configuration {path}: plugins is a list of names, e.g. plugins = ["default", "json"]')
    return Config(plugins=plugins, options=options, flow=data.get("flow", {}), path=path)
