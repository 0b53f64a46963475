"""The kit for plugin authors: fake events, hooks called by hand, an in-memory sink, fault injectors, a contract check.

Importing it needs neither torch nor pytest. Events hold numpy arrays, unless torch tensors are given.

>>> from dynguard import Signal, hookimpl
>>> from dynguard.testing import call, check_plugin, gradient_event
>>> class Huge:
...     @hookimpl
...     def on_gradients(self, event):
...         return Signal(event.norms, event.norms > 1e3, explain=list)
>>> call(Huge(), "on_gradients", event=gradient_event(norms={"a": 1.0, "b": 5e4})).fired.tolist()
[False, True]
>>> check_plugin(Huge, arrays="numpy")
"""

from __future__ import annotations

from dynguard.testing.calls import Hook, call, hooks_of
from dynguard.testing.contract import check_plugin
from dynguard.testing.factories import (
    FakeTraining,
    embedding_event,
    gradient_event,
    loss_event,
    parameter_event,
    run_info,
    tree_event,
)
from dynguard.testing.faults import BadBatches, GradientFault, bad_batch, poison_gradient, scale_gradient
from dynguard.testing.ranks import on_ranks
from dynguard.testing.reads import DeviceReads, count_reads
from dynguard.testing.sink import MemorySink
from dynguard.testing.statistics import FakeStatistics

__all__ = [
    "BadBatches",
    "DeviceReads",
    "FakeStatistics",
    "FakeTraining",
    "GradientFault",
    "Hook",
    "MemorySink",
    "bad_batch",
    "call",
    "check_plugin",
    "count_reads",
    "embedding_event",
    "gradient_event",
    "hooks_of",
    "loss_event",
    "on_ranks",
    "parameter_event",
    "poison_gradient",
    "run_info",
    "scale_gradient",
    "tree_event",
]
