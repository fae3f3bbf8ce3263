"""Train with real workers: processes of their own, started here, or by torchrun on any number of machines."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gossamer.cli.closing import show_comparison
from gossamer.cli.live import LiveView
from gossamer.cli.options import add_run_options, given, shown_command
from gossamer.cli.output import counted, duration, print_json
from gossamer.errors import InputError
from gossamer.process.place import Place, find_place
from gossamer.runfolder import SUMMARY, RunFolder, check_folder, make_folder, remove_if_empty, write_json
from gossamer.train.conduct import Keep, Show, launch, take_part
from gossamer.train.launch import MeetingPlace, hearing_stops, warm_up
from gossamer.train.order import DEFAULT_WORKERS, SIMULATED, Order, real_settings
from gossamer.train.result import Result
from gossamer.virtual.simulation import Point, plain

DIFFERING = {
    "workers": ("how many workers; under torchrun as many as it started", str(DEFAULT_WORKERS)),
    "compute": (
        "least time of one gradient: T, lognormal:MEAN,SIGMA, exponential:MEAN or sample:FILE",
        "what it takes",
    ),
    "nodes": ("machines, for topologies that are made for them", "0"),
    "eval_every": ("steps after which a worker looks at the test set with its own model; 0: only in the end", "0"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    add_run_options(parser, hardware="hardware", hidden=SIMULATED, differing=DIFFERING)
    parser.add_argument("--restart", action="store_true", help="start workers again that die, those started here")
    parser.add_argument("--out", metavar="DIR", help="keep the run in this folder: config, metrics, weights, summary")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(parsed: argparse.Namespace, arguments: Sequence[str]) -> int:
    if parsed.out == "":
        raise InputError("--out is empty: expected the name of a folder, which will be made")
    place = _started_place()
    if place is None:
        warm_up()
    folder = Path(parsed.out) if parsed.out is not None else None
    settings = real_settings(given(parsed), None if place is None else place.workers)
    places = [folder / values["method"] if folder and len(settings) > 1 else folder for values in settings]
    orders = [Order(values, str(own or "")) for values, own in zip(settings, places, strict=True)]
    if place is not None and place.rank != 0:
        for order in orders:
            take_part(order, order.run(), place, lambda view, news: None, lambda point: None)
        return 0
    _make_places(folder, places)
    command = shown_command(arguments)
    try:
        if place is None:
            results = _launch_all(orders, parsed, command)
        else:
            results = _take_part_in_all(orders, place, parsed, command)
    finally:
        remove_if_empty(own for own in (*places, folder) if own is not None)
    document = {"command": command, "results": [result.document() for result in results]}
    if folder is not None and len(orders) > 1:
        write_json(folder / SUMMARY, {**document, "results": [_without_history(result) for result in results]})
    begun = [result for result in results if result.begun]
    if parsed.json:
        print_json(document)
    elif begun:
        _show(orders[0], begun)
    return _ending(orders, results, folder)


def _started_place() -> Place | None:
    """Which worker this process is, if somebody started it as one of several."""
    env = os.environ
    if {"RANK", "WORLD_SIZE"} <= env.keys() or env.get("SLURM_NTASKS", "1") != "1":
        return find_place()
    return None


def _make_places(folder: Path | None, places: list[Path | None]) -> None:
    """Make the folder of each run, so that what is wrong with them is said before anything is trained."""
    wanted = [own for own in (folder, *places) if own is not None]
    for own in wanted:
        check_folder(own)
    for own in wanted:
        make_folder(own)


def _launch_all(orders: list[Order], parsed: argparse.Namespace, command: str) -> list[Result]:
    """One run after the other, until one is stopped or fails."""
    meeting = MeetingPlace()
    results: list[Result] = []
    with hearing_stops() as stops:
        for order in orders:

            def conduct(show: Show, keep: Keep, order: Order = order) -> Result:
                return launch(order, order.run(), meeting, stops, show, keep, parsed.restart)

            results.append(_one(order, conduct, parsed.json, command))
            if results[-1].interrupted or results[-1].failed:
                break
    return results


def _take_part_in_all(orders: list[Order], place: Place, parsed: argparse.Namespace, command: str) -> list[Result]:
    """The same as rank 0 of workers that others have started."""
    results: list[Result] = []
    for order in orders:

        def conduct(show: Show, keep: Keep, order: Order = order) -> Result:
            result = take_part(order, order.run(), place, show, keep)
            assert result is not None
            return result

        results.append(_one(order, conduct, parsed.json, command))
        if results[-1].interrupted:
            break
    return results


def _one(order: Order, conduct: Callable[[Show, Keep], Result], quiet: bool, command: str) -> Result:
    """One run, shown while it goes on and kept in its folder."""
    with LiveView(order.values["method"], quiet) as view:
        kept = _Kept(order, command, view)
        result = conduct(view.show, kept.point)
    kept.close(result)
    return result


class _Kept:
    """The folder of a run, if it has one. A full disk is no reason to stop training."""

    def __init__(self, order: Order, command: str, view: LiveView) -> None:
        self.order, self.command, self.view = order, command, view
        self._folder: RunFolder | None = None
        self._full = False

    def point(self, point: Point) -> None:
        if self.order.path is None or self._full:
            return
        try:
            # Only now: a run that never began leaves nothing behind.
            self._folder = self._folder or RunFolder(self.order.path, self.order.values, self.command, world="process")
            self._folder.metric(plain(asdict(point)))
        except InputError as error:
            self._full = True
            self.view.say(f"{error}; training goes on without")

    def close(self, result: Result) -> None:
        if self._folder is not None:
            self._folder.close(_without_history(result), result.document()["history"], None)


def _without_history(result: Result) -> dict[str, Any]:
    document = result.document()
    del document["history"]
    return document


def _show(order: Order, results: list[Result]) -> None:
    """The closing table."""
    c = order.run().config
    title = f"{c.task}, {counted(c.workers, 'worker')}, {c.topology}, real processes, seed {c.seed}"
    show_comparison(title, results, "real seconds", duration, _whole)


def _whole(result: Result) -> bool:
    """Whether the run came to its end, so that its time says something."""
    return result.final.time > 0 and not (result.interrupted or result.failed or result.ranks_diverged)


def _ending(orders: list[Order], results: list[Result], folder: Path | None) -> int:
    """Say how it ended, and the exit code for it."""
    kept = f"; what there is is in {folder}" if folder is not None else ""
    code = 0
    for order, result in zip(orders, results, strict=False):
        if result.ranks_diverged:
            rank = result.ranks_diverged[0]
            where = f"worker {rank}, step {result.reports[rank].diverged_at}"
            lower = f"try a smaller --lr than {order.values['lr']:g}"
            print(f"gossamer: {result.method} diverged ({where}): {lower}{kept}", file=sys.stderr)
            code = 2
        if result.failed:
            print(f"gossamer: {result.method}: {result.failed}{kept if result.begun else ''}", file=sys.stderr)
            code = 1
    if results[-1].interrupted:
        after = f" after {duration(results[-1].final.time)}{kept}" if results[-1].begun else ", before anybody trained"
        print(f"gossamer: stopped{after}", file=sys.stderr)
        code = 130
    return code
