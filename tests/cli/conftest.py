import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from gossamer.cli import main


@dataclass(frozen=True)
class Outcome:
    """Exit code and output of one command."""

    code: int
    out: str
    err: str

    @property
    def document(self):
        return json.loads(self.out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))

    def refused(self, *words):
        """Check that the command printed one line about what was wrong, and nothing else."""
        assert self.code == 2
        assert self.out == ""
        (line,) = self.err.splitlines()
        assert line.startswith("gossamer: ")
        for word in words:
            assert word in line
        return line


@pytest.fixture
def gossamer(capsys, tmp_path, monkeypatch):
    """Run ``gossamer …`` in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        capsys.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as exit:  # --help and --version
            code = exit.code
        out, err = capsys.readouterr()
        return Outcome(code, out, err)

    return run


@pytest.fixture
def command():
    """The start of the command line of a real ``gossamer`` process, and its environment."""
    program = [sys.executable, "-c", "import sys; from gossamer.cli import main; sys.exit(main())"]
    return program, {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm-256color", "COLUMNS": "80"}


@pytest.fixture
def process(command, tmp_path):
    """Run ``gossamer …`` in a process of its own."""

    def run(*arguments):
        program, environment = command
        done = subprocess.run(
            [*program, *map(str, arguments)], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=200
        )
        return Outcome(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def repository():
    return Path(__file__).parents[2]


QUICK = ("simulate", "--task", "quadratic", "--workers", "4", "--steps", "3")
"""A run that takes no time."""


@pytest.fixture
def quick():
    return QUICK
