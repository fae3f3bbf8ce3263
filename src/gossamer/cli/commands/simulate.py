"""Train on any number of virtual workers: real gradients, simulated time."""

from __future__ import annotations

import argparse
import math
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gossamer.cli.comparison import show_comparison
from gossamer.cli.live import LiveView
from gossamer.cli.options import given, out_folder, shown_command
from gossamer.cli.output import counted, duration, print_json
from gossamer.cli.trackers import Trackers
from gossamer.config import Run, resolve, unused_options
from gossamer.report.view import TRAINING, View, WorkerRow, state_of
from gossamer.results import Point, WorkerPoint, to_json_data
from gossamer.runfolder import SUMMARY, RunFolder, check_folder, make_folder, remove_if_empty, write_json
from gossamer.virtual.simulation import SimulationResult, simulate


def run(parsed: argparse.Namespace, arguments: Sequence[str]) -> int:
    folder = out_folder(parsed)
    runs = resolve(given(parsed))
    command = shown_command(arguments)
    folders = _folders(folder, runs)
    if not parsed.json and runs[0].topology.note:
        print(f"note: {runs[0].topology.note}", file=sys.stderr)
    if unused_options(runs[0]):
        print(f"note: the ideal clock has no machines: {', '.join(unused_options(runs[0]))} not used", file=sys.stderr)
    results: list[SimulationResult] = []
    try:
        with Trackers(parsed, [each.config.method for each in runs], folder is not None) as followers:
            for each, own in zip(runs, folders, strict=True):
                results.append(_simulate(each, own, followers, command, quiet=parsed.json))
                if results[-1].interrupted:
                    break
    except KeyboardInterrupt:
        # Between two runs; those that are done are shown.
        if not results:
            raise
        results[-1].interrupted = True
    finally:
        remove_if_empty(each for each in (*folders, folder) if each is not None)
    document = {"command": command, "results": [_document(result) for result in results]}
    if folder is not None and len(runs) > 1:
        write_json(folder / SUMMARY, {**document, "results": [_without_history(result) for result in results]})
    if parsed.json:
        print_json(document)
    else:
        _show(runs, results)
    return _ending(runs, results, folder)


def _folders(folder: Path | None, runs: list[Run]) -> list[Path | None]:
    """The folder of each run; made, so that what is wrong with them is said before anything is trained."""
    if folder is None:
        return [None] * len(runs)
    check_folder(folder)
    folders = [folder] if len(runs) == 1 else [folder / each.config.method for each in runs]
    for each in folders:
        check_folder(each)
    for each in folders:
        make_folder(each)
    return list(folders)


def _ending(runs: list[Run], results: list[SimulationResult], folder: Path | None) -> int:
    """Say how it ended, and the exit code for it."""
    kept = f"; what there is is in {folder}" if folder is not None else ""
    code = 0
    for each, result in zip(runs, results, strict=False):
        why = _divergence(result)
        if why:
            lower = f"try a smaller --lr than {each.config.lr:g}"
            print(f"gossamer: {result.method} {why}: {lower}{kept}", file=sys.stderr)
            code = 2
    if results[-1].interrupted:
        print(f"gossamer: stopped at time {results[-1].final.time:.4g}{kept}", file=sys.stderr)
        code = 130
    return code


def _divergence(result: SimulationResult) -> str:
    """How a run diverged; empty if it did not."""
    if result.diverged is not None:
        return str(result.diverged)
    end = result.final
    if all(value is None or math.isfinite(value) for value in (end.loss, end.train_loss, end.consensus)):
        return ""
    return f"diverged: the averaged model is not finite after the last step, time {end.time:g}"


def _simulate(run: Run, folder: Path | None, followers: Trackers, command: str, quiet: bool) -> SimulationResult:
    kept: RunFolder | None = None
    c = run.config
    recorder = followers.recorder(c.method, c.workers, folder)
    track = followers.points(c.method)
    time_unit = "s" if c.clock == "hardware" else "gradients"
    with LiveView(c.method, quiet) as view, _Interrupts() as interrupts:

        def callback(point: Point, workers: list[WorkerPoint], events: list[str]) -> None:
            nonlocal kept
            interrupts.heed()
            if folder is not None:
                # Only now: settings that cannot be used leave no run behind.
                kept = kept or RunFolder(folder, run.values(), command, time_unit=time_unit, recorder=recorder)
                kept.metric(to_json_data(asdict(point)))
            track(point, workers)
            view.show(lambda: _view(run, point, workers), events)

        result = simulate(run, callback, recorder)
        if recorder is not None:
            recorder.flush()
        # The last point once more, as it came out in the end.
        track(result.final, result.final_workers)
    if kept is not None:
        kept.close(_without_history(result), result.document()["history"], result.weights)
    return result


class _Interrupts:
    """Ctrl-C is heeded between two points of the history, where everything is in order; a second one at once."""

    def __enter__(self) -> _Interrupts:
        self.asked = False
        self._before = signal.signal(signal.SIGINT, self._hear) if _in_main_thread() else None
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _hear(self, number: int, frame: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def heed(self) -> None:
        """Stop here, if asked to."""
        if self.asked:
            raise KeyboardInterrupt


def _in_main_thread() -> bool:
    # Only there may a signal be handled.
    return threading.current_thread() is threading.main_thread()


def _view(run: Run, point: Point, workers: list[WorkerPoint]) -> View:
    """What is shown of a point."""
    c = run.config
    speeds = [worker.steps / point.time if point.time else 0.0 for worker in workers]
    rows = [
        WorkerRow(worker.rank, worker.steps, speed, None, worker.exchanges, _state(worker, speed, speeds))
        for worker, speed in zip(workers, speeds, strict=True)
    ]
    return View(
        time=point.time,
        time_unit="s" if c.clock == "hardware" else "gradients",
        wall_s=point.wall_s,
        share=min(1.0, point.time / c.steps if c.clock == "ideal" else point.total_steps / (c.steps * c.workers)),
        train_loss=point.train_loss,
        accuracy=point.accuracy,
        consensus=point.consensus,
        rows=rows,
    )


def _state(worker: WorkerPoint, speed: float, speeds: list[float]) -> str:
    usual = state_of(speed, speeds)
    return worker.state if worker.state == "gone" or usual == TRAINING else usual


def _document(result: SimulationResult) -> dict[str, Any]:
    return {**result.document(), "interrupted": result.interrupted}


def _without_history(result: SimulationResult) -> dict[str, Any]:
    document = _document(result)
    del document["history"]
    return document


def _show(runs: list[Run], results: list[SimulationResult]) -> None:
    """The closing table."""
    c = runs[0].config
    title = f"{c.task}, {counted(c.workers, 'worker')}, {c.topology}, {c.clock} clock, seed {c.seed}"
    if c.clock == "hardware":
        show_comparison(title, results, "simulated seconds", duration, _whole)
    else:
        show_comparison(title, results, "in expected gradients per worker", lambda time: f"{time:.4g}", _whole)


def _whole(result: SimulationResult) -> bool:
    """Whether the run came to its end, so that its time says something."""
    return result.final.time > 0 and not result.interrupted and not _divergence(result)
