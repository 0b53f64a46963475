"""The bus: dispatch of hooks to plugins, isolated, metered and with a circuit breaker.

Pluggy validates and orders the plugins; hot hooks are then dispatched from tuples (pluggy's own call costs microseconds
per event, a tuple loop a few tens of nanoseconds per plugin).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import pluggy

from dynguard.delivery import Lane
from dynguard.errors import PluginError, TrainingStopped, nearest
from dynguard.hookspecs import ALL, DETECTORS, GUARDS, PROJECT, SINKS, Hooks

log = logging.getLogger("dynguard")

# Failures of a plugin that end with it: SystemExit is a plugin's mistake, KeyboardInterrupt is the user's wish.
FAILURES = (Exception, SystemExit)
CAP = 4.0  # a weighted sample counts for at most so many times the mean so far
EXACT = 64  # the first calls of a channel are all timed; afterwards one in EXACT, weighted


@dataclass(slots=True)
class Meter:
    """Seconds and calls of one plugin. After the first calls of a hook only one call in 64 is timed, and weighted."""

    seconds: float = 0.0
    calls: int = 0


class Channel:
    """One hook's plugins as a tuple of callables. Calling it returns what the plugins answered, as (name, answer)."""

    __slots__ = ("bus", "calls", "hook", "tick")

    def __init__(self, bus: Bus, hook: str) -> None:
        self.bus = bus
        self.hook = hook
        self.calls: tuple[tuple[str, Callable[..., Any]], ...] = ()
        self.tick = 0

    def __call__(self, event: Any) -> list[tuple[str, Any]]:
        """Call every plugin with the event; an exception is that plugin's failure and never reaches the caller."""
        if not self.calls:
            return []
        self.tick = tick = self.tick + 1
        if tick <= EXACT or not tick % EXACT:
            return self.each(event, weight=1 if tick <= EXACT else EXACT)
        answers: list[tuple[str, Any]] = []
        for name, call in self.calls:
            try:
                answer = call(event)
            except FAILURES as error:
                self.bus.failed(name, self.hook, error)
            else:
                if answer is not None:
                    answers.append((name, answer))
        return answers

    def each(self, *arguments: Any, weight: int = 1) -> list[tuple[str, Any]]:
        """The same for any number of arguments, and always timed; the time counts ``weight`` times."""
        answers: list[tuple[str, Any]] = []
        for name, call in self.calls:
            start = perf_counter()
            try:
                answer = call(*arguments)
            except FAILURES as error:
                self.bus.failed(name, self.hook, error)
            else:
                if answer is not None:
                    answers.append((name, answer))
            finally:
                self.bus.charge(name, (perf_counter() - start) * weight, weight)
        return answers


