"""Where the points of a run with real workers go: into its folder and to trackers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gossamer.errors import InputError
from gossamer.results import Point, WorkerPoint
from gossamer.runs.monitor import TrainingResult
from gossamer.runs.run_folder import RunFolder

Track = Callable[[Point, Sequence[WorkerPoint]], None]


class PointWriter:
    """Writes points into the run folder, if there is one, and tracks them. A full disk does not stop the training."""

    def __init__(self, run_folder: RunFolder | None, track: Track | None, say: Callable[[str], None]) -> None:
        """``say``: called with events."""
        self.run_folder, self.track, self._say = run_folder, track, say
        self._is_full = False

    def __call__(self, point: Point, workers: Sequence[WorkerPoint]) -> None:
        try:
            if self.run_folder is not None and not self._is_full:
                self.run_folder.metric(point)
        except InputError as error:
            self._is_full = True
            self._say(f"{error}; training continues without it")
        if self.track is not None:
            self.track(point, workers)

    def end(self, result: TrainingResult) -> None:
        """Track the last point again, with its final evaluation, and write the summary."""
        if result.begun and self.track is not None:
            self.track(result.final, result.final_workers)
        if self.run_folder is not None:
            self.run_folder.close(result.document())
