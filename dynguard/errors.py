"""The errors dynguard raises: each says what is wrong, where, and what to type."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynguard.actions import Intervention
    from dynguard.findings import Finding


class DynguardError(Exception):
    """Base of all errors that dynguard raises on purpose."""


class SetupError(DynguardError, ValueError):
    """The manager can't be built from what it was given: no parameters, a meta model, an optimizer watched already."""


class PluginError(DynguardError, ValueError):
    """A plugin is unknown, broken, claimed twice or not a plugin."""


class OptionError(PluginError):
    """An option of a plugin is unknown or has a wrong value; names the plugin, the field and what is allowed."""


class MissingExtraError(DynguardError, ImportError):
    """A library that an optional part needs is not installed; says which pip command installs it."""

    def __init__(self, library: str, extra: str, need: str) -> None:
        super().__init__(f"{need} needs {library}, which is not installed. Type: pip install 'dynguard[{extra}]'")


class RunDirectoryError(DynguardError, OSError):
    """The run directory can't be written to or already holds a run."""


class ClosedError(DynguardError, RuntimeError):
    """A manager was used after ``close()``."""


class TrainingStopped(DynguardError, RuntimeError):  # noqa: N818 - it reports a decision, not a fault of the program
    """dynguard stopped the run because the policy said RAISE.

    Attributes:
        findings: all findings of the run so far; the deciding ones are the last.
        interventions: all interventions of the run so far.
    """

    def __init__(
        self, message: str, findings: Iterable[Finding] = (), interventions: Iterable[Intervention] = ()
    ) -> None:
        super().__init__(message)
        self.findings = list(findings)
        self.interventions = list(interventions)


class GradientSpikeError(TrainingStopped):
    """The run was stopped over a gradient, loss or weight: spiking, exploding or non-finite."""


def nearest(word: str, known: Sequence[str]) -> str:
    """' Did you mean ...?' for a misspelt name, or the list of what there is."""
    close = difflib.get_close_matches(word, known, n=3, cutoff=0.5)
    if close:
        return f" Did you mean {' or '.join(repr(c) for c in close)}?"
    return f" There is: {', '.join(sorted(known))}." if known else ""
