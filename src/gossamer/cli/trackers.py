"""Outputs of a run besides the screen: its recording, a trace, TensorBoard, the user's own tracker."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from gossamer.errors import InputError
from gossamer.recording import Recorder
from gossamer.recording.trace import TraceFile, join
from gossamer.report.tracking import TensorBoard, Tracker, load_tracker, scalars
from gossamer.results import Point, WorkerPoint
from gossamer.runs.run_folder import TRACE, WORKERS


class Trackers:
    """Recorders and trackers of the runs of one command, according to its options. Use as ``with``: it closes files."""

    def __init__(self, parsed: argparse.Namespace, methods: Sequence[str], has_folder: bool) -> None:
        self.trace, self.tensorboard = parsed.trace, parsed.tensorboard
        self.several = len(methods) > 1
        if self.trace == "" and not has_folder:
            raise InputError("--trace has no file and there is no --out: give --trace FILE, or a folder with --out")
        if self.tensorboard == "":
            raise InputError("--tensorboard is empty: expected the name of a folder, which will be created")
        self.tracker = load_tracker(parsed.tracker) if parsed.tracker is not None else None
        self._open: list[TraceFile | TensorBoard] = []

    def __enter__(self) -> Trackers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._open:
            file.close()

    def recorder(self, method: str, workers: int, folder: Path | None) -> Recorder | None:
        path = self.trace_path(method, folder)
        if path is None:
            return Recorder(range(workers)) if folder is not None else None
        trace = TraceFile(path, range(workers), began_ns=time.time_ns(), title=method)
        self._open.append(trace)
        return Recorder(range(workers), trace)

    def trace_path(self, method: str, folder: Path | None) -> Path | None:
        if self.trace is None:
            return None
        if self.trace == "":
            assert folder is not None
            return folder / TRACE
        path = Path(self.trace)
        return path.with_name(f"{path.stem}-{method}{path.suffix}") if self.several else path

    def points(self, method: str) -> Callable[[Point, Sequence[WorkerPoint]], None] | None:
        """Return the function to call with each point of a run's history; None if nobody tracks it."""
        trackers: list[Tracker] = [self.tracker] if self.tracker is not None else []
        if self.tensorboard is not None:
            board = TensorBoard(Path(self.tensorboard) / method if self.several else Path(self.tensorboard))
            self._open.append(board)
            trackers.append(board)
        if not trackers:
            return None

        def track(point: Point, workers: Sequence[WorkerPoint]) -> None:
            for tracker in trackers:
                tracker(point.steps, scalars(point, workers))

        return track

    def join_traces(self, method: str, folder: Path | None) -> None:
        """Join the traces that the real workers of a run have written into one file."""
        path = self.trace_path(method, folder)
        if path is not None and folder is not None:
            traces = sorted((folder / WORKERS).glob(f"*.{TRACE}"))
            if traces:
                join(traces, path)
