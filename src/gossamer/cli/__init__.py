"""The command ``gossamer``: parse, call, print."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import gossamer
from gossamer.cli import methods, simulate, topology
from gossamer.cli.options import Parser
from gossamer.errors import InputError, unknown

COMMANDS = {"simulate": simulate, "topology": topology, "methods": methods}


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
        return COMMANDS[parsed.command].run(parsed, arguments)
    except InputError as error:
        print(f"gossamer: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("gossamer: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read the output has left; there is nobody to tell.
        sys.stderr.close()
        return 0
