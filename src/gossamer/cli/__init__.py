"""The command ``gossamer``: parse, call, print."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import torch

import gossamer
from gossamer.cli.commands import methods, plan, probe, report, simulate, topology, train, watch
from gossamer.cli.options import Parser
from gossamer.errors import InputError, unknown

COMMANDS = {
    "simulate": simulate,
    "train": train,
    "report": report,
    "watch": watch,
    "probe": probe,
    "plan": plan,
    "topology": topology,
    "methods": methods,
}


def parser() -> Parser:
    """The parser of the whole command."""
    made = Parser(prog="gossamer", description=gossamer.__doc__, allow_abbrev=False)
    made.add_argument("--version", action="version", version=f"gossamer {gossamer.__version__}")
    commands = made.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for name, module in COMMANDS.items():
        line = (module.__doc__ or "").strip().splitlines()[0]
        module.add_options(commands.add_parser(name, help=line, description=line, allow_abbrev=False))
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    whole = parser()
    try:
        if arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
            raise unknown("command", arguments[0], COMMANDS)
        parsed = whole.parse(arguments)
        if parsed.command is None:
            whole.print_help(sys.stderr)
            return 2
        code = COMMANDS[parsed.command].run(parsed, arguments)
        sys.stdout.flush()
        return code
    except InputError as error:
        print(f"gossamer: {error}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:
        if not _out_of_memory(error):
            raise
        said = (str(error).splitlines() or [""])[0].strip()
        print(f"gossamer: out of memory{f' ({said})' if said else ''}: try fewer --workers", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("gossamer: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read the output has left; what Python would still flush there at its exit goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _out_of_memory(error: Exception) -> bool:
    """Whether memory ran out; torch says so with a plain RuntimeError on the CPU."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
