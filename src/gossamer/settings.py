"""Typed settings: frozen dataclasses whose fields carry their help text and their bounds.

The command line derives its options from these classes, and a TOML file sets them by the same names. A value out of
bounds raises an ``InputError`` that names the option, wherever the value came from.
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
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    choices: Sequence[str] | None = None,
    metavar: str = "",
) -> Any:
    """Declare a field of a settings class.

    Args:
        default: The value if none is given.
        help: One line for ``--help``.
        minimum: Smallest value allowed.
        above: Values have to be larger than this.
        maximum: Largest value allowed.
        choices: The values allowed, for text.
        metavar: What ``--help`` shows for the value; by default it depends on the type of the field.
    """
    metadata = {
        "help": help,
        "minimum": minimum,
        "above": above,
        "maximum": maximum,
        "choices": choices,
        "metavar": metavar,
    }
    return dataclasses.field(default=default, metadata=metadata)


class Settings:
    """Base of all settings classes. Checks every field against its bounds when an instance is created."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            _check(field, getattr(self, field.name))


def from_values(cls: type[S], values: Mapping[str, Any]) -> S:
    """Return settings of class ``cls`` from plain values by field name; other names are ignored."""
    types = field_types(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    known = {name: _convert(fields[name], types[name], value) for name, value in values.items() if name in fields}
    return cls(**known)


def field_types(cls: type) -> dict[str, type]:
    """Return the type of each field of a settings class, by name."""
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _check(field: dataclasses.Field[Any], value: Any) -> None:
    """Raise an ``InputError`` that names the option if ``value`` is out of the field's bounds."""
    flag, meta = _flag(field), field.metadata
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        minimum, above, maximum = meta.get("minimum"), meta.get("above"), meta.get("maximum")
        if isinstance(value, float) and math.isnan(value):
            raise InputError(f"{flag} is not a number: give one, such as {field.default}")
        if math.isinf(value):
            raise InputError(f"{flag} is {value}: expected a finite number, such as {field.default}")
        if minimum is not None and value < minimum:
            raise InputError(f"{flag} is {value}: expected {minimum} or more")
        if above is not None and value <= above:
            raise InputError(f"{flag} is {value}: expected more than {above}")
        if maximum is not None and value > maximum:
            raise InputError(f"{flag} is {value}: expected {maximum} or less")
    choices = meta.get("choices")
    if choices and value not in choices:
        raise unknown(f"value for {flag}", str(value), choices)


def _convert(field: dataclasses.Field[Any], kind: type, value: Any) -> Any:
    """Return ``value``, from a file or the command line, as the type of the field."""
    flag = _flag(field)
    if kind is bool:
        if isinstance(value, bool):
            return value
        if str(value).lower() in ("true", "yes", "1", "false", "no", "0"):
            return str(value).lower() in ("true", "yes", "1")
        raise InputError(f"{flag} is {value!r}: expected true or false")
    if isinstance(value, bool):
        raise InputError(f"{flag} is {value!r}: expected {_type_name(kind)}")
    try:
        converted = kind(value)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{flag} is {value!r}: expected {_type_name(kind)}") from None
    if kind is int and isinstance(value, float) and converted != value:
        raise InputError(f"{flag} is {value!r}: expected {_type_name(kind)}")
    return converted


def _flag(field: dataclasses.Field[Any]) -> str:
    return "--" + field.name.replace("_", "-")


def _type_name(kind: type) -> str:
    return {int: "a whole number", float: "a number", str: "text"}.get(kind, kind.__name__)
