"""Options of a run, derived from the settings classes: adding them to a parser, and reading their values back."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gossamer.config import AUTO, SECTIONS, RunConfig, find_methods, method_fields, methods_with_options
from gossamer.errors import InputError
from gossamer.hardware import HardwareConfig
from gossamer.methods import METHODS, Source
from gossamer.runs.run_folder import CONFIG
from gossamer.settings import field_types
from gossamer.tasks import TaskConfig

PREFIX = "setting_"
"""Settings of a run have names with this prefix in the parsed arguments, which sets them apart from other options."""


def named_methods(arguments: Sequence[str]) -> list[Source]:
    """Return the methods that a command line names and that are not built in: their settings are options too.

    --method names them, or else the file of --config or the run of --resume.
    """
    peek = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag in ("--method", "--config", "--resume"):
        peek.add_argument(flag)
    try:
        parsed, _ = peek.parse_known_args(arguments)
    except argparse.ArgumentError:
        # The parser of the command says what is wrong.
        return []
    files = []
    if parsed.config:
        files.append(Path(parsed.config))
    if parsed.resume:
        # A run, or one of its checkpoints.
        files += [Path(parsed.resume) / CONFIG, Path(parsed.resume).parent.parent / CONFIG]
    texts = [parsed.method] if parsed.method is not None else map(_method_in, files)
    return _named_in(next((text for text in texts if text), ""))


def _named_in(text: str) -> list[Source]:
    names = [name.strip() for name in text.split(",")]
    return find_methods(",".join(names)) if any(name not in (*METHODS, AUTO, "") for name in names) else []


def _method_in(path: Path) -> str:
    """Return the method that a TOML file names; empty if it names none or cannot be read, which is reported later."""
    try:
        entries = _entries(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return ""
    return _method_of(entries)


def add_run_options(
    parser: argparse.ArgumentParser,
    methods: Sequence[Source] = (),
    *,
    hardware: str = "virtual hardware",
    hidden: Sequence[str] = (),
    left_out: Sequence[str] = (),
    differing: Mapping[str, tuple[str, str]] = MappingProxyType({}),
) -> None:
    """Add every setting of a run as an option. The parsed arguments contain only those that were given.

    methods
        Methods that are not built in and whose settings are options too.
    hardware
        Title of the group of options that describe the machines.
    hidden
        Names of settings that do not apply to the command. The help does not list them; the command refuses them with
        the reason.
    left_out
        Names of settings that the command does not have.
    differing
        (help, default) by name, for settings whose help or default differs from that in the settings class.
    """
    parser.add_argument("--config", metavar="FILE", help="a TOML file with any of these options; the command line wins")
    for title, settings in (("run", RunConfig), ("task", TaskConfig), (hardware, HardwareConfig)):
        group = parser.add_argument_group(title)
        for field in [field for field in dataclasses.fields(settings) if field.name not in left_out]:
            help, default = differing.get(field.name, (field.metadata["help"], str(field.default)))
            shown = None if field.name in hidden else help
            _add_option(
                group, field, field_types(settings)[field.name], shown, f"default: {default}" if default else ""
            )
    group = parser.add_argument_group("methods")
    owners: dict[str, list[tuple[str, dataclasses.Field[Any], type]]] = {}
    for name, method in methods_with_options(methods).items():
        for field in dataclasses.fields(method.Config):
            owners.setdefault(field.name, []).append((name, field, field_types(method.Config)[field.name]))
    for rows in owners.values():
        defaults = ", ".join(f"{name} {field.default}" for name, field, _ in rows)
        _add_option(group, rows[0][1], rows[0][2], rows[0][1].metadata.get("help", ""), f"default: {defaults}")


def _add_option(group: Any, field: dataclasses.Field[Any], kind: type, help: str | None, default: str) -> None:
    metavar = field.metadata.get("metavar") or {int: "N", float: "X"}.get(kind, "TEXT")
    choices = field.metadata.get("choices")
    if help is not None and choices:
        help += f": {', '.join(choices)}"
    group.add_argument(
        "--" + field.name.replace("_", "-"),
        dest=PREFIX + field.name,
        metavar=metavar,
        default=argparse.SUPPRESS,
        help=argparse.SUPPRESS if help is None else f"{help}{f' ({default})' if default else ''}".replace("%", "%%"),
    )


def given(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the settings from the command line and its --config file, by name."""
    if parsed.config == "":
        raise InputError("--config is empty: expected the path of a TOML file")
    named = {name.removeprefix(PREFIX): value for name, value in vars(parsed).items() if name.startswith(PREFIX)}
    values = {} if parsed.config is None else read_config(Path(parsed.config), named.get("method", ""))
    return values | named


