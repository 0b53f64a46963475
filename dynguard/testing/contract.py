"""``check_plugin``: does a plugin obey the contract of ``dynguard.hookspecs``?"""

from __future__ import annotations

import copy
import importlib.util
import inspect
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dynguard.bus import Bus
from dynguard.errors import PluginError, nearest
from dynguard.hookspecs import ALL, DETECTORS, SINKS
from dynguard.testing.behaviour import Make, event_violations, sink_violations, state_violations
from dynguard.testing.calls import hooks_of, name_of, parameters_of
from dynguard.testing.device import device_violations
from dynguard.testing.trials import Arrays


def check_plugin(
    plugin: object,
    *,
    options: Mapping[str, Any] | None = None,
    arrays: Arrays | None = None,
    events: Sequence[Any] = (),
) -> None:
    """Assert that a plugin obeys the contract; all violations are told together.

    Checked are: hooks known to dynguard, marked ``@hookimpl``, with arguments that the hook has; options that are
    keyword-only, typed and refuse unknown names; no guard among detectors. Then the hooks are called: through clean
    steps, spikes, NaN, infinities, zero, missing, empty, sparse and half-precision gradients, late parameters and a
    second optimizer, with every kind of record. They must not raise; detectors must answer a Signal or None and change
    nothing; findings are checked where a signal fired; state must survive a save and load. With torch, the hot hooks
    are tried once more with tensors that are not on the CPU: they must not read the device, nor mix devices.

    Args:
        plugin: the class (it is then made with ``options``) or an instance (of which copies are tried).
        options: for making it.
        arrays: what the events hold: "torch" tensors (the default where torch is installed) or "numpy" arrays.
        events: further events of your own, e.g. one at which your detector must fire.

    Raises:
        AssertionError: with the list of all violations.
    """
    chosen = arrays or ("torch" if importlib.util.find_spec("torch") else "numpy")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of the plugin's arithmetic on NaN are its own business
        violations = list(dict.fromkeys(_violations(plugin, dict(options or {}), chosen, events)))
    if violations:
        listed = "\n".join(f"  - {violation}" for violation in violations)
        raise AssertionError(f"{name_of(plugin)} breaks the plugin contract:\n{listed}")


def _violations(plugin: object, options: dict[str, Any], arrays: Arrays, events: Sequence[Any]) -> Iterator[str]:
    if plugin is None or isinstance(plugin, types.ModuleType) or inspect.isroutine(plugin):
        yield f"it is a {type(plugin).__name__}; a plugin is an instance of a class, or that class"
        return
    try:
        make = _maker(plugin, options)
        instance = make()
    except Exception as error:  # noqa: BLE001 - a stranger's code; told as a violation
        yield f"it can't be made with options {options}: {type(error).__name__}: {error}"
        return
    static = [*_hook_violations(instance), *_mixture_violations(instance)] or list(_refusal(instance))
    yield from static
    yield from _option_violations(type(instance), options)
    if not static:
        yield from event_violations(make, arrays, events)
        if arrays == "torch":
            yield from device_violations(make)
        yield from state_violations(make, arrays)
        yield from sink_violations(make)


def _maker(plugin: object, options: dict[str, Any]) -> Make:
    if isinstance(plugin, type):
        return lambda: plugin(**options)
    if options:
        return lambda: type(plugin)(**options)
    pristine = copy.deepcopy(plugin)
    return lambda: copy.deepcopy(pristine)


def _hook_violations(plugin: object) -> Iterator[str]:
    hooks = hooks_of(plugin)
    yield from _unmarked(plugin, hooks)
    for name, hook in hooks.items():
        if name not in ALL:
            yield f"@hookimpl on {name!r}, which is no hook.{nearest(name, ALL)}"
            continue
        strange = [argument for argument in hook.argnames if argument not in parameters_of(name)]
        if strange:
            yield f"{name} wants {', '.join(map(repr, strange))}, but the hook gives ({', '.join(parameters_of(name))})"
        if hook.wrapper or hook.hookwrapper:
            yield f"{name} is a hook wrapper; dynguard calls hooks one by one, so there is nothing to wrap"
    if not hooks:
        yield f"it has no hook: mark at least one method with @hookimpl ({', '.join(ALL)})"


def _unmarked(plugin: object, hooks: Mapping[str, Any]) -> Iterator[str]:
    # Files and the like have a close() of their own, so a sink's verbs count only beside a marked write().
    meant = [name for name in ALL if name not in SINKS or "write" in hooks]
    for name in meant:
        if name not in hooks and callable(getattr(plugin, name, None)):
            yield f"{name} is not marked @hookimpl, so it would never be called"


def _refusal(plugin: object) -> Iterator[str]:
    """Why the bus itself would not take the plugin, in its words."""
    try:
        Bus([(name_of(plugin), plugin)])
    except PluginError as error:
        yield str(error)


def _mixture_violations(plugin: object) -> Iterator[str]:
    hooks = hooks_of(plugin)
    detects = [name for name in DETECTORS if name in hooks]
    if detects and "adjust_gradients" in hooks:
        yield f"it detects ({', '.join(detects)}) and changes gradients (adjust_gradients): make that two plugins"


def _option_violations(plugin: type, options: dict[str, Any]) -> Iterator[str]:
    init = inspect.getattr_static(plugin, "__init__")
    if init is object.__init__:
        return
    for parameter in list(inspect.signature(inspect.unwrap(init)).parameters.values())[1:]:
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            yield f"option {parameter.name!r} is not keyword-only: put it after a * in __init__"
        elif parameter.annotation is inspect.Parameter.empty:
            yield f"option {parameter.name!r} has no type, so its values are not checked"
    if len(inspect.signature(inspect.unwrap(init)).parameters) > 1:
        yield from _unknown_option(plugin, options)


def _unknown_option(plugin: type, options: dict[str, Any]) -> Iterator[str]:
    try:
        plugin(**options, no_such_option=1)
    except ValueError:  # OptionError, or pydantic's own
        return
    except Exception:  # noqa: BLE001 - refused, but by accident: the values are not validated either
        yield "its options are not validated: decorate __init__ with @validated (from dynguard import validated)"
    else:
        yield "an unknown option is accepted in silence: name all options in __init__ and decorate it with @validated"
