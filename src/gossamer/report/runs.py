"""Run folders, read back: whole ones, and those of runs that go on or were killed, as far as they got."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gossamer
from gossamer.errors import InputError
from gossamer.report.recordings import read_recording
from gossamer.runfolder import CONFIG, FORMAT, METRICS, RUN, SUMMARY

EXPECTED = "expected a folder that gossamer simulate or train has written with --out"


@dataclass(frozen=True)
class KeptRun:
    """What a run folder holds."""

    path: Path
    about: dict[str, Any]
    """run.json"""
    config: dict[str, Any]
    points: list[dict[str, Any]]
    summary: dict[str, Any] | None
    """None while the run goes on, or if it was killed."""
    recording: dict[str, Any] | None
    notes: list[str]
    """What a reader should know about how whole it is."""


def find_runs(path: Path) -> list[Path]:
    """The run folders that ``path`` stands for: itself, or those of a comparison in it."""
    if not path.exists():
        raise InputError(f"{path} is not there: {EXPECTED}")
    if not path.is_dir():
        raise InputError(f"{path} is a file: {EXPECTED}")
    if (path / RUN).is_file():
        return [path]
    found = sorted(child for child in path.iterdir() if (child / RUN).is_file())
    if not found:
        raise InputError(f"{path} is not the folder of a run: there is no {RUN} in it; {EXPECTED}")
    # In the order in which they ran.
    return sorted(found, key=lambda child: str(_about(child).get("started", "")) or child.name)


def read_run(path: Path) -> KeptRun:
    """Everything in a run folder."""
    about = _about(path)
    try:
        config = tomllib.loads((path / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        config = {}
    except (OSError, ValueError) as error:
        raise InputError(f"{path / CONFIG} cannot be read ({error}): was it changed by hand?") from None
    points, broken = _points(path / METRICS)
    notes = []
    if broken:
        notes.append(f"{broken} of {len(points) + broken} lines of {METRICS} could not be read and are left out")
    summary = _json(path / SUMMARY)
    recording = read_recording(path, notes)
    if summary is None:
        got = (
            f"as far as it got: step {points[-1]['steps']} of {config.get('steps', '?')}" if points else "at its start"
        )
        notes.append(f"not finished: it goes on, or was killed. Shown {got}")
    elif summary.get("interrupted"):
        notes.append(f"stopped by hand at step {summary.get('steps')} of {config.get('steps', '?')}")
    if summary is not None and summary.get("diverged"):
        where = summary["diverged"]
        notes.append(f"diverged: the loss of worker {where['worker']} was not finite at its step {where['step']}")
    return KeptRun(path, about, config, points, summary, recording, notes)


def _about(path: Path) -> dict[str, Any]:
    about = _json(path / RUN)
    if not isinstance(about, dict) or not isinstance(about.get("format"), int):
        raise InputError(f"{path / RUN} is not what gossamer writes there: {EXPECTED}")
    if about["format"] > FORMAT:
        raise InputError(
            f"{path} was written by gossamer {about.get('gossamer', '?')} in format {about['format']}; this is "
            f"{gossamer.__version__}, which reads formats up to {FORMAT}: update gossamer"
        )
    return about


def _json(path: Path) -> Any:
    """What a JSON file holds; None if it is not there."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error}): was it changed by hand?") from None


def _points(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The points of the history, and how many lines could not be read; the last may be half written."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return [], 0
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    points, broken = [], 0
    for number, line in enumerate(lines, start=1):
        try:
            point = json.loads(line)
            points.append({**point, "steps": int(point["steps"]), "time": float(point["time"])})
        except (ValueError, TypeError, KeyError):
            broken += number < len(lines)
    return points, broken
