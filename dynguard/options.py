"""Options of plugins: checked by pydantic on construction, from Python, pairs and TOML alike."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from enum import Enum
from types import UnionType
from typing import Any, Concatenate, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, ValidationError, validate_call

from dynguard.errors import OptionError, nearest

P = ParamSpec("P")
S = TypeVar("S")


def validated(init: Callable[Concatenate[S, P], None]) -> Callable[Concatenate[S, P], None]:
    """Decorate a plugin's ``__init__``: its keyword-only options are validated by their annotations.

    Raises OptionError (a ValueError) that names the plugin, the option, the value and what is allowed.
    """
    # Built on first use: the annotations of a module under `from __future__ import annotations` may not exist yet.
    checker: list[Callable[..., Any]] = []

    @functools.wraps(init)
    def wrapper(self: S, /, *args: P.args, **kwargs: P.kwargs) -> None:
        plugin = type(self).__name__
        if args:
            raise OptionError(
                f"plugin {plugin!r}: options are keyword-only; got {len(args)} positional. {describe(init)}"
            )
        known = option_names(init)
        for name in kwargs:
            if name not in known and not _takes_any(init):
                hint = nearest(name, known) if known else " It takes none."
                raise OptionError(f"plugin {plugin!r}: unknown option {name!r}.{hint} {describe(init)}".rstrip())
        if not checker:
            checker.append(validate_call(config=ConfigDict(arbitrary_types_allowed=True))(init))
        try:
            checker[0](self, **kwargs)
        except ValidationError as error:
            if error.title.rsplit(".", 1)[-1] != "__init__":
                raise  # a model inside the plugin's own __init__ said so
            raise OptionError(f"plugin {plugin!r}: {_tell(error, init)}") from None

    wrapper.__dynguard_validated__ = True  # type: ignore[attr-defined]
    return wrapper


def _tell(error: ValidationError, init: Callable[..., Any]) -> str:
    parts = []
    for item in error.errors(include_url=False):
        where = ".".join(str(p) for p in item["loc"] if p not in ("self", 0)) or "?"
        if item["type"] == "missing_keyword_only_argument":
            parts.append(f"option {where!r} is required.")
        else:
            parts.append(f"option {where!r}: {item['msg'].removeprefix('Value error, ')}; got {item['input']!r}.")
    return " ".join(parts) + f" {describe(init)}"


def _takes_any(init: Callable[..., Any]) -> bool:
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in inspect.signature(init).parameters.values())


def option_names(init: Callable[..., Any]) -> list[str]:
    """Names of the keyword options of an ``__init__``."""
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [n for n, p in inspect.signature(init).parameters.items() if n != "self" and p.kind in kinds]


def option_table(plugin: type) -> list[tuple[str, str, str]]:
    """(name, type, default) of every option of a plugin class; the default is "" where the option is required."""
    init = plugin.__init__  # type: ignore[misc]
    if init is object.__init__:
        return []
    try:
        hints = get_type_hints(inspect.unwrap(init), include_extras=True)
    except Exception:  # noqa: BLE001 - a stranger's annotation that can't be resolved is shown as written
        hints = {}
    rows = []
    for name in option_names(init):
        parameter = inspect.signature(init).parameters[name]
        hint = hints.get(name, parameter.annotation)
        default = "" if parameter.default is inspect.Parameter.empty else _show(parameter.default)
        rows.append((name, _type_name(hint), default))
    return rows


def _show(value: Any) -> str:
    return str(value.value) if hasattr(value, "value") else repr(value)


def _type_name(hint: Any) -> str:
    if get_origin(hint) in (Union, UnionType):
        return " | ".join(_type_name(part) for part in get_args(hint))
    if hint is inspect.Parameter.empty:
        return "any"
    base = get_args(hint)[0] if hasattr(hint, "__metadata__") else hint  # Annotated[float, Field(gt=0)] -> float
    if isinstance(base, type) and issubclass(base, Enum):
        return "|".join(str(member.value) for member in base)
    name = base.__name__ if isinstance(base, type) and not get_args(base) else str(base)
    name = name.replace("typing.", "").replace("NoneType", "None")
    limits = ", ".join(repr(m) for extra in getattr(hint, "__metadata__", ()) for m in getattr(extra, "metadata", ()))
    return f"{name} ({limits})" if limits else name


def describe(init: Callable[..., Any]) -> str:
    """'(options: a: float = 1.0, b: str)' for an error message."""
    holder = type("holder", (), {"__init__": init})
    options = ", ".join(f"{n}: {t}" + (f" = {d}" if d else "") for n, t, d in option_table(holder))
    return f"(options: {options})" if options else ""
