"""Command-line options derived from the settings classes."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from gossamer.config import SECTIONS, RunConfig, method_fields
from gossamer.errors import InputError
from gossamer.hardware import HardwareConfig
from gossamer.methods import METHODS
from gossamer.settings import kinds
from gossamer.tasks import TaskConfig


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line each and guess what was meant."""

    def error(self, message: str) -> NoReturn:
        raise InputError(message.removeprefix("argument ").replace(": expected one argument", ": expected a value"))

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        known, rest = self.parse_known_args(arguments)
        if rest:
            flags = sorted(self.flags(known))
            close = difflib.get_close_matches(rest[0].partition("=")[0], flags, n=1)
            hint = f"did you mean {close[0]}?" if close else "see --help for the options there are"
            raise InputError(f"unknown option {rest[0]}: {hint}")
        return known

    def flags(self, known: argparse.Namespace) -> set[str]:
        """The options of this parser and of the command that was given."""
        found = set(self._option_string_actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction) and getattr(known, "command", None) in action.choices:
                found |= set(action.choices[known.command]._option_string_actions)
        return found


def add_out_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="DIR", help="keep the run in this folder: config, metrics, weights, summary")


def out_folder(parsed: argparse.Namespace) -> Path | None:
    """The folder that --out asks for."""
    if parsed.out == "":
        raise InputError("--out is empty: expected the name of a folder, which will be made")
    return None if parsed.out is None else Path(parsed.out)


def add_run_options(
    parser: argparse.ArgumentParser,
    *,
    hardware: str = "virtual hardware",
    hidden: Sequence[str] = (),
    differing: Mapping[str, tuple[str, str]] = MappingProxyType({}),
) -> None:
    """Every setting of a run as an option; only those that are given are in the outcome.

    hidden
        Options that the help does not show, since they do not apply; they are refused later, with a reason.
    differing
        Options whose help or default is not the usual one: (help, default) by name.
    """
    parser.add_argument("--config", metavar="FILE", help="a TOML file with any of these options; those given here win")
    groups = (("run", RunConfig), ("task", TaskConfig), (hardware, HardwareConfig))
    for title, settings in groups:
        group = parser.add_argument_group(title)
        for field in dataclasses.fields(settings):
            words, default = differing.get(field.name, (field.metadata["help"], str(field.default)))
            shown = None if field.name in hidden else words
            _add(group, field, kinds(settings)[field.name], shown, f"default: {default}" if default else "")
    group = parser.add_argument_group("methods")
    owners: dict[str, list[tuple[str, dataclasses.Field[Any], type]]] = {}
    for name, method in METHODS.items():
        for field in dataclasses.fields(method.Config):
            owners.setdefault(field.name, []).append((name, field, kinds(method.Config)[field.name]))
    for rows in owners.values():
        defaults = ", ".join(f"{name} {field.default}" for name, field, _ in rows)
        _add(group, rows[0][1], rows[0][2], rows[0][1].metadata["help"], f"default: {defaults}")


def _add(group: Any, field: dataclasses.Field[Any], kind: type, words: str | None, default: str) -> None:
    metavar = field.metadata["metavar"] or {int: "N", float: "X"}.get(kind, "TEXT")
    choices = field.metadata["choices"]
    if words is not None and choices:
        words += f": {', '.join(choices)}"
    group.add_argument(
        "--" + field.name.replace("_", "-"),
        dest=f"setting_{field.name}",
        metavar=metavar,
        default=argparse.SUPPRESS,
        help=argparse.SUPPRESS if words is None else (words + (f" ({default})" if default else "")).replace("%", "%%"),
    )


def given(parsed: argparse.Namespace) -> dict[str, Any]:
    """The settings that the command line and its --config file give, by name."""
    if parsed.config == "":
        raise InputError("--config is empty: expected the path of a TOML file")
    values = {} if parsed.config is None else read_config(Path(parsed.config))
    prefix = "setting_"
    values |= {name.removeprefix(prefix): value for name, value in vars(parsed).items() if name.startswith(prefix)}
    return values


def read_config(path: Path) -> dict[str, Any]:
    """The settings in a TOML file; tables in it are only for the reader's eye, a list is its items with commas."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"--config {path} cannot be read: {error.strerror}; give the path of a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"--config {path} is not TOML: {error}") from None
    known = option_names()
    values: dict[str, Any] = {}
    for title, value in document.items():
        entries = value if isinstance(value, dict) else {title: value}
        for key, entry in entries.items():
            name = key.replace("-", "_")
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]}?" if close else "see gossamer simulate --help for those there are"
                raise InputError(f"--config {path}: unknown option {key}: {hint}")
            if name in values:
                raise InputError(f"--config {path}: {key} is there twice: keep one of them")
            values[name] = _plain_value(f"--config {path}: {key}", entry)
    return values


def _plain_value(what: str, entry: Any) -> Any:
    if isinstance(entry, list) and not any(isinstance(item, dict | list) for item in entry):
        return ",".join(map(str, entry))
    if not isinstance(entry, str | bool | int | float):
        raise InputError(f"{what} is not a plain value: expected text, a number or true/false")
    return entry


def option_names() -> set[str]:
    """Every setting of a run, by name."""
    return {field.name for settings in SECTIONS for field in dataclasses.fields(settings)} | set(method_fields())  # type: ignore[arg-type]


def shown_command(arguments: Sequence[str]) -> str:
    """The command as a person would type it again."""
    return shlex.join(["gossamer", *arguments])
