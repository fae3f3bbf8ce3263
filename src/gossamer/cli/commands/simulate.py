"""``gossamer simulate``: train on any number of virtual workers."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from gossamer.cli.live_simulation import simulate_live
from gossamer.cli.options import given, out_folder, run_folders, shown_command
from gossamer.cli.output import print_json, show_comparison
from gossamer.cli.trackers import Trackers
from gossamer.config import Run, resolve, unused_options
from gossamer.report.formats import counted
from gossamer.runs.run_folder import make_folders, remove_if_empty, write_comparison
from gossamer.virtual.compute.comparison_cache import ComparisonCache
from gossamer.virtual.simulation import SimulationResult


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
    cache = ComparisonCache()
    try:
        with Trackers(parsed, [run.config.method for run in runs], folder is not None) as trackers:
            for run, run_folder in zip(runs, folders, strict=True):
                results.append(_simulate(run, run_folder, trackers, command, cache, quiet=parsed.json))
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


def _simulate(
    run: Run, folder: Path | None, trackers: Trackers, command: str, cache: ComparisonCache, quiet: bool
) -> SimulationResult:
    method = run.config.method
    recorder = trackers.recorder(method, run.config.workers, folder)
    track = trackers.points(method)
    return simulate_live(run, folder, command, method, quiet=quiet, recorder=recorder, track=track, cache=cache)


def _show(runs: list[Run], results: list[SimulationResult]) -> None:
    c = runs[0].config
    title = f"{c.task}, {counted(c.workers, 'worker')}, {c.topology}, {c.clock} clock, seed {c.seed}"
    show_comparison(
        title, results, world="virtual", time_unit=c.time_unit, has_speed=lambda result: not _divergence(result)
    )
