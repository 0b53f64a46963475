"""FlowManager: composes plugins, bus, sources, delivery and history. The one line that a user adds."""

from __future__ import annotations

import atexit
import logging
import os
import platform
import sys
import time
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import dynguard
from dynguard import registry, selfreport
from dynguard.actions import Intervention
from dynguard.bus import Bus
from dynguard.delivery import Delivery
from dynguard.errors import ClosedError, MissingExtraError, RunDirectoryError, SetupError, TrainingStopped
from dynguard.events import LossEvent, RunInfo
from dynguard.findings import Finding, RunEnd, RunStart, Section
from dynguard.history import create_run_directory
from dynguard.judge import Judge
from dynguard.settings import Settings

if TYPE_CHECKING:
    from dynguard.torch.source import Source, Successors

log = logging.getLogger("dynguard")


@dataclass(frozen=True, slots=True)
class Overhead:
    """What a plugin has cost: seconds in its hooks (for a sink, of its own worker thread), share of the run, calls."""

    seconds: float
    share: float
    calls: int


class FlowManager:
    """Watches the training of a model.

    >>> flow = FlowManager(model, optimizer)                       # doctest: +SKIP
    >>> for batch in loader:                                       # doctest: +SKIP
    ...     loss = loss_fn(model(batch.x), batch.y)
    ...     flow.observe(loss=loss, batch=batch)                   # optional
    ...     loss.backward(); optimizer.step(); optimizer.zero_grad()
    >>> flow.close()                                               # doctest: +SKIP

    Args:
        model: the module that is trained, or a list or dict of several; None where only trees are trained.
        optimizer: its optimizer, or a list or dict (name -> optimizer) of several.
        plugins: names, instances, ``(name, options)`` pairs and the presets ``"default"`` and ``"deep"``. None takes
            them from ``dynguard.toml`` or ``[tool.dynguard]`` in the working directory, else ``"default"``.
        loss_fn: ``(model, batch) -> loss``, for detectors that evaluate the loss themselves.
        run_dir: where the run's files go; default a new folder under ``./dynguard-runs``.
        resume: go on writing into a ``run_dir`` that holds a run already.
        config: a configuration file to read instead.
        mode: ``"guard"``, or ``"observe"`` to change nothing and only say what would have been done.
        strict: a plugin's exception is re-raised instead of isolated (for tests).
        max_failures: after so many exceptions a plugin is switched off.
        max_consecutive_skips: after so many skipped steps in a row ``exhausted`` decides.
        exhausted: ``"accept"`` the new regime, ``"rollback"`` or ``"raise"``.
        parameters_every: every how many steps the parameters are looked at after the update.
        diagnose_every: every how many steps slow faults are looked for.
        close_timeout: seconds that sinks have at ``close()`` to bring out what they hold.

    Raises:
        SetupError: nothing to watch, or parameters that are not the model's, or an optimizer watched already.
        PluginError, OptionError, MissingExtraError: a plugin can't be found, loaded or configured.
        RunDirectoryError: ``run_dir`` is not writable or holds a run.
    """

    def __init__(
        self,
        model: Any = None,
        optimizer: Any = None,
        *,
        plugins: Iterable[registry.Wanted] | registry.Wanted | None = None,
        loss_fn: Any = None,
        run_dir: str | os.PathLike[str] | None = None,
        resume: bool = False,
        config: str | os.PathLike[str] | None = None,
        mode: Literal["guard", "observe"] | None = None,
        strict: bool | None = None,
        max_failures: int | None = None,
        max_consecutive_skips: int | None = None,
        exhausted: Literal["accept", "rollback", "raise"] | None = None,
        parameters_every: int | None = None,
        diagnose_every: int | None = None,
        close_timeout: float | None = None,
    ) -> None:
        given = registry.load_config(None if config is None else Path(config)) if plugins is None or config else None
        own = {
            "mode": mode, "strict": strict, "max_failures": max_failures, "exhausted": exhausted,
            "max_consecutive_skips": max_consecutive_skips, "parameters_every": parameters_every,
            "diagnose_every": diagnose_every, "close_timeout": close_timeout,
        }  # fmt: skip
        settings = Settings.make({k: v for k, v in own.items() if v is not None}, given)
        chosen = (
            plugins if plugins is not None else (given.plugins if given and given.plugins is not None else "default")
        )
        self._closed = False
        self._started = False
        self._sources: list[Source] = []
        self._successors: Successors | None = None
        self._close_timeout = settings.close_timeout
        self.loss_fn = loss_fn
        self._tracked: dict[str, Any] = {}
        resolved = registry.resolve(chosen, given.options if given else None)
        self._bus = Bus(
            resolved, strict=settings.strict, max_failures=settings.max_failures, report=self._plugin_failed
        )
        self._delivery = Delivery([self._bus.lane(name) for name, _ in self._bus.sinks()], failed=self._sink_failed)
        self._judge = Judge(
            self._bus,
            settings.policy,
            self._delivery.put,
            parameters_every=settings.parameters_every,
            diagnose_every=settings.diagnose_every,
        )
        self._began = time.perf_counter()
        self._own_seconds = 0.0
        self._own_calls = 0
        self._given_dir = None if run_dir is None else Path(run_dir)
        self._resume = resume
        self.run_directory: Path | None = None
        self._rank, self._world = 0, 1
        if model is not None or optimizer is not None:
            self._watch(model, optimizer)
        if self._given_dir is not None and self._rank == 0:
            try:
                self.run_directory = create_run_directory(self._given_dir, resume=resume)
            except RunDirectoryError:
                self._detach()
                raise
        self.run = self._run_name()
        self._goodbye = _close_at_exit(self)

    # -- what a training loop calls

    def observe(self, loss: Any = None, batch: Any = None, metrics: Mapping[str, Any] | None = None) -> None:
        """Tell the loss (and batch) of the step to come: once per micro-batch, any time before ``optimizer.step()``.

        Args:
            loss: 0-d tensor (of any dtype; its graph is not kept) or a number.
            batch: what the loss was computed from, for detectors that look into it or evaluate it again.
            metrics: further scalars by name.

        Raises:
            ClosedError: after ``close()``.
            TypeError: the loss is neither a number nor a tensor.
        """
        if self._closed:
            raise ClosedError("this FlowManager is closed: call observe() before close(), or make a new FlowManager")
        self._start()
        started = time.perf_counter()
        if loss is not None and not isinstance(loss, (int, float)):
            from dynguard.torch.source import observed

            loss = observed(loss)
        judge = self._judge
        judge.observed.renew()
        micro = len(judge.observed.losses)
        judge.observe(LossEvent(judge.steps, micro, loss, batch, metrics or {}))
        self._own_seconds += time.perf_counter() - started

    def track(self, *, scaler: Any = None, ema: Any = None, scheduler: Any = None) -> None:
        """Name what else belongs to the state of training: a GradScaler, an EMA model, a learning-rate scheduler."""
        for name, thing in (("scaler", scaler), ("ema", ema), ("scheduler", scheduler)):
            if thing is not None:
                self._tracked[name] = thing

    def attach(self, optimizer: Any, model: Any = None, name: str | None = None) -> None:
        """Watch one more optimizer, from the step in progress on if there is one.

        Args:
            optimizer: a torch optimizer.
            model: the module (or list or dict of modules) whose parameters it trains, or a mapping of names to
                parameters; None names them by position.
            name: of the source; by default ``optimizer0``, ``optimizer1`` and so on.
        """
        if self._closed:
            raise ClosedError("this FlowManager is closed: attach() before close(), or make a new FlowManager")
        from dynguard.torch.attach import attach

        label = name if name is not None else f"optimizer{len(self._sources)}"
        self._sources.append(attach(optimizer, model, label, self))
        self._start()

    def close(self, error: BaseException | None = None) -> None:
        """End the watch: take all hooks off, ask for the last findings and sections, and let the sinks finish.

        Never raises and never takes longer than ``close_timeout`` for the sinks. May be called twice.
        """
        if self._closed:
            return
        self._start()
        self._closed = True
        self._detach()
        if not isinstance(error, TrainingStopped):
            self._judge.diagnose(max(self.step - 1, 0))
        for section in self.summarize():
            self._delivery.put(section)
        self._say_dropped()
        text = None if error is None else f"{type(error).__name__}: {error}"
        seconds = {name: cost.seconds for name, cost in self.overhead().items()}
        self._delivery.put(
            RunEnd(
                run=self.run, time=time.time(), steps=self.step, error=text, overhead=seconds,
                dropped=self._delivery.dropped,
            ),
            True,
        )  # fmt: skip
        self._bus.channels["on_run_end"].each(self._info(), error)
        late = self._delivery.close(self._close_timeout)
        for sink, why in late.items():
            log.warning("sink %r did not finish: %s", sink, why)
        self._goodbye()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)

    # -- what a user asks

    @property
    def step(self) -> int:
        """How many optimizer steps have been seen (the most of any source)."""
        return self._judge.steps

    @property
    def findings(self) -> list[Finding]:
        """All findings so far, oldest first (the last 10,000)."""
        return list(self._judge.findings)

    @property
    def interventions(self) -> list[Intervention]:
        """All interventions so far, oldest first (the last 10,000)."""
        return list(self._judge.interventions)

    @property
    def plugins(self) -> tuple[str, ...]:
        """Names of the plugins that are on, in the order of dispatch."""
        return tuple(name for name, _ in self._bus.plugins)

    def plugin(self, name: str) -> Any:
        """The instance of an enabled plugin; KeyError where there is none of that name."""
        return dict(self._bus.plugins)[name]

    def overhead(self) -> dict[str, Overhead]:
        """Seconds, share of the run's time and calls by plugin, and ``"dynguard"`` for all that the run waited for.

        A plugin's hot hooks are timed at each of the first 64 calls and at one in 64 afterwards, weighted. A sink's
        seconds pass in its own thread: the run does not wait for them.
        """
        elapsed = max(time.perf_counter() - self._began, 1e-9)
        cost = {name: (meter.seconds, meter.calls) for name, meter in self._bus.meters.items()}
        for name, seconds in self._delivery.seconds.items():
            have = cost.get(name, (0.0, 0))
            cost[name] = (have[0] + seconds, have[1] + self._delivery.calls.get(name, 0))
        cost["dynguard"] = (self._own_seconds, self._own_calls)
        return {name: Overhead(seconds, seconds / elapsed, calls) for name, (seconds, calls) in cost.items()}

    def summarize(self) -> list[Section]:
        """A section of tables, figures and findings from every plugin that reports."""
        sections = []
        for name, section in self._bus.channels["summarize"].each():
            if isinstance(section, Section):
                sections.append(section if section.plugin else section.model_copy(update={"plugin": name}))
            else:
                self._bus.failed(
                    name, "summarize", TypeError(f"summarize returns a Section; got {type(section).__name__}")
                )
        return sections

    def state_dict(self) -> dict[str, Any]:
        """The state of the watch, to be saved with a checkpoint: steps and every plugin's ``state_dict()``."""
        plugins: dict[str, Any] = {}
        for name, plugin in self._bus.plugins:
            if hasattr(plugin, "state_dict"):
                plugins.update(self._bus.guard(name, "state_dict", lambda n=name, p=plugin: [(n, p.state_dict())]))  # type: ignore[misc]
        sources = {
            s.name: {"step": s.step, "consecutive_skips": self._judge.arbiter(s.name).consecutive}
            for s in self._sources
        }
        return {"version": 1, "sources": sources, "plugins": plugins}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up the watch where ``state_dict()`` left it. A plugin that was not enabled then starts afresh."""
        if state.get("version") != 1:
            raise SetupError(f"not a FlowManager state of version 1: {str(state)[:80]}")
        for source in self._sources:
            if source.name in state["sources"]:
                saved = state["sources"][source.name]
                source.step = saved["step"]
                self._judge.arbiter(source.name).consecutive = saved["consecutive_skips"]
                self._judge.steps = max(self._judge.steps, source.step)
        for name, plugin in self._bus.plugins:
            if name in state["plugins"] and hasattr(plugin, "load_state_dict"):
                saved = state["plugins"][name]
                self._bus.guard(name, "load_state_dict", lambda p=plugin, s=saved: [p.load_state_dict(s)])  # type: ignore[misc]

    # -- what the sources call (dynguard.torch.source.Listener)

    def before_step(self, source: Source, loss: Any) -> None:
        """Judge a step; see Judge.before. An error of dynguard's own is reported and the step goes on."""
        started = time.perf_counter()
        try:
            self._start()
            self._judge.before(source, loss)
        except TrainingStopped:
            raise
        except Exception as error:  # noqa: BLE001 - dynguard's own fault must not stop the run
            self._own_failure("judging a step", error)
        finally:
            self._own_seconds += time.perf_counter() - started
            self._own_calls += 1

    def after_step(self, source: Source) -> None:
        """Look at a step that was taken; see Judge.after."""
        started = time.perf_counter()
        try:
            self._judge.after(source)
        except TrainingStopped:
            raise
        except Exception as error:  # noqa: BLE001 - as above
            self._own_failure("looking at a step", error)
        finally:
            self._own_seconds += time.perf_counter() - started

    # -- inside

    def _watch(self, model: Any, optimizer: Any) -> None:
        if model is None or optimizer is None:
            missing = "model" if model is None else "optimizer"
            raise SetupError(f"FlowManager(model, optimizer) needs both: {missing} is None")
        try:
            from dynguard.torch.source import Successors, make_sources, rank_and_world
        except ModuleNotFoundError as error:
            raise MissingExtraError("torch", "torch", "watching a neural network") from error
        self._sources = make_sources(model, optimizer, self)
        self._successors = Successors(self._sources)
        self._rank, self._world = rank_and_world()

    def _detach(self) -> None:
        for source in self._sources:
            source.detach()
        if self._successors is not None:
            self._successors.detach()

    def _run_name(self) -> str:
        if self._given_dir is not None:
            return self._given_dir.resolve().name
        return time.strftime("%Y%m%d-%H%M%S-") + os.urandom(2).hex()

    def _start(self) -> None:
        """Tell the plugins and sinks that the run begins, at the first sign of training."""
        if self._started:
            return
        self._started = True
        needs = any(getattr(p, "needs_directory", False) for _, p in self._bus.plugins)
        if self.run_directory is None and self._given_dir is None and needs and self._rank == 0:
            try:
                self.run_directory = create_run_directory(Path("dynguard-runs") / self.run, resume=False)
            except RunDirectoryError as error:
                log.warning("no history is kept: %s", error)
        info = self._info()
        self._bus.channels["on_run_start"].each(info)
        self._delivery.put(RunStart(run=self.run, time=time.time(), info=info.info))

    def _info(self) -> RunInfo:
        torch = sys.modules.get("torch")
        return RunInfo(
            run=self.run,
            directory=self.run_directory,
            parameters={s.name: s.names for s in self._sources},
            plugins=self.plugins,
            rank=self._rank,
            world_size=self._world,
            info={
                "dynguard": dynguard.__version__,
                "python": platform.python_version(),
                "torch": str(getattr(torch, "__version__", "")) or None,
                "plugins": list(self.plugins),
                "policy": self._judge.policy.model_dump(mode="json"),
                "optimizers": {s.name: type(s.optimizer).__name__ for s in self._sources},
            },
        )

    def _plugin_failed(self, name: str, hook: str, error: BaseException, off: bool) -> None:
        if off:
            self._judge.report(
                [selfreport.plugin_failed(name, hook, error, self._bus.failures.get(name, 0), self.step)]
            )

    def _sink_failed(self, name: str, hook: str, error: BaseException) -> bool:
        return self._bus.failed(name, hook, error) if not self._bus.strict else True

    def _say_dropped(self) -> None:
        lost = {sink: count for sink, count in self._delivery.dropped.items() if count}
        self._judge.report(selfreport.sink_dropped(sink, count, self.step) for sink, count in lost.items())

    def _own_failure(self, doing: str, error: Exception) -> None:
        if self._bus.strict:
            raise error
        self._bus.failed("dynguard", doing, error)


def _close_at_exit(flow: FlowManager) -> Any:
    """Close a manager that its user forgot, at interpreter exit; returns what cancels that."""
    reference = weakref.ref(flow)

    def goodbye() -> None:
        alive = reference()
        if alive is not None:
            alive.close()

    atexit.register(goodbye)
    return lambda: atexit.unregister(goodbye)
