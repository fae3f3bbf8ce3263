"""Environments in which other libraries are installed for a benchmark, under ``build/``."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TORCH = "torch==2.13.0"
LIMIT_S = 1200.0


class CannotInstall(Exception):
    """A library cannot be installed here; in one line, why."""


@dataclass(frozen=True)
class Environment:
    """A library in an environment of its own."""

    name: str
    packages: tuple[str, ...]

    def python(self, folder: Path | None = None) -> Path:
        """Return its Python. Installs on first use."""
        folder = ROOT / "build" / self.name if folder is None else folder
        python, done = folder / "bin" / "python", folder / "installed"
        wanted = " ".join((*self.packages, TORCH))
        if done.exists() and done.read_text() == wanted:
            return python
        print(f"installing {self.packages[0]} into {folder}", file=sys.stderr, flush=True)
        run(sys.executable, "-m", "venv", "--clear", str(folder))
        run(str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *self.packages, TORCH)
        done.write_text(wanted)
        return python


def run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotInstall(str(error)) from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise CannotInstall(lines[-1] if lines else f"status {done.returncode}")


TORCHFT = Environment("torchft", ("torchft==0.2.0", "numpy"))
HIVEMIND = Environment("hivemind", ("hivemind==1.1.12", "numpy"))
