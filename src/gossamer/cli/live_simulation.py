"""A simulation that is shown while it goes on, and written into its run folder."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from gossamer.cli.live import LiveView
from gossamer.config import Run
from gossamer.recording import Recorder
from gossamer.report.view import TRAINING, View, WorkerRow, states_of
from gossamer.results import Point, WorkerPoint
from gossamer.runs.run_folder import RunFolder
from gossamer.virtual.compute.comparison_cache import ComparisonCache
from gossamer.virtual.simulation import SimulationResult, simulate

Track = Callable[[Point, Sequence[WorkerPoint]], None]


def simulate_live(
    run: Run,
    folder: Path | None,
    command: str,
    name: str,
    *,
    quiet: bool,
    recorder: Recorder | None = None,
    track: Track | None = None,
    cache: ComparisonCache | None = None,
) -> SimulationResult:
    """Do one run.

    Args:
        name: what the screen calls it.
        track: called with every point of its history, if given.
        cache: what it shares with the other runs of a comparison.
    """
    c = run.config
    run_folder, tracked = None, cast("Point | None", None)
    if folder is not None:
        run_folder = RunFolder(folder, run.values(), command, method=c.method, time_unit=c.time_unit, recorder=recorder)
    with LiveView(name, quiet) as view, _Interrupts() as interrupts:

        def observe(point: Point, workers: Callable[[], list[WorkerPoint]], events: list[str]) -> None:
            nonlocal tracked
            interrupts.check()
            if run_folder is not None:
                run_folder.metric(point)
            if track is not None:
                track(point, workers())
                tracked = point
            view.show(lambda: _view(run, point, workers()), events)

        result = simulate(run, observe, recorder, cache=cache)
        if recorder is not None:
            recorder.flush()
        if track is not None and result.final is not tracked:
            # What the method's last average came to, or the point at which the run was interrupted.
            track(result.final, result.final_workers)
    if run_folder is not None:
        run_folder.close(result.document(), result.weights)
    return result


class _Interrupts:
    """Delays Ctrl-C to the next point of the history, where the state is consistent. A second Ctrl-C acts at once."""

    def __enter__(self) -> _Interrupts:
        self._interrupted = False
        # Python allows signal handlers in the main thread only.
        in_main_thread = threading.current_thread() is threading.main_thread()
        self._before = signal.signal(signal.SIGINT, self._on_signal) if in_main_thread else None
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _on_signal(self, number: int, frame: object) -> None:
        if self._interrupted:
            raise KeyboardInterrupt
        self._interrupted = True

    def check(self) -> None:
        if self._interrupted:
            raise KeyboardInterrupt


def _view(run: Run, point: Point, workers: list[WorkerPoint]) -> View:
    c = run.config
    speeds = [worker.steps / point.time if point.time else 0.0 for worker in workers]
    rows = [
        WorkerRow(worker.rank, worker.steps, speed, None, worker.exchanges, _state(worker, by_speed))
        for worker, speed, by_speed in zip(workers, speeds, states_of(speeds), strict=True)
    ]
    return View(
        time=point.time,
        time_unit=c.time_unit,
        wall_s=point.wall_s,
        share=min(1.0, point.time / c.steps if c.clock == "ideal" else point.total_steps / (c.steps * c.workers)),
        train_loss=point.train_loss,
        accuracy=point.accuracy,
        consensus=point.consensus,
        rows=rows,
    )


def _state(worker: WorkerPoint, by_speed: str) -> str:
    return worker.state if worker.state == "gone" or by_speed == TRAINING else by_speed
