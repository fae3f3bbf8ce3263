"""``gossamer simulate``: train on any number of virtual workers."""

from __future__ import annotations

import argparse
import math
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from gossamer.cli.live import LiveView
from gossamer.cli.options import given, out_folder, run_folders, shown_command
from gossamer.cli.output import print_json, show_comparison
from gossamer.cli.trackers import Trackers
from gossamer.config import Run, resolve, unused_options
from gossamer.report.formats import counted
from gossamer.report.view import TRAINING, View, WorkerRow, state_of
from gossamer.results import Point, WorkerPoint
from gossamer.runfolder import RunFolder, make_folders, remove_if_empty, write_comparison
from gossamer.virtual.simulation import SimulationResult, simulate


def run(parsed: argparse.Namespace, arguments: Sequence[str]) -> int:
    folder = out_folder(parsed)
    runs = resolve(given(parsed))
    command = shown_command(arguments)
    folders = run_folders(folder, [run.config.method for run in runs])
    created = [path for path in (folder, *folders) if path is not None]
    # Before training starts, so that errors with them are reported at once.
    make_folders(created)
    if not parsed.json and runs[0].topology.note:
        print(f"note: {runs[0].topology.note}", file=sys.stderr)
    unused = unused_options(runs[0])
    if unused:
        print(f"note: the ideal clock has no machines: {', '.join(unused)} not used", file=sys.stderr)
    results: list[SimulationResult] = []
    try:
        with Trackers(parsed, [run.config.method for run in runs], folder is not None) as trackers:
            for run, run_folder in zip(runs, folders, strict=True):
                results.append(_simulate(run, run_folder, trackers, command, quiet=parsed.json))
                if results[-1].interrupted:
                    break
    except KeyboardInterrupt:
        # Between two runs: show those that are complete.
        if not results:
            raise
        results[-1].interrupted = True
    finally:
        remove_if_empty(reversed(created))
    document = {"command": command, "results": [result.document() for result in results]}
    if folder is not None and len(runs) > 1:
        write_comparison(folder, document)
    if parsed.json:
        print_json(document)
    else:
        _show(runs, results)
    return _ending(runs, results, folder)


def _ending(runs: list[Run], results: list[SimulationResult], folder: Path | None) -> int:
    """Print how the runs ended if they did not complete. Return the exit code."""
    saved = f"; results so far are in {folder}" if folder is not None else ""
    code = 0
    for run, result in zip(runs, results, strict=False):
        divergence = _divergence(result)
        if divergence:
            hint = f"try a smaller --lr than {run.config.lr:g}"
            print(f"gossamer: {result.method} {divergence}: {hint}{saved}", file=sys.stderr)
            code = 2
    if results[-1].interrupted:
        print(f"gossamer: stopped at time {results[-1].final.time:.4g}{saved}", file=sys.stderr)
        code = 130
    return code


def _divergence(result: SimulationResult) -> str:
    """Return a description of how the run diverged, empty if it did not."""
    if result.diverged is not None:
        return str(result.diverged)
    end = result.final
    if all(value is None or math.isfinite(value) for value in (end.loss, end.train_loss, end.consensus)):
        return ""
    return f"diverged: the averaged model is not finite after the last step, time {end.time:g}"


def _simulate(run: Run, folder: Path | None, trackers: Trackers, command: str, quiet: bool) -> SimulationResult:
    """Do one run: show it while it goes on, and write it into its folder."""
    c = run.config
    recorder = trackers.recorder(c.method, c.workers, folder)
    track = trackers.points(c.method)
    run_folder = None
    if folder is not None:
        run_folder = RunFolder(folder, run.values(), command, method=c.method, time_unit=c.time_unit, recorder=recorder)
    with LiveView(c.method, quiet) as view, _Interrupts() as interrupts:

        def callback(point: Point, workers: list[WorkerPoint], events: list[str]) -> None:
            interrupts.check()
            if run_folder is not None:
                run_folder.metric(point)
            track(point, workers)
            view.show(lambda: _view(run, point, workers), events)

        result = simulate(run, callback, recorder)
        if recorder is not None:
            recorder.flush()
        # The last point again, with its final evaluation.
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
        WorkerRow(worker.rank, worker.steps, speed, None, worker.exchanges, _state(worker, speed, speeds))
        for worker, speed in zip(workers, speeds, strict=True)
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


def _state(worker: WorkerPoint, speed: float, speeds: list[float]) -> str:
    by_speed = state_of(speed, speeds)
    return worker.state if worker.state == "gone" or by_speed == TRAINING else by_speed


def _show(runs: list[Run], results: list[SimulationResult]) -> None:
    c = runs[0].config
    title = f"{c.task}, {counted(c.workers, 'worker')}, {c.topology}, {c.clock} clock, seed {c.seed}"
    show_comparison(
        title, results, world="virtual", time_unit=c.time_unit, has_speed=lambda result: not _divergence(result)
    )
