"""Typed settings: frozen dataclasses whose fields carry their own help text and bounds.

The command line derives its options from these, a TOML file sets them by the same names, and a value out of
bounds is one clear line wherever it came from.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, get_type_hints

from gossamer.errors import InputError, unknown

S = TypeVar("S", bound="Settings")


def option(
    default: Any,
    help: str,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    choices: Sequence[str] | None = None,
    metavar: str = "",
) -> Any:
    """A field of a settings class: its default, what it means, and what values it may take."""
    metadata = {
        "help": help,
        "least": least,
        "above": above,
        "most": most,
        "choices": choices,
        "metavar": metavar,
    }
    return dataclasses.field(default=default, metadata=metadata)


class Settings:
    """Base of all settings classes: checks every field against its bounds when one is made."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            check(field, getattr(self, field.name))


def check(field: dataclasses.Field[Any], value: Any) -> None:
    """Raise an ``InputError`` that names the option if ``value`` is not one the field may take."""
    flag, meta = "--" + field.name.replace("_", "-"), field.metadata
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        least, above, most = meta.get("least"), meta.get("above"), meta.get("most")
        if isinstance(value, float) and math.isnan(value):
            raise InputError(f"{flag} is not a number: give one, such as {field.default}")
        if math.isinf(value):
            raise InputError(f"{flag} is {value}: expected a finite number, such as {field.default}")
        if least is not None and value < least:
            raise InputError(f"{flag} is {value}: expected {least} or more")
        if above is not None and value <= above:
            raise InputError(f"{flag} is {value}: expected more than {above}")
        if most is not None and value > most:
            raise InputError(f"{flag} is {value}: expected {most} or less")
    choices = meta.get("choices")
    if choices and value not in choices:
        raise unknown(f"value for {flag}", str(value), choices)


def convert(field: dataclasses.Field[Any], kind: type, value: Any) -> Any:
    """``value``, from a file or the command line, as the field's own type."""
    flag = "--" + field.name.replace("_", "-")
    if kind is bool:
        if isinstance(value, bool):
            return value
        if str(value).lower() in ("true", "yes", "1", "false", "no", "0"):
            return str(value).lower() in ("true", "yes", "1")
        raise InputError(f"{flag} is {value!r}: expected true or false")
    if isinstance(value, bool):
        raise InputError(f"{flag} is {value!r}: expected {_words(kind)}")
    try:
        converted = kind(value)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{flag} is {value!r}: expected {_words(kind)}") from None
    if kind is int and isinstance(value, float) and converted != value:
        raise InputError(f"{flag} is {value!r}: expected {_words(kind)}")
    return converted


def from_values(cls: type[S], values: Mapping[str, Any]) -> S:
    """Settings of class ``cls`` from plain values by field name; names it does not have are left alone."""
    types = kinds(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    known = {name: convert(fields[name], types[name], value) for name, value in values.items() if name in fields}
    return cls(**known)


def _words(kind: type) -> str:
    return {int: "a whole number", float: "a number", str: "text"}.get(kind, kind.__name__)


def kinds(cls: type) -> dict[str, type]:
    """The type of each field of a settings class, by name."""
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}
