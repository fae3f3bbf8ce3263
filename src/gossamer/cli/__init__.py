"""The command ``gossamer``: parse the options, load the command's module, run it."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

import gossamer
from gossamer.errors import InputError, unknown

COMMANDS = {
    "simulate": "Train on any number of virtual workers: real gradients, simulated time.",
    "train": "Train with real workers: processes started here, or by torchrun on any number of machines.",
    "launch": "Run your own script in several workers of this machine, and start those that die again.",
    "report": "Turn runs into one page: learning curves, consensus, workers, traffic; several runs are compared.",
    "export": "Write the model of a run or of a checkpoint, which may be sharded, into one safetensors file.",
    "watch": "Serve the report of a run in progress on this machine; the page refreshes itself.",
    "probe": "Measure this cluster with real workers, and write the results into a cluster file.",
    "plan": "Predict what each method would do on a cluster, and recommend one.",
    "reproduce": "Repeat a published experiment, and show ours beside the paper's figures.",
    "topology": "Print the constants of a topology, and draw it.",
    "methods": "List the methods, describe one of them, or check it.",
}
"""Every command and its one-line help.

The options of a command are in ``cli/arguments.py``. What it does is ``run`` in ``cli/commands/NAME.py``, which is
loaded after the options have been parsed.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, by default those of this process. Return its exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        return _run(arguments)
    except InputError as error:
        print(f"gossamer: {error}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        message = (str(error).splitlines() or [""])[0].strip()
        print(f"gossamer: out of memory{f' ({message})' if message else ''}: try fewer --workers", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("gossamer: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader has closed the pipe. Python flushes stdout at exit, so replace it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(arguments: Sequence[str]) -> int:
    command = next((argument for argument in arguments if not argument.startswith("-")), None)
    if command is not None and command not in COMMANDS:
        raise unknown("command", command, COMMANDS)
    parser = _parser(command, arguments)
    parsed = parser.parse(arguments)
    if parsed.command is None:
        parser.print_help(sys.stderr)
        return 2
    code: int = import_module(f"gossamer.cli.commands.{command}").run(parsed, arguments)
    sys.stdout.flush()
    return code


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line each and suggest what was meant."""

    def error(self, message: str) -> NoReturn:
        raise InputError(message.removeprefix("argument ").replace(": expected one argument", ": expected a value"))

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        parsed, rest = self.parse_known_args(arguments)
        if rest:
            close = difflib.get_close_matches(rest[0].partition("=")[0], sorted(self._flags(parsed.command)), n=1)
            hint = f"did you mean {close[0]}?" if close else "--help lists the options"
            raise InputError(f"unknown option {rest[0]}: {hint}")
        return parsed

    def _flags(self, command: str | None) -> set[str]:
        flags = set(self._option_string_actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction) and command in action.choices:
                flags |= set(action.choices[command]._option_string_actions)
        return flags


def _parser(command: str | None, arguments: Sequence[str]) -> _Parser:
    """Return the parser of the whole command line, with the options of ``command`` only.

    Which those are may depend on ``arguments``: a method that they name brings its own.
    """
    parser = _Parser(prog="gossamer", description=gossamer.__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"gossamer {gossamer.__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    for name, line in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=line, description=line, allow_abbrev=False)
        if name == command:
            from gossamer.cli.arguments import add_options

            add_options(name, subparser, arguments)
    return parser


def _is_out_of_memory(error: Exception) -> bool:
    # On the CPU torch raises a plain RuntimeError.
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return True
    from torch import OutOfMemoryError

    return isinstance(error, OutOfMemoryError)
