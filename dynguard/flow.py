"""FlowManager: composes plugins, bus, sources, delivery and history. The one line that a user adds."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

from dynguard import registry, selfreport, state
from dynguard.actions import Intervention
from dynguard.boosting import Boosting
from dynguard.bus import Bus
from dynguard.delivery import Delivery
from dynguard.errors import (
    ClosedError,
    DynguardError,
    MissingExtraError,
    RunDirectoryError,
    SetupError,
    TrainingStopped,
)
from dynguard.events import LossEvent, RunInfo
from dynguard.farewell import close_at_exit
from dynguard.findings import Finding, RunEnd, RunStart, Section
from dynguard.history import create_run_directory
from dynguard.judge import Judge
from dynguard.overhead import Overhead, measure
from dynguard.settings import Options, Settings

if TYPE_CHECKING:
    from dynguard.torch.source import Source
    from dynguard.torch.watch import Watch

log = logging.getLogger("dynguard")


class FlowManager(Boosting):
    """Watches the training of a model.

    Args:
        model: the module that is trained, or a list or dict of several; None where only trees are trained.
        optimizer: its optimizer, or a list or dict (name -> optimizer) of several.
        plugins: names, instances, ``(name, options)`` pairs and the presets ``"default"`` and ``"deep"``. None takes
            them from ``dynguard.toml`` or ``[tool.dynguard]`` in the working directory, else ``"default"``.
        loss_fn: ``(model, batch) -> loss``, for what evaluates the loss itself: curvature, and finding the module that
            first produced a NaN.
        run_dir: where the run's files go; default a new folder under ``./dynguard-runs``.
        resume: go on writing into a ``run_dir`` that holds a run already.
        config: a configuration file to read instead.
        on_rollback: called with (intervention, step of the snapshot) after a rollback, so that a data loader can jump
            past the bad batches.
        ranks: which ranks decide together: None finds out (DDP, sharded parameters), False none, True all, or a
            process group.
        settings: see :class:`dynguard.settings.Settings`: ``mode``, ``reads``, ``max_consecutive_skips``,
            ``exhausted``, ``cooldown``, ``strict``, ``max_failures``, ``parameters_every``, ``diagnose_every``,
            ``snapshot_every``, ``snapshot_keep``, ``snapshot_bytes``, ``snapshot_dir``, ``close_timeout``.

    Raises:
        SetupError: nothing to watch, parameters that are not the model's, a watched optimizer, a wrong setting.
        PluginError, OptionError, MissingExtraError: a plugin can't be found, loaded or configured.
        RunDirectoryError: ``run_dir`` is not writable or holds a run.
    """

    def __init__(
        self,
        model: Any = None,
        optimizer: Any = None,
        *,
        plugins: Iterable[registry.Wanted] | registry.Wanted | None = None,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        resume: bool = False,
        config: str | os.PathLike[str] | None = None,
        on_rollback: Callable[[Intervention, int], Any] | None = None,
        ranks: Any = None,
        **settings: Unpack[Options],
    ) -> None:
        given = registry.load_config(None if config is None else Path(config)) if plugins is None or config else None
        self._settings = Settings.make(settings, given)
        if plugins is None:
            plugins = given.plugins if given and given.plugins is not None else "default"
        self.loss_fn = loss_fn
        self._ranks = ranks
        self._closed = self._started = False
        self._watch: Watch | None = None
        self._bus = Bus(
            registry.resolve(plugins, given.options if given else None),
            strict=self._settings.strict,
            max_failures=self._settings.max_failures,
            report=self._plugin_failed,
        )
        self._delivery = Delivery([self._bus.lane(name) for name, _ in self._bus.sinks()], failed=self._sink_failed)
        self._judge = Judge(self._bus, self._settings, self._delivery.put, on_rollback)
        self._began = time.perf_counter()
        self._own_seconds = 0.0
        self._own_calls = 0
        self._given_dir = None if run_dir is None else Path(run_dir)
        self._resume = resume
        self.run_directory: Path | None = None
        try:
            if model is not None or optimizer is not None:
                self._watch_from_start(model, optimizer)
            self._make_given_directory()
        except DynguardError:  # nothing of a manager that can't be made stays behind
            self._detach()
            raise
        self.run = self._run_name()
        self._goodbye = close_at_exit(self)

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
            from dynguard.torch.training import observed

            loss = observed(loss)
        judge = self._judge
        judge.observed.renew()
        judge.observe(
            LossEvent(judge.steps, len(judge.observed.losses), loss, batch, {} if metrics is None else metrics)
        )
        self._own_seconds += time.perf_counter() - started

    def track(self, *, scaler: Any = None, ema: Any = None, scheduler: Any = None) -> None:
        """Name what else belongs to the state of training: a GradScaler, an EMA model, a learning-rate scheduler."""
        for name, thing in (("scaler", scaler), ("ema", ema), ("scheduler", scheduler)):
            if thing is not None:
                self._torch().track(name, thing)

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
        watch = self._torch()
        watch.attach(optimizer, model, name if name is not None else f"optimizer{len(watch.sources)}")
        self._make_given_directory()
        self._start()

    def close(self, error: BaseException | None = None) -> None:
        """End the watch: take all hooks off, ask for the last findings and sections, and let the sinks finish.

        Never raises and never takes longer than ``close_timeout`` for the sinks. May be called twice.
        """
        if self._closed:
            return
        self._finish_rounds()
        seen = self._started or bool(self._sources)
        if seen:
            self._start()
        self._closed = True
        self._judge.finish(self._sources)
        self._detach()
        if seen:
            self._say_goodbye(error)
        late = self._delivery.close(self._settings.close_timeout)
        for sink, why in late.items():
            log.warning("sink %r did not finish: %s", sink, why)
        self._goodbye()

    def _say_goodbye(self, error: BaseException | None) -> None:
        if not isinstance(error, TrainingStopped):
            self._judge.diagnose(max(self.step - 1, 0))
        for section in self.summarize():
            self._delivery.put(section)
        self._say_dropped()
        text = None if error is None else f"{type(error).__name__}: {error}"
        seconds, lost = {name: cost.seconds for name, cost in self.overhead().items()}, self._delivery.dropped
        end = RunEnd(run=self.run, time=time.time(), steps=self.step, error=text, overhead=seconds, dropped=lost)
        self._delivery.put(end, True)
        self._bus.channels["on_run_end"].each(self._info(), error)

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
        own = (self._own_seconds, self._own_calls)
        return measure(self._bus, self._delivery, own, time.perf_counter() - self._began)

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
        """The state of the watch, to be saved with a checkpoint: steps and every plugin's ``state_dict()``.

        Numbers, strings, lists and dicts throughout, so that ``torch.load(..., weights_only=True)`` takes it.
        """
        return state.save(self._sources, self._judge, self._bus)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take up the watch where ``state_dict()`` left it. A plugin that was not enabled then starts afresh.

        Raises SetupError where this is not a state of a FlowManager.
        """
        state.load(saved, self._sources, self._judge, self._bus)

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

    def dropped_step(self, source: Source, scaler: Any) -> None:
        """A GradScaler kept a step from its optimizer; see Judge.dropped."""
        try:
            self._start()
            self._judge.dropped(source, scaler)
        except TrainingStopped:
            raise
        except Exception as error:  # noqa: BLE001 - as above
            self._own_failure("looking at a dropped step", error)

    @property
    def _sources(self) -> list[Source]:
        return self._watch.sources if self._watch is not None else []

    def _torch(self) -> Watch:
        if self._watch is None:
            try:
                from dynguard.torch.watch import Watch
            except ModuleNotFoundError as error:
                if error.name != "torch":
                    raise
                raise MissingExtraError("torch", "torch", "watching a neural network") from error
            rows = bool(self._bus.embeddings.calls or self._bus.adjust_rows.calls)
            self._watch = self._judge.watch = Watch(self, self._settings, self.loss_fn, self._ranks, rows=rows)
        return self._watch

    def _watch_from_start(self, model: Any, optimizer: Any) -> None:
        if model is None or optimizer is None:
            missing = "model" if model is None else "optimizer"
            raise SetupError(f"FlowManager(model, optimizer) needs both: {missing} is None")
        self._torch().watch(model, optimizer)

    def _detach(self) -> None:
        if self._watch is not None:
            self._watch.detach()

    @property
    def _rank(self) -> int:
        if self._watch is not None:
            return self._watch.rank
        return int(os.environ.get("RANK", "0")) if self._given_dir is None else 0

    def _make_given_directory(self) -> None:
        """Make the run directory that was asked for, once, on the first rank."""
        if self._given_dir is not None and self.run_directory is None and self._rank == 0:
            self.run_directory = create_run_directory(self._given_dir, resume=self._resume)

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
        directory, sources = self.run_directory, self._sources
        return selfreport.run_info(self.run, directory, self.plugins, self._settings, self._watch, sources, self._rank)

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
        """dynguard's own fault: the step goes on unjudged; it is said once."""
        if self._bus.strict:
            raise error
        if self._bus.failures.get("dynguard", 0) == 0:
            log.warning(
                "dynguard failed in %s: %s: %s; training goes on", doing, type(error).__name__, error, exc_info=error
            )
            self._judge.report([selfreport.plugin_failed("dynguard", doing, error, 1, self.step)])
        self._bus.failures["dynguard"] = self._bus.failures.get("dynguard", 0) + 1
