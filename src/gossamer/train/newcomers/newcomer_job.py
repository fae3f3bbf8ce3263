"""The job as workers get it that come to a run under way: from the run itself, not from a command line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from gossamer.errors import InputError
from gossamer.topology.builder import EDGE_LIST_SUFFIXES
from gossamer.train.checkpoint import Checkpoint, Layout
from gossamer.train.job_spec import JobSpec

FILES = ("task", "method", "topology", "data")
"""Settings that may name a file or a folder."""


def job_for_newcomers(job_spec: JobSpec, checkpoint: Checkpoint | None, layout: Layout) -> str:
    """Return the job as a worker gets it that comes later.

    ``checkpoint``: from which the first workers were resumed.
    """
    done = job_spec.done_before
    if checkpoint is not None and not checkpoint.fits(layout):
        done = checkpoint.total_steps(layout)
    folder = str(job_spec.path.resolve()) if job_spec.path is not None else ""
    # A topology is known by the path of its file.
    values = {name: value if name == "topology" else _absolute(name, value) for name, value in job_spec.values.items()}
    return replace(job_spec, values=values, folder=folder, checkpoint="", done_before=done).to_json()


def read_job(text: str) -> JobSpec:
    """Return the job of a run as this machine can do it. InputError if a file that it needs is not here."""
    try:
        job_spec = JobSpec.from_json(text)
        values = {name: _found(name, value) for name, value in job_spec.values.items()}
    except (ValueError, TypeError, AttributeError):
        raise InputError("the job of the run cannot be read: install the same version of gossamer") from None
    # A run folder that this machine does not see is not this run's.
    folder = job_spec.folder if job_spec.folder and Path(job_spec.folder).is_dir() else ""
    return replace(job_spec, values=values, folder=folder, trace=job_spec.trace and bool(folder))


def _file_in(name: str, value: Any) -> str:
    """Return the file that a setting names; empty if it names none."""
    if name not in FILES or not isinstance(value, str):
        return ""
    if name == "data":
        return value
    path = value[: value.rfind(".py") + 3] if ".py" in value else value
    return path if path.endswith((".py", *EDGE_LIST_SUFFIXES)) else ""


def _absolute(name: str, value: Any) -> Any:
    path = _file_in(name, value)
    return str(Path(path).resolve()) + value[len(path) :] if path else value


def _found(name: str, value: Any) -> Any:
    """Return the setting with a file that exists here: at the same place, or of that name in the working directory."""
    path = _file_in(name, value)
    for candidate in (Path(path), Path(Path(path).name)):
        if not path or candidate.exists():
            return str(candidate) + value[len(path) :] if path else value
    raise InputError(
        f"the run has --{name} {path}, which is not on this machine: copy it to the same place, or into the folder in "
        "which you call this"
    )
