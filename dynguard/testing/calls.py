"""Hooks of a plugin, found and called as the bus does."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pluggy

from dynguard.errors import nearest
from dynguard.hookspecs import ALL, PROJECT, Hooks

Hook = pluggy.HookImpl
_MANAGER = pluggy.PluginManager(PROJECT)


def hooks_of(plugin: object) -> dict[str, Hook]:
    """All methods of ``plugin`` that are marked ``@hookimpl``, whether dynguard knows them or not, by hook name."""
    hooks = {}
    for attribute in dir(plugin):
        options = _MANAGER.parse_hookimpl_opts(plugin, attribute)
        if options is not None:
            function = getattr(plugin, attribute)
            hooks[attribute] = Hook(plugin, attribute, function, options)
    return hooks


def parameters_of(hook: str) -> tuple[str, ...]:
    """Names of the arguments that the contract gives to ``hook``."""
    return tuple(name for name in inspect.signature(getattr(Hooks, hook)).parameters if name != "self")


def name_of(plugin: object) -> str:
    """Name of the plugin's class, for messages."""
    return plugin.__name__ if inspect.isclass(plugin) else type(plugin).__name__


def call(plugin: object, hook: str, **arguments: Any) -> Any:
    """Call a hook as the bus would: with those of the arguments that the implementation names.

    Raises:
        AttributeError: there is no such hook, or the plugin has none by that name marked ``@hookimpl``.
        TypeError: an argument is not the hook's, or one that the implementation wants was not given.
    """
    if hook not in ALL:
        raise AttributeError(f"dynguard has no hook {hook!r}.{nearest(hook, ALL)}")
    found = hooks_of(plugin).get(hook)
    if found is None:
        raise AttributeError(_missing(plugin, hook))
    known = parameters_of(hook)
    strange = [name for name in arguments if name not in known]
    if strange:
        raise TypeError(f"hook {hook!r} has no argument {strange[0]!r}; it is given ({', '.join(known)})")
    wanting = [f"{name}=" for name in found.argnames if name not in arguments]
    if wanting:
        raise TypeError(f"call({name_of(plugin)}, {hook!r}) needs {', '.join(wanting)}")
    return found.function(*(arguments[name] for name in found.argnames))


def _missing(plugin: object, hook: str) -> str:
    who = name_of(plugin)
    if callable(getattr(plugin, hook, None)):
        return f"{who}.{hook} is not marked: write @hookimpl above it (from dynguard import hookimpl)"
    return f"{who} has no hook {hook!r}; its hooks are: {', '.join(hooks_of(plugin)) or 'none'}"


def problems(plugin: object, hook: str, **arguments: Any) -> Iterator[str]:
    """Call a hook whose answer does not matter, if the plugin has it; yields what it raised."""
    if hook in hooks_of(plugin):
        try:
            call(plugin, hook, **arguments)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a stranger's code; told as a violation
            yield f"{hook} raised {type(error).__name__}: {error}"
