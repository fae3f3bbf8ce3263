"""The folder of an experiment: a run folder per combination and seed. What is complete there is not run again."""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossamer import tasks
from gossamer.config import Run, resolve
from gossamer.errors import InputError
from gossamer.reproduce.experiment import Cell
from gossamer.runs.run_folder import CONFIG, RUN, SUMMARY
from gossamer.tasks import Task

UNIMPORTANT = ("data",)
"""Settings that may differ between a run and its repetition."""


@dataclass(frozen=True)
class PlannedRun:
    """One run of an experiment."""

    cell: Cell
    seed: int
    path: Path

    def resolve(self, build_task: Callable[..., Task] = tasks.build) -> Run:
        """Return the run, ready to start. ``build_task`` is called in place of ``tasks.build``."""
        (run,) = resolve({**self.cell.settings, "seed": self.seed}, build_task=build_task)
        return run

    def summary(self) -> dict[str, Any] | None:
        """Return the figures of this run if it is complete. Raise ``InputError`` if the folder has another run."""
        try:
            summary: dict[str, Any] = json.loads((self.path / SUMMARY).read_text(encoding="utf-8"))
            stored = tomllib.loads((self.path / CONFIG).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if summary.get("interrupted"):
            return None
        for name, value in {**self.cell.settings, "seed": self.seed}.items():
            if name not in UNIMPORTANT and not _same(stored.get(name), value):
                raise InputError(
                    f"--out: {self.path} has a run with {name} {stored.get(name)!r} instead of {value!r}: "
                    "give another folder, or remove it"
                )
        return summary

    def remove_incomplete(self) -> bool:
        """Remove what an interrupted run left; return whether there was something."""
        was_there = (self.path / RUN).exists()
        if was_there:
            shutil.rmtree(self.path)
        return was_there


def planned_runs(folder: Path, cells: Sequence[Cell], seeds: Sequence[int]) -> list[PlannedRun]:
    """Return all runs, seed by seed: a table with fewer seeds is complete first."""
    return [PlannedRun(cell, seed, folder / f"{cell.name}-seed{seed}") for seed in seeds for cell in cells]


def _same(stored: Any, wanted: Any) -> bool:
    if isinstance(stored, int | float) and isinstance(wanted, int | float):
        return float(stored) == float(wanted)
    return str(stored) == str(wanted)


def check_file(folder: Path, name: str, size: str) -> Path:
    """Return the path of the file that says which experiment a folder holds. ``InputError`` if it is another one."""
    path = folder / "experiment.json"
    try:
        about: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return path
    except (OSError, ValueError) as error:
        raise InputError(f"--out: {path} cannot be read: {error}; give another folder") from None
    if (about.get("experiment"), about.get("size")) != (name, size):
        raise InputError(
            f"--out {folder} has the experiment {about.get('experiment')} at {about.get('size')} size: "
            "give another folder"
        )
    return path
