"""Commands that need no torch do not import it; ``import gossamer`` imports next to nothing."""

import json
import subprocess
import sys

import pytest

from gossamer.cli import COMMANDS

HEAVY = ("torch", "scipy", "networkx", "plotly", "sklearn", "matplotlib", "pandas")

PROGRAM = f"""
import contextlib, io, json, sys
from gossamer.cli import main
with contextlib.redirect_stdout(io.StringIO()):
    try:
        code = main(sys.argv[1:])
    except SystemExit as exit:  # --help and --version
        code = exit.code
print(json.dumps({{"code": code, "imported": [name for name in {HEAVY!r} if name in sys.modules]}}))
"""


def run_python(*command):
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "arguments",
    [
        "--help",
        "--version",
        "methods",
        "methods a2cid2",
        "methods divisible --json",
        "topology",
        "topology ring --workers 16",
    ],
)
def test_a_command_that_needs_no_heavy_library_imports_none(arguments):
    assert run_python("-c", PROGRAM, *arguments.split()) == {"code": 0, "imported": []}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_does_not_import_torch(command):
    outcome = run_python("-c", PROGRAM, command, "--help")
    assert outcome["code"] == 0
    assert "torch" not in outcome["imported"]


def test_a_mistake_in_the_command_line_is_answered_without_torch():
    silent = PROGRAM.replace(
        "with contextlib.redirect_stdout(io.StringIO()):", "with contextlib.redirect_stderr(io.StringIO()):"
    )
    assert run_python("-c", silent, "simulate", "--wrokers", "3") == {"code": 2, "imported": []}


def test_importing_gossamer_imports_no_library():
    program = f"import gossamer, json, sys; print(json.dumps([m for m in {(*HEAVY, 'numpy')!r} if m in sys.modules]))"
    assert run_python("-c", program) == []
