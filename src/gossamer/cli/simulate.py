"""Train on any number of virtual workers: real gradients, simulated time."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gossamer.cli.options import add_run_options, given, shown_command
from gossamer.cli.output import Progressing, duration, figure, percent, print_table, size
from gossamer.config import Run, resolve
from gossamer.errors import InputError
from gossamer.runfolder import SUMMARY, RunFolder, make_folder, write_json
from gossamer.virtual.simulation import Point, Result, plain, simulate


def add_options(parser: argparse.ArgumentParser) -> None:
    add_run_options(parser)
    parser.add_argument("--out", metavar="DIR", help="keep the run in this folder: config, metrics, weights, summary")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(parsed: argparse.Namespace, arguments: Sequence[str]) -> int:
    runs = resolve(given(parsed))
    command = shown_command(arguments)
    folder = Path(parsed.out) if parsed.out else None
    if folder is not None:
        make_folder(folder)
    if not parsed.json and runs[0].topology.note:
        print(f"note: {runs[0].topology.note}", file=sys.stderr)
    results: list[Result] = []
    for each in runs:
        place = folder / each.config.method if folder is not None and len(runs) > 1 else folder
        results.append(_simulate(each, place, command, quiet=parsed.json))
        if results[-1].interrupted:
            break
    document = {"command": command, "results": [result.document() for result in results]}
    if folder is not None and len(runs) > 1:
        write_json(folder / SUMMARY, {**document, "results": [_without_history(r) for r in results]})
    if parsed.json:
        print(json.dumps(document, indent=1))
    else:
        _show(runs, results)
    return _ending(runs, results, folder)


def _ending(runs: list[Run], results: list[Result], folder: Path | None) -> int:
    """Say how it ended, and the exit code for it."""
    kept = f"; what there is is in {folder}" if folder is not None else ""
    code = 0
    for each, result in zip(runs, results, strict=False):
        if result.diverged is not None:
            lower = f"try a smaller --lr than {each.config.lr:g}"
            print(f"gossamer: {result.method} {result.diverged}: {lower}{kept}", file=sys.stderr)
            code = 2
    if results[-1].interrupted:
        print(f"gossamer: stopped at time {results[-1].final.time:.4g}{kept}", file=sys.stderr)
        code = 130
    return code


def _simulate(run: Run, place: Path | None, command: str, quiet: bool) -> Result:
    folder = RunFolder(place, run.values(), command) if place is not None else None
    c = run.config
    total = float(c.steps if c.clock == "ideal" else c.steps * c.workers)
    with Progressing(c.method, total, quiet) as progress:

        def watch(point: Point, news: list[str]) -> None:
            if folder is not None:
                folder.metric(plain(asdict(point)))
            done = point.time if c.clock == "ideal" else float(point.total_steps)
            progress.at(done, _line(point, c.clock), news)

        result = simulate(run, watch)
    if folder is not None:
        try:
            folder.close(_without_history(result), result.weights)
        except OSError as error:
            raise InputError(f"--out {place} could not be completed: {error.strerror or error}") from None
    return result


def _line(point: Point, clock: str) -> str:
    parts = [f"time {point.time:.4g}{' s' if clock == 'hardware' else ''}"]
    if point.train_loss is not None:
        parts.append(f"loss {point.train_loss:.4f}")
    if point.accuracy is not None:
        parts.append(f"accuracy {percent(point.accuracy)}")
    parts.append(f"consensus {point.consensus:.3g}")
    return "  ".join(parts)


def _without_history(result: Result) -> dict[str, Any]:
    document = result.document()
    del document["history"]
    return document


def _show(runs: list[Run], results: list[Result]) -> None:
    """The closing table."""
    c = runs[0].config
    units = "" if c.clock == "hardware" else " units"
    first = results[0].final.time
    rows = []
    for result in results:
        end = result.final
        spread = end.worker_accuracy
        rows.append(
            [
                result.method,
                duration(end.time) if c.clock == "hardware" else f"{end.time:.4g}{units}",
                f"{first / end.time:.2f}×" if end.time else "–",
                f"{end.steps}",
                figure(end.loss),
                percent(end.accuracy),
                "–" if spread.min is None else f"{percent(spread.min)} to {percent(spread.max)}",
                figure(end.consensus),
                f"{end.exchanges}",
                size(end.bytes_sent / c.workers),
                percent(end.utilization),
            ]
        )
    heads = [
        "method",
        "time",
        "speed",
        "steps",
        "loss",
        "accuracy",
        "workers",
        "consensus",
        "exchanges",
        "sent",
        "busy",
    ]
    title = f"{c.task}, {c.workers} workers, {c.topology}, {c.clock} clock, seed {c.seed}"
    print_table(title, heads, rows, numbers=True)
    time = "simulated seconds" if c.clock == "hardware" else "in expected gradients per worker"
    print(
        f"time: {time}; speed: against {results[0].method}; steps and sent: per worker; loss and accuracy: of the\n"
        "averaged model on the test set; workers: accuracy of their own models; consensus: how far they are apart;\n"
        "busy: share of their time not spent waiting."
    )
    for result in results:
        for news in result.news:
            print(f"{result.method}: {news}")