class Bus:
    """All enabled plugins, checked against the contract, with one :class:`Channel` per hook.

    Args:
        plugins: (name, instance) in the order of dispatch.
        strict: re-raise a plugin's exception instead of isolating it (for tests).
        max_failures: after this many exceptions a plugin is switched off.
        report: called with (plugin, hook, exception, switched_off) at each failure.

    Raises:
        PluginError: not an instance, no hooks, a hook that does not exist or takes unknown arguments, or a detector
            that is also a guard of gradients.
    """

    def __init__(
        self,
        plugins: Sequence[tuple[str, object]] = (),
        *,
        strict: bool = False,
        max_failures: int = 3,
        report: Callable[[str, str, BaseException, bool], None] | None = None,
    ) -> None:
        self.strict = strict
        self.max_failures = max_failures
        self.report = report
        self.failures: dict[str, int] = {}
        self.meters: dict[str, Meter] = {}
        self._logged: set[tuple[str, str]] = set()
        self._manager = pluggy.PluginManager(PROJECT)
        self._manager.add_hookspecs(Hooks)
        self.channels = {hook: Channel(self, hook) for hook in ALL}
        self.loss = self.channels["on_loss"]
        self.gradients = self.channels["on_gradients"]
        self.embeddings = self.channels["on_embeddings"]
        self.adjust_rows = self.channels["adjust_embeddings"]
        self.adjust = self.channels["adjust_gradients"]
        self.parameters = self.channels["on_parameters"]
        self.trees = self.channels["on_trees"]
        # pluggy calls what was registered last first.
        for name, plugin in reversed(plugins):
            self._register(name, plugin)
        self._rebuild()

    @property
    def plugins(self) -> tuple[tuple[str, object], ...]:
        """(name, instance) of the plugins that are switched on, in the order of dispatch."""
        return tuple(reversed(self._manager.list_name_plugin()))

    def sinks(self) -> list[tuple[str, object]]:
        """The plugins that write records."""
        return [(name, plugin) for name, plugin in self.plugins if _implements(plugin, "write")]

    def lane(self, name: str) -> Lane:
        """A sink's three verbs, as the delivery calls them."""
        verbs = (dict(self.channels[verb].calls).get(name) for verb in SINKS)
        return Lane(name, *verbs)

    def _register(self, name: str, plugin: object) -> None:
        check(name, plugin)
        try:
            self._manager.register(plugin, name=name)
            self._manager.check_pending()
        except (pluggy.PluginValidationError, ValueError) as error:
            raise PluginError(f"plugin {name!r}: {str(error).strip().splitlines()[-1]}") from error
        self.meters.setdefault(name, Meter())

    def disable(self, name: str) -> None:
        """Switch a plugin off for the rest of the run."""
        if self._manager.get_plugin(name) is not None:
            self._manager.unregister(name=name)
            self._rebuild()

    def _rebuild(self) -> None:
        for hook, channel in self.channels.items():
            implementations = list(reversed(getattr(self._manager.hook, hook).get_hookimpls()))
            channel.calls = tuple((i.plugin_name, _adapt(hook, i)) for i in implementations)

    def failed(self, name: str, hook: str, error: BaseException) -> bool:
        """Count a plugin's exception; True when that switched it off. Re-raises when strict."""
        if isinstance(error, TrainingStopped) or self.strict:
            raise error
        self.failures[name] = count = self.failures.get(name, 0) + 1
        off = count >= self.max_failures
        if (name, hook) not in self._logged or off:
            self._logged.add((name, hook))
            tail = f"; switched off after {count} failures" if off else "; training goes on"
            log.warning(
                "plugin %r failed in %s: %s: %s%s", name, hook, type(error).__name__, error, tail, exc_info=error
            )
        if off:
            self.disable(name)
        if self.report is not None:
            self.report(name, hook, error, off)
        return off

    def charge(self, name: str, seconds: float, calls: int = 1) -> None:
        """Add to a plugin's meter."""
        meter = self.meters.setdefault(name, Meter())
        if calls > 1 and meter.calls:  # one slow sample (a switch of threads) is not 64 slow calls
            seconds = min(seconds, CAP * calls * meter.seconds / meter.calls)
        meter.seconds += seconds
        meter.calls += calls

    def guard(self, name: str, hook: str, work: Callable[[], Iterable[Any]]) -> list[Any]:
        """All that ``work()`` yields; an exception on the way is the plugin's failure and keeps what came before."""
        results: list[Any] = []
        start = perf_counter()
        try:
            results.extend(work())
        except FAILURES as error:
            self.failed(name, hook, error)
        finally:
            self.charge(name, perf_counter() - start)
        return results


def _implements(plugin: object, hook: str) -> bool:
    return hasattr(getattr(plugin, hook, None), f"{PROJECT}_impl")


def check(name: str, plugin: object) -> None:
    """Raise PluginError unless ``plugin`` is an instance that keeps the contract's plain rules."""
    if inspect.isclass(plugin):
        raise PluginError(f"plugin {name!r} is a class; give an instance: {plugin.__name__}()")
    marked = [n for n, m in inspect.getmembers(type(plugin), callable) if hasattr(m, f"{PROJECT}_impl")]
    if not marked:
        near = [n for n in dir(plugin) if n in ALL]
        hint = f" Mark {near[0]}() with @hookimpl." if near else ""
        raise PluginError(f"plugin {name!r} ({type(plugin).__name__}) has no method marked @hookimpl.{hint}")
    for hook in marked:
        if hook not in ALL:
            raise PluginError(f"plugin {name!r}: there is no hook {hook!r}.{nearest(hook, ALL)}")
        implementation = getattr(type(plugin), hook)
        options = getattr(implementation, f"{PROJECT}_impl")
        if options.get("hookwrapper") or options.get("wrapper"):
            raise PluginError(f"plugin {name!r}: {hook} is marked as a wrapper; dynguard calls plugins side by side")
    detects = [h for h in DETECTORS if h in marked]
    if detects and "adjust_gradients" in marked:
        raise PluginError(
            f"plugin {name!r} detects ({detects[0]}) and adjusts gradients: detectors observe, guards change; "
            "split it in two"
        )


def _adapt(hook: str, implementation: pluggy.HookImpl) -> Callable[..., Any]:
    """The implementation as a callable that takes all the hook's arguments by position, in the contract's order."""
    wanted = tuple(implementation.argnames)
    given = tuple(p for p in inspect.signature(getattr(Hooks, hook)).parameters if p != "self")
    function: Callable[..., Any] = implementation.function
    if wanted == given:
        return function
    where = [given.index(argument) for argument in wanted]
    return lambda *arguments: function(*(arguments[i] for i in where))


__all__ = ["DETECTORS", "GUARDS", "SINKS", "Bus", "Channel", "Meter"]
