"""What can be set on a FlowManager, in Python or in ``[flow]`` of a configuration file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from dynguard.actions import Policy
from dynguard.errors import SetupError
from dynguard.registry import Config


class Settings(Policy):
    """All that can be said in ``[flow]`` of a configuration file, checked."""

    strict: bool = False
    max_failures: int = 3
    parameters_every: int = 100
    diagnose_every: int = 1000
    close_timeout: float = 5.0

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
