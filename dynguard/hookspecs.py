"""The whole plugin contract, in the order of a training step.

A plugin is an instance of a plain class. Its ``__init__`` takes keyword-only options and is decorated with
``@validated``; its hooks are methods marked ``@hookimpl``. A hook may leave out arguments that it does not need.
Detectors observe, guards change, sinks carry away; a class with a detector hook must not touch gradients.
Hooks run in the order of the plugins' names, then ``tryfirst`` / ``trylast``; ``dynguard plugins`` prints it.
An exception in a hook never reaches the training loop: it is logged, counted, and after ``max_failures`` the plugin is
switched off and a ``plugin_failed`` finding says so (``strict=True`` re-raises, for tests).
A plugin that writes files says ``needs_directory = True`` on its class: then the run has one (``run.directory``).

>>> from dynguard import hookimpl, validated
>>> class Quiet:
...     "A plugin with one option and no hooks yet."
...     @validated
...     def __init__(self, *, limit: float = 10.0) -> None:
...         self.limit = limit
>>> Quiet(limit=3).limit
3.0
>>> Quiet(limt=3)
Traceback (most recent call last):
    ...
dynguard.errors.OptionError: plugin 'Quiet': unknown option 'limt'. Did you mean 'limit'? (options: limit: float = 10.0)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from dynguard.actions import Intervention
    from dynguard.events import EmbeddingEvent, GradientEvent, LossEvent, ParameterEvent, RunInfo, TreeEvent
    from dynguard.findings import Finding, Record, Section
    from dynguard.signals import Signal

PROJECT = "dynguard"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class Hooks:
    """All hooks. Each docstring holds an example that the tests run."""

    @hookspec
    def on_run_start(self, run: RunInfo) -> None:
        """Observer. Called once, before the first event, with what is known about the run.

        >>> from dynguard import hookimpl
        >>> from dynguard.testing import run_info, call
        >>> class Greeter:
        ...     @hookimpl
        ...     def on_run_start(self, run):
        ...         print(f"watching {len(run.parameters[''])} parameters")
        >>> call(Greeter(), "on_run_start", run=run_info(parameters={"": ("fc.weight", "fc.bias")}))
        watching 2 parameters
        """

    @hookspec
    def on_loss(self, event: LossEvent) -> Signal | None:
        """Detector. Called at ``flow.observe()``, once per micro-batch; its signal joins the verdict of the step.

        >>> from dynguard import Action, Finding, Signal, hookimpl
        >>> from dynguard.testing import loss_event, call
        >>> class TooHigh:
        ...     @hookimpl
        ...     def on_loss(self, event):
        ...         if event.loss is None:  # only metrics were observed
        ...             return None
        ...         return Signal(score=event.loss, fired=event.loss > 100.0, explain=lambda: self.explain(event))
        ...     def explain(self, event):
        ...         yield Finding(kind="loss_too_high", step=event.step, premise=f"loss is {float(event.loss):g}")
        >>> signal = call(TooHigh(), "on_loss", event=loss_event(step=7, loss=250.0))
        >>> bool(signal.fired), next(iter(signal.explain())).premise
        (True, 'loss is 250')
        """

    @hookspec
    def on_gradients(self, event: GradientEvent) -> Signal | None:
        """Detector. Called after backward and before the update, once per optimizer step, with all gradients.

        Must not read the device: answer with arrays that are still on it. ``explain`` may read.

        >>> from dynguard import Action, Finding, Severity, Signal, hookimpl
        >>> from dynguard.testing import gradient_event, call
        >>> class Huge:
        ...     @hookimpl
        ...     def on_gradients(self, event):
        ...         fired = event.norms > 1e3
        ...         return Signal(event.norms, fired, lambda: self.explain(event, fired), action=Action.SKIP)
        ...     def explain(self, event, fired):
        ...         for name, hit, norm in zip(event.names, fired, event.norms):
        ...             if hit:
        ...                 yield Finding(kind="grad_spike", severity=Severity.ERROR, step=event.step, subject=name,
        ...                               action=Action.SKIP, premise=f"gradient norm {float(norm):g}")
        >>> signal = call(Huge(), "on_gradients", event=gradient_event(norms={"a": 1.0, "b": 5e4}))
        >>> [(f.subject, f.premise) for f in signal.explain()]
        [('b', 'gradient norm 50000')]
        """

    @hookspec
    def on_embeddings(self, event: EmbeddingEvent) -> Signal | None:
        """Detector. Called at the moment of ``on_gradients``, once per embedding table that was looked up.

        >>> from dynguard import Finding, Signal, hookimpl
        >>> from dynguard.testing import embedding_event, call
        >>> class OneRow:
        ...     @hookimpl
        ...     def on_embeddings(self, event):
        ...         top = event.counts.max() / event.counts.sum()
        ...         return Signal(top, top > 0.9, lambda: [Finding(kind="popularity_bias", subject=event.table)])
        >>> signal = call(OneRow(), "on_embeddings", event=embedding_event(table="item.weight", ids=[4] * 99 + [5]))
        >>> [finding.subject for finding in signal.explain()]
        ['item.weight']
        """

    @hookspec
    def adjust_embeddings(self, event: EmbeddingEvent) -> None:
        """Guard. Only when the verdict lets the step happen, before ``adjust_gradients``, once per looked-up table.

        Rows are changed through ``event.training``: ``scale_row_gradients`` their gradients, ``scale_rows`` what the
        update makes of them. A class that has a detector hook as well may only do the latter.

        >>> from dynguard import hookimpl
        >>> from dynguard.testing import embedding_event, call
        >>> class HalfSpeed:
        ...     @hookimpl
        ...     def adjust_embeddings(self, event):
        ...         event.training.scale_rows(event.index, event.rows, event.rows * 0.0 + 0.5)
        >>> class Told:
        ...     def scale_rows(self, index, rows, factors):
        ...         print(index, rows, factors)
        >>> call(HalfSpeed(), "adjust_embeddings", event=embedding_event(ids=[4, 1, 4], training=Told()))
        0 [1 4] [0.5 0.5]
        """

    @hookspec
    def adjust_gradients(self, event: GradientEvent) -> None:
        """Guard. Called only when the verdict lets the step happen; may edit ``event.gradients`` in place.

        >>> import numpy as np
        >>> from dynguard import hookimpl
        >>> from dynguard.testing import gradient_event, call
        >>> class Halve:
        ...     @hookimpl
        ...     def adjust_gradients(self, event):
        ...         for gradient in event.gradients:
        ...             gradient *= 0.5
        >>> event = gradient_event(gradients={"a": np.array([2.0, 4.0])})
        >>> call(Halve(), "adjust_gradients", event=event)
        >>> event.gradients[0].tolist()
        [1.0, 2.0]
        """

    @hookspec
    def on_intervention(self, intervention: Intervention) -> None:
        """Guard. Called after a CLIP, SKIP or ROLLBACK was carried out, before the run goes on.

        Also called with ``Action.PROCEED`` when the policy accepts a new regime after too many skips in a row:
        what was rejected is now normal, so a baseline should start afresh.

        >>> from dynguard import Action, Intervention, hookimpl
        >>> from dynguard.testing import call
        >>> class Counter:
        ...     def __init__(self):
        ...         self.skips = 0
        ...     @hookimpl
        ...     def on_intervention(self, intervention):
        ...         self.skips += intervention.action is Action.SKIP
        >>> counter = Counter()
        >>> call(counter, "on_intervention", intervention=Intervention(step=3, action=Action.SKIP))
        >>> counter.skips
        1
        """

    @hookspec
    def on_parameters(self, event: ParameterEvent) -> Signal | None:
        """Detector. Called after the update, when due (``parameters_every``), with all parameters.

        >>> import numpy as np
        >>> from dynguard import Action, Finding, Signal, hookimpl
        >>> from dynguard.testing import parameter_event, call
        >>> class Finite:
        ...     @hookimpl
        ...     def on_parameters(self, event):
        ...         bad = ~np.isfinite(event.norms)
        ...         return Signal(bad.sum(), bad, lambda: self.explain(event, bad), action=Action.ROLLBACK)
        ...     def explain(self, event, bad):
        ...         return [Finding(kind="nonfinite_param", subject=n) for n, b in zip(event.names, bad) if b]
        >>> signal = call(Finite(), "on_parameters", event=parameter_event(norms={"a": 1.0, "b": float("nan")}))
        >>> [finding.subject for finding in signal.explain()]
        ['b']
        """

    @hookspec
    def on_trees(self, event: TreeEvent) -> Signal | None:
        """Detector. Called once per boosting round with the trees that the round added and the metrics so far.

        >>> import numpy as np
        >>> from dynguard import Finding, Signal, hookimpl
        >>> from dynguard.testing import tree_event, call
        >>> class Exploding:
        ...     @hookimpl
        ...     def on_trees(self, event):
        ...         largest = np.abs(event.trees["value"]).max()
        ...         return Signal(largest, largest > 1e6, lambda: [Finding(kind="exploding_leaves", step=event.round)])
        >>> signal = call(Exploding(), "on_trees", event=tree_event(round=2, values=[0.1, -3e8]))
        >>> [finding.step for finding in signal.explain()]
        [2]
        """

    @hookspec
    def diagnose(self) -> Iterable[Finding]:
        """Detector. Called every ``diagnose_every`` steps and at the end: slow faults, seen over many steps.

        Runs between steps, so reading the device is allowed here.

        >>> from dynguard import Finding, hookimpl
        >>> from dynguard.testing import call
        >>> class Stuck:
        ...     @hookimpl
        ...     def diagnose(self):
        ...         yield Finding(kind="stagnation", subject="fc.weight", premise="unchanged for 500 steps")
        >>> [finding.kind for finding in call(Stuck(), "diagnose")]
        ['stagnation']
        """
        return ()

    @hookspec
    def summarize(self) -> Section | None:
        """Reporter. Called on demand (``flow.summarize()``) and at the end: tables, figures and findings.

        >>> from dynguard import Section, Table, hookimpl
        >>> from dynguard.testing import call
        >>> class Costs:
        ...     @hookimpl
        ...     def summarize(self):
        ...         return Section(title="Costs", tables=[Table(columns=("what", "s"), rows=[("probe", 0.2)])])
        >>> call(Costs(), "summarize").tables[0].rows
        (('probe', 0.2),)
        """

    @hookspec
    def on_run_end(self, run: RunInfo, error: BaseException | None) -> None:
        """Observer. Called once, after the last event; ``error`` is what ended the run, or None.

        >>> from dynguard import hookimpl
        >>> from dynguard.testing import run_info, call
        >>> class Bell:
        ...     @hookimpl
        ...     def on_run_end(self, error):
        ...         print("done" if error is None else f"died of {type(error).__name__}")
        >>> call(Bell(), "on_run_end", run=run_info(), error=MemoryError())
        died of MemoryError
        """

    @hookspec
    def write(self, record: Record) -> None:
        """Sink. Called from the sink's worker thread with each record, in order. May be slow; may not be shared.

        A record is one of ``RunStart``, ``Names``, ``Metrics``, ``Finding``, ``Intervention``, ``Section``, ``RunEnd``.

        >>> from dynguard import Finding, hookimpl
        >>> from dynguard.testing import call
        >>> class Shout:
        ...     @hookimpl
        ...     def write(self, record):
        ...         if isinstance(record, Finding):
        ...             print(record.kind.upper())
        >>> call(Shout(), "write", record=Finding(kind="grad_spike"))
        GRAD_SPIKE
        """

    @hookspec
    def flush(self, timeout: float) -> None:
        """Sink. Called from the worker thread: bring out what is held back, within ``timeout`` seconds.

        >>> from dynguard import hookimpl
        >>> from dynguard.testing import call
        >>> class Batcher:
        ...     def __init__(self):
        ...         self.held, self.out = ["a", "b"], []
        ...     @hookimpl
        ...     def flush(self, timeout):
        ...         self.out, self.held = self.out + self.held, []
        >>> batcher = Batcher()
        >>> call(batcher, "flush", timeout=1.0)
        >>> batcher.out
        ['a', 'b']
        """

    @hookspec
    def close(self, timeout: float) -> None:
        """Sink. Called from the worker thread once, last: let go of files and connections within ``timeout`` seconds.

        >>> from dynguard import hookimpl
        >>> from dynguard.testing import call
        >>> class File:
        ...     open = True
        ...     @hookimpl
        ...     def close(self, timeout):
        ...         self.open = False
        >>> file = File()
        >>> call(file, "close", timeout=1.0)
        >>> file.open
        False
        """


DETECTORS = ("on_loss", "on_gradients", "on_embeddings", "on_parameters", "on_trees", "diagnose")
GUARDS = ("adjust_embeddings", "adjust_gradients", "on_intervention")
SINKS = ("write", "flush", "close")
HOT = (
    "on_loss", "on_gradients", "on_embeddings", "adjust_embeddings", "adjust_gradients", "on_parameters", "on_trees",
)  # fmt: skip
ALL = tuple(name for name in vars(Hooks) if not name.startswith("_"))
