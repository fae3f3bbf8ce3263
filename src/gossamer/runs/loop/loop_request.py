"""What ``gossamer.join`` was asked to leave behind of a loop of one's own, checked."""

from __future__ import annotations

import json
import os
from pathlib import Path

from gossamer.errors import InputError
from gossamer.recording import Recorder
from gossamer.report.tracking import TensorBoard, Tracker, load_tracker
from gossamer.results import Point
from gossamer.runs.monitor import read_point
from gossamer.runs.recording_file import recorded_until
from gossamer.runs.run_folder import (
    CONFIG,
    METRICS,
    RUN,
    SUMMARY,
    TRACE,
    WORKERS,
    make_folders,
    read_history,
    remove_if_empty,
)
from gossamer.runs.status import WorkerStatus

TENSORBOARD = "tensorboard"
"""The tracker, and the folder in the run folder, of TensorBoard."""

PathArgument = str | os.PathLike[str]
TrackerArgument = Tracker | PathArgument


class LoopRequest:
    """The arguments ``out``, ``tracker``, ``trace`` and ``resume`` of ``join``."""

    def __init__(
        self, out: PathArgument | None, tracker: TrackerArgument | None, trace: bool | PathArgument, resume: bool
    ) -> None:
        if (out is not None and not isinstance(out, str | os.PathLike)) or out == "":
            raise InputError(f"out is {out!r}: expected the name of a folder, which will be created")
        if not isinstance(trace, bool | str | os.PathLike) or trace == "":
            raise InputError(f"trace is {trace!r}: expected True, or the name of a file")
        if tracker is not None and not callable(tracker) and not isinstance(tracker, str | os.PathLike):
            raise InputError(
                f"tracker is {tracker!r}: expected a function track(step, scalars), a Python file that defines it, or "
                f"{TENSORBOARD!r}"
            )
        for name, value in (("trace", trace), ("resume", resume), ("tracker", tracker == TENSORBOARD)):
            if value and out is None:
                needed = {"tracker": f"the tracker {TENSORBOARD!r}"}.get(name, name)
                raise InputError(f"{needed} needs the folder of the run: give one with out=DIR")
        self.folder = None if out is None else Path(out)
        self.tracker = tracker
        self.has_trace = bool(trace)
        self.trace_path: Path | None = None
        """Where the traces of all workers are joined at the end."""
        if self.folder is not None and trace:
            self.trace_path = self.folder / TRACE if trace is True else Path(trace)
        # torchrun restarts all workers if one fails: they continue their run.
        may_continue = resume or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        self.resumed = may_continue and self.folder is not None and _has_run(self.folder)
        """Whether the folder holds a run that this one continues."""

    def recorder(self, rank: int) -> Recorder:
        recorder = Recorder([rank])
        if self.resumed and self.folder is not None:
            recorder.resumed_after_s = recorded_until(self.folder)
        return recorder

    def make_folder(self) -> None:
        """Create the folder. Raise an ``InputError`` if it contains another run or cannot be written to."""
        if self.folder is None:
            return
        if not self.resumed:
            if _has_run(self.folder):
                raise InputError(
                    f"out {self.folder} already contains a run, which would be lost: give another folder, or "
                    f"resume=True if this run continues it"
                )
            make_folders([self.folder])
        try:
            (self.folder / WORKERS).mkdir(exist_ok=True)
        except OSError as error:
            raise InputError(
                f"out {self.folder} cannot be written to: {error.strerror}; give a folder that you may write to"
            ) from None

    def remove_empty_folder(self) -> None:
        """Remove what ``make_folder`` has made, if the run does not begin."""
        if self.folder is not None:
            remove_if_empty([self.folder / WORKERS, self.folder])

    def open_tracker(self) -> Tracker | None:
        """Return the tracker; this runs the user's file. Only the worker that monitors the run calls it."""
        if self.tracker is None or not isinstance(self.tracker, str | os.PathLike):
            return self.tracker
        if self.tracker == TENSORBOARD:
            assert self.folder is not None
            return TensorBoard(self.folder / TENSORBOARD)
        return load_tracker(os.fspath(self.tracker))

    def history(self) -> list[Point]:
        """Return the points that the folder has so far."""
        if self.folder is None or not (self.folder / METRICS).is_file():
            return []
        return [read_point(line) for line in read_history(self.folder)]

    def last_status(self, rank: int) -> WorkerStatus | None:
        """Return the last status that worker ``rank`` has written into the folder; None if there is none."""
        if self.folder is None:
            return None
        try:
            lines = (self.folder / WORKERS / f"{rank}.jsonl").read_text(encoding="utf-8").splitlines()
            return WorkerStatus(**json.loads([line for line in lines if line.endswith("}")][-1]))
        except (OSError, ValueError, IndexError, TypeError):
            return None


def _has_run(folder: Path) -> bool:
    # On a disk of its own, a worker that does not monitor the run has only its own files.
    return any((folder / name).exists() for name in (RUN, CONFIG, METRICS, SUMMARY)) or any(
        (folder / WORKERS).glob("*.json*")
    )