def read_config(path: Path, method: str = "") -> dict[str, Any]:
    """Return the settings in a TOML file, by name. Table headers are ignored; a list becomes its items with commas.

    ``method``: the methods of the run, if not those that the file names.
    """
    try:
        entries = _entries(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise InputError(f"--config {path} cannot be read: {error.strerror}; give the path of a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"--config {path} is not TOML: {error}") from None
    known = _setting_names(_named_in(method or _method_of(entries)))
    values: dict[str, Any] = {}
    for key, entry in entries:
        name = key.replace("-", "_")
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else "gossamer simulate --help lists them"
            raise InputError(f"--config {path}: unknown option {key}: {hint}")
        if name in values:
            raise InputError(f"--config {path}: {key} is given twice: keep one of them")
        if not _is_plain(entry):
            raise InputError(f"--config {path}: {key} is not a plain value: expected text, a number or true/false")
        values[name] = _text(entry) if isinstance(entry, list) else entry
    return values


def _entries(document: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return keys and values of a TOML file, without the titles of its tables."""
    tables = [value if isinstance(value, dict) else {title: value} for title, value in document.items()]
    return [entry for table in tables for entry in table.items()]


def _method_of(entries: Sequence[tuple[str, Any]]) -> str:
    return next((_text(entry) for key, entry in entries if key == "method" and _is_plain(entry)), "")


def _is_plain(entry: Any) -> bool:
    if isinstance(entry, list):
        return not any(isinstance(item, dict | list) for item in entry)
    return isinstance(entry, str | bool | int | float)


def _text(entry: Any) -> str:
    return ",".join(map(str, entry)) if isinstance(entry, list) else str(entry)


def _setting_names(methods: Sequence[Source]) -> set[str]:
    common = {field.name for settings in SECTIONS for field in dataclasses.fields(settings)}  # type: ignore[arg-type]
    return common | set(method_fields(methods))


def parse_number(text: str, flag: str, kind: type, minimum: float, maximum: float = math.inf) -> Any:
    """Return the value of an option that is no setting of a run."""
    try:
        number = kind(text)
    except ValueError:
        raise InputError(f"{flag} is {text!r}: expected {'a whole number' if kind is int else 'a number'}") from None
    if not minimum <= number <= maximum or number == math.inf:
        bounds = f"from {minimum:g} to {maximum:g}" if maximum != math.inf else f"of {minimum:g} or more, and finite"
        raise InputError(f"{flag} is {text}: expected a number {bounds}")
    return number


def run_folders(folder: Path | None, methods: Sequence[str]) -> list[Path | None]:
    """Return the folder of each run: that of --out, or one per method in it if there are several."""
    return [folder / method if folder is not None and len(methods) > 1 else folder for method in methods]


def out_folder(parsed: argparse.Namespace) -> Path | None:
    if parsed.out == "":
        raise InputError("--out is empty: expected the name of a folder, which will be created")
    return None if parsed.out is None else Path(parsed.out)


def shown_command(arguments: Sequence[str]) -> str:
    return shlex.join(["gossamer", *arguments])
