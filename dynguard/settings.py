"""What can be set on a FlowManager, in Python or in ``[flow]`` of a configuration file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict

from pydantic import Field, ValidationError

from dynguard.actions import Policy
from dynguard.errors import SetupError
from dynguard.registry import Config


class Options(TypedDict, total=False):
    """The keywords of FlowManager beyond what it watches; :class:`Settings` says what each means."""

    mode: Literal["guard", "observe"]
    reads: Literal["step", "deferred"]
    max_consecutive_skips: int
    exhausted: Literal["accept", "rollback", "raise"]
    cooldown: int
    strict: bool
    max_failures: int
    parameters_every: int
    diagnose_every: int
    snapshot_every: int
    snapshot_keep: int
    snapshot_bytes: int
    snapshot_dir: str | Path | None
    close_timeout: float


class Settings(Policy):
    """All settings with their defaults, checked.

    Attributes:
        reads: ``step`` reads one small array from the device at each step; ``deferred`` none on a clean step: a bad
            update is dropped on the device and its finding arrives a step later. Needs a fused optimizer.
        strict: a plugin's exception is re-raised instead of isolated (for tests).
        max_failures: after so many exceptions a plugin is switched off.
        parameters_every: every how many steps ``on_parameters`` is called.
        diagnose_every: every how many steps slow faults are looked for.
        snapshot_every: steps between snapshots for rollback; 0 keeps none. Where it is not given and sparse gradients
            touch only some rows of large tables, they are rarer in proportion, so that copying does not slow the run.
        snapshot_keep: how many verified snapshots are kept.
        snapshot_bytes: no snapshots where the ring would take more memory than this.
        snapshot_dir: where the newest verified snapshot is also written, or None.
        close_timeout: seconds that sinks have at ``close()`` to bring out what they hold.
    """

    reads: Literal["step", "deferred"] = "step"
    strict: bool = False
    max_failures: int = Field(default=3, ge=1)
    parameters_every: int = Field(default=100, ge=1)
    diagnose_every: int = Field(default=1000, ge=1)
    snapshot_every: int = Field(default=50, ge=0)
    snapshot_keep: int = Field(default=2, ge=1)
    snapshot_bytes: int = Field(default=2 * 2**30, ge=0)
    snapshot_dir: Path | None = None
    close_timeout: float = Field(default=5.0, ge=0)

    @classmethod
    def make(cls, given: Mapping[str, Any], config: Config | None) -> Settings:
        """Keywords over the configuration file; SetupError that names the wrong one."""
        try:
            return cls(**{**(config.flow if config else {}), **given})
        except ValidationError as error:
            tell = "; ".join(
                f"{'.'.join(map(str, e['loc']))}: {e['msg']} (got {e['input']!r})"
                for e in error.errors(include_url=False)
            )
            raise SetupError(f"FlowManager: {tell}. Known: {', '.join(cls.model_fields)}") from None

    @property
    def policy(self) -> Policy:
        """The part that the arbiter needs."""
        return Policy(**{name: getattr(self, name) for name in Policy.model_fields})
