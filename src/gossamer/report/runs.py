"""Reads run folders: of finished runs, and of runs that are still going or were killed."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gossamer
from gossamer.errors import InputError
from gossamer.report.recordings import read_ranks, read_recording
from gossamer.runs.run_folder import CONFIG, FORMAT, METRICS, RUN, SUMMARY

EXPECTED = "expected a folder that gossamer simulate or train has written with --out, or gossamer.join with out="


@dataclass(frozen=True)
class StoredRun:
    path: Path
    about: dict[str, Any]
    """run.json"""
    config: dict[str, Any]
    points: list[dict[str, Any]]
    summary: dict[str, Any] | None
    """None while the run goes on, or if it was killed."""
    recording: dict[str, Any] | None
    notes: list[str]
    """What a reader should know about how complete the run is."""
    ranks: list[dict[str, Any]] = field(default_factory=list)
    """What the ranks of replicas did (``read_ranks``); empty if workers are one rank each."""

    @property
    def finished(self) -> bool:
        """Whether the run has ended, by itself or stopped by hand."""
        return self.summary is not None

    @property
    def final(self) -> dict[str, Any]:
        """The last figures: the summary, or the newest point of a run without one; empty before the first point."""
        return self.summary or (self.points[-1] if self.points else {})

    @property
    def method(self) -> str:
        """The name of its method; in the config there may be the path of a file instead."""
        return str(self.about.get("method") or self.config.get("method") or self.path.name)

    @property
    def time_unit(self) -> str:
        """``s``, or ``gradients`` (per worker) on the ideal clock."""
        return str(self.about.get("time_unit", "s"))

    def progress(self, step: Any) -> str:
        """``step 20 of 200``; the end of a loop of one's own is unknown."""
        return f"step {step} of {self.config['steps']}" if "steps" in self.config else f"step {step}"

    @property
    def problem(self) -> str:
        """How the run went wrong; empty if it did not."""
        if self.final.get("diverged"):
            where = self.final["diverged"]
            return f"diverged: the loss of worker {where['worker']} was not finite at its step {where['step']}"
        if self.final.get("failed"):
            return f"failed: {self.final['failed']}"
        return ""


def find_runs(path: Path) -> list[Path]:
    """Return the run folders that ``path`` stands for: itself, or those of a comparison in it."""
    if not path.exists():
        raise InputError(f"{path} does not exist: {EXPECTED}")
    if not path.is_dir():
        raise InputError(f"{path} is a file: {EXPECTED}")
    if (path / RUN).is_file():
        return [path]
    folders = [child for child in sorted(path.iterdir()) if (child / RUN).is_file()]
    if not folders:
        raise InputError(f"{path} is not the folder of a run: it contains no {RUN}; {EXPECTED}")
    # In the order in which they ran.
    return sorted(folders, key=lambda child: str(_read_about(child).get("started", "")) or child.name)


def read_run(path: Path) -> StoredRun:
    about = _read_about(path)
    try:
        config = tomllib.loads((path / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        config = {}
    except (OSError, ValueError) as error:
        raise InputError(f"{path / CONFIG} cannot be read ({error}): was it changed by hand?") from None
    points, num_broken = _read_points(path / METRICS)
    notes = []
    if num_broken:
        num_lines = len(points) + num_broken
        notes.append(f"{num_broken} of {num_lines} lines of {METRICS} could not be read and are left out")
    recording, ranks = read_recording(path, notes), read_ranks(path, notes)
    run = StoredRun(path, about, config, points, _read_json(path / SUMMARY), recording, notes, ranks)
    if not run.finished:
        progress = run.progress(points[-1]["steps"]) if points else "its start"
        notes.append(f"not finished: it is still running, or was killed; shown up to {progress}")
    elif run.final.get("interrupted"):
        notes.append(f"stopped by hand at {run.progress(run.final.get('steps'))}")
    if run.problem:
        notes.append(run.problem)
    return run


def _read_about(path: Path) -> dict[str, Any]:
    about = _read_json(path / RUN)
    if not isinstance(about, dict) or not isinstance(about.get("format"), int):
        raise InputError(f"{path / RUN} is not what gossamer writes there: {EXPECTED}")
    if about["format"] > FORMAT:
        raise InputError(
            f"{path} was written by gossamer {about.get('gossamer', '?')} in format {about['format']}; this is "
            f"{gossamer.__version__}, which reads formats up to {FORMAT}: update gossamer"
        )
    return about


def _read_json(path: Path) -> Any:
    """Return the contents of a JSON file; None if it does not exist."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error}): was it changed by hand?") from None


def _read_points(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the points of the history, and the number of unreadable lines; the last line may be half written."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return [], 0
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    points, num_broken = [], 0
    for number, line in enumerate(lines, start=1):
        try:
            point = json.loads(line)
            points.append({**point, "steps": int(point["steps"]), "time": float(point["time"])})
        except (ValueError, TypeError, KeyError):
            num_broken += number < len(lines)
    return points, num_broken
