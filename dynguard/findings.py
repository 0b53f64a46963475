"""What leaves the process: findings, their evidence, report sections and the records that sinks are given.

Everything here is strict JSON through pydantic: NaN and infinities are spelled ``"NaN"``, ``"Infinity"`` and
``"-Infinity"`` (bare tokens are not JSON; wandb/wandb#2202, mlflow/mlflow#16555 show what they break).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from dynguard.actions import Action, Intervention

Scalar: TypeAlias = bool | int | float | str | None


class Severity(Enum):
    """How bad it is: ``info < warning < error < critical``."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    CRITICAL = "critical"

    @property
    def rank(self) -> int:
        """Position in the order, 0 (info) to 3 (critical)."""
        return _RANK[self]

    def __lt__(self, other: object) -> bool:
        return self.rank < other.rank if isinstance(other, Severity) else NotImplemented

    def __le__(self, other: object) -> bool:
        return self.rank <= other.rank if isinstance(other, Severity) else NotImplemented

    def __gt__(self, other: object) -> bool:
        return self.rank > other.rank if isinstance(other, Severity) else NotImplemented

    def __ge__(self, other: object) -> bool:
        return self.rank >= other.rank if isinstance(other, Severity) else NotImplemented

    def __str__(self) -> str:
        return self.value


_RANK = {severity: rank for rank, severity in enumerate(Severity)}


class _Leaving(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class Evidence(_Leaving):
    """One measured number (or word) with its name and unit, e.g. ``Evidence(name="gradient_norm", value=41.2)``."""

    name: str
    value: Scalar
    unit: str = ""


class Prescription(_Leaving):
    """One change that a person or an agent can make: which parameter, from what, to what, why, and how to undo it."""

    parameter: str
    current: Scalar = None
    proposed: Scalar = None
    why: str = ""
    undo: str = ""


class Finding(_Leaving):
    """One thing that a detector found.

    Attributes:
        kind: a word of the vocabulary (``grad_spike``, ``nan_grad``, ``dead_rows`` ...; see docs/findings.md).
        severity: how bad it is.
        step: optimizer step (from 0) or boosting round at which it happened.
        subject: parameter, module, table or feature, named as the user knows it; "" where it is about the whole run.
        rows: row numbers, where rows of a table are meant.
        action: what the detector asks for; the policy may decide otherwise (see ``flow.interventions``).
        evidence: the numbers it rests on.
        premise: what was observed, in a sentence.
        implies: what that means for the run.
        expected_effect: what the action is expected to change.
        confidence: in [0, 1], computed (a posterior or 1 - p), never a constant; None where it can't be computed.
        detector: the plugin that says so.
        source: the optimizer or booster it is about, "" where there is one.
        prescriptions: changes to make, precise enough to carry out.
        supersedes: kinds of which this finding is the better explanation: where another finding of the same step is of
            such a kind and about the same subject (or about none), its action is not taken.
    """

    kind: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    severity: Severity = Severity.WARNING
    step: int = 0
    subject: str = ""
    rows: tuple[int, ...] = ()
    action: Action = Action.WARN
    evidence: tuple[Evidence, ...] = ()
    premise: str = ""
    implies: str = ""
    expected_effect: str = ""
    confidence: float | None = Field(default=None, ge=0.0, le=1.0)
    detector: str = ""
    source: str = ""
    prescriptions: tuple[Prescription, ...] = ()
    supersedes: tuple[str, ...] = ()

    def value(self, name: str) -> Scalar:
        """The value of the evidence item called ``name``; KeyError where there is none."""
        for item in self.evidence:
            if item.name == name:
                return item.value
        raise KeyError(name)


def superseded(findings: Sequence[Finding]) -> list[Finding]:
    """The findings of a step, with the actions of those that another one explains better lowered to WARN.

    Only a finding that asks for a deed itself can supersede others, never a stop, and never one that supersedes it.
    """
    better = [f for f in findings if f.supersedes and f.action.intervenes]

    def explains(one: Finding, other: Finding) -> bool:
        return other.kind in one.supersedes and other.subject in ("", one.subject)

    def give_way(finding: Finding) -> Finding:
        if not finding.action.intervenes or finding.action is Action.RAISE:
            return finding
        beaten = any(explains(b, finding) and not explains(finding, b) for b in better if b is not finding)
        return finding.model_copy(update={"action": Action.WARN}) if beaten else finding

    return [give_way(f) for f in findings] if better else list(findings)


class Table(_Leaving):
    """A small table of a report section: column names and rows of scalars."""

    title: str = ""
    columns: tuple[str, ...]
    rows: tuple[tuple[Scalar, ...], ...] = ()


class Figure(_Leaving):
    """A figure of a report section, as data: named series of equal length over ``x``; drawn by whoever shows it.

    ``mark`` is one of ``line``, ``bar``, ``scatter``, ``heatmap`` (for a heat map, each series is one row).
    ``alt`` is the text that stands for the figure where it can't be seen.
    """

    title: str
    mark: str = Field(default="line", pattern=r"^(line|bar|scatter|heatmap)$")
    x: tuple[Scalar, ...] = ()
    series: Mapping[str, tuple[float | None, ...]] = Field(default_factory=dict)
    x_label: str = ""
    y_label: str = ""
    alt: str = ""


class Section(_Leaving):
    """What a plugin has to say at the end or on demand: text, tables, figures and findings under one title."""

    title: str
    text: str = ""
    tables: tuple[Table, ...] = ()
    figures: tuple[Figure, ...] = ()
    findings: tuple[Finding, ...] = ()
    plugin: str = ""


@dataclass(slots=True)
class Metrics:
    """The numbers of one step. A plain slots dataclass, as one is made at every step of training.

    Attributes:
        step: optimizer step or boosting round, from 0.
        source: which optimizer or booster, "" where there is one.
        values: scalars by name, e.g. ``loss``, ``gradient_norm``, ``lr``. May be non-finite.
        vectors: float32 vectors by name, e.g. ``gradient_norm`` of shape (layers,). The names of the entries are
            given once, by the ``Names`` record that precedes the first vector of that length.
        time: seconds since the epoch.
    """

    step: int
    values: Mapping[str, float]
    vectors: Mapping[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    source: str = ""
    time: float = field(default_factory=time.time)


@dataclass(slots=True, frozen=True)
class Names:
    """Names of the entries of the vector ``vector`` in the ``Metrics`` records that follow (e.g. layer names)."""

    vector: str
    names: tuple[str, ...]
    source: str = ""


class RunStart(_Leaving):
    """First record of a run."""

    run: str
    time: float
    info: Mapping[str, Any] = Field(default_factory=dict)


class RunEnd(_Leaving):
    """Last record of a run; ``error`` is the text of the exception that ended it, or None."""

    run: str
    time: float
    steps: int = 0
    error: str | None = None
    overhead: Mapping[str, float] = Field(default_factory=dict)
    dropped: Mapping[str, int] = Field(default_factory=dict)


Record: TypeAlias = RunStart | Names | Metrics | Finding | Intervention | Section | RunEnd
