"""Train with real workers: processes of their own, started here, or by torchrun on any number of machines."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gossamer.cli.auto import settled
from gossamer.cli.closing import show_comparison
from gossamer.cli.following import Followers, add_follow_options
from gossamer.cli.live import LiveView
from gossamer.cli.options import add_out_option, add_run_options, given, out_folder, read_config, shown_command
from gossamer.cli.output import counted, duration, print_json
from gossamer.errors import InputError
from gossamer.process.place import Place, started_place
from gossamer.runfolder import (
    CONFIG,
    SUMMARY,
    RunFolder,
    check_folder,
    make_folder,
    read_history,
    remove_if_empty,
    write_json,
)
from gossamer.train.checkpoint import Keeper, find_checkpoint
from gossamer.train.conduct import Keep, Show, launch, take_part
from gossamer.train.launch import MeetingPlace, hearing_stops, warm_up
from gossamer.train.order import DEFAULT_WORKERS, SIMULATED, Order, real_settings
from gossamer.train.report import DONE
from gossamer.train.result import Result, point_of
from gossamer.virtual.simulation import Point, WorkerPoint, plain

DIFFERING = {
    "method": (
        "how to train; several, with commas between them, are compared; auto: probe, plan and take the best",
        "a2cid2",
    ),
    "workers": ("how many workers; under torchrun as many as it started", str(DEFAULT_WORKERS)),
    "compute": (
        "least time of one gradient: T, lognormal:MEAN,SIGMA, exponential:MEAN or sample:FILE",
        "what it takes",
    ),
    "nodes": ("machines, for topologies that are made for them", "0"),
    "eval_every": (
        "steps after which a worker looks at the test set with its own model; 0: as often as is cheap",
        "0",
    ),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    add_run_options(parser, hardware="hardware", hidden=SIMULATED, differing=DIFFERING)
    parser.add_argument(
        "--checkpoint-every",
        metavar="N",
        help="keep in the folder of --out what the run can be resumed from, every N steps per worker (default: never)",
    )
    parser.add_argument("--resume", metavar="RUN", help="go on with the run in this folder, or from this checkpoint")
    parser.add_argument("--restart", action="store_true", help="start workers again that die, those started here")
    add_out_option(parser)
    add_follow_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(parsed: argparse.Namespace, arguments: Sequence[str]) -> int:
    folder = out_folder(parsed)
    place = started_place()
    if place is None:
        warm_up()
    command = shown_command(arguments)
    asked = _resumed(parsed, place) if parsed.resume is not None else _new(parsed, folder, place)
    if place is not None and place.rank != 0:
        for order in asked.orders:
            take_part(order, order.run(), place, lambda view, news: None, lambda point, workers: None)
        return 0
    folders = [own for own in (asked.folder, *(order.path for order in asked.orders)) if own is not None]
    if parsed.resume is None:
        _make(folders)
    try:
        methods = [order.values["method"] for order in asked.orders]
        with Followers(parsed, methods, asked.folder is not None) as followers:
            if place is None:
                results = _launch_all(asked, parsed, command, followers)
            else:
                results = _take_part_in_all(asked, place, parsed, command, followers)
    finally:
        remove_if_empty(reversed(folders))
    document = {"command": command, "results": [result.document() for result in results]}
    if asked.folder is not None and len(asked.orders) > 1:
        write_json(asked.folder / SUMMARY, {**document, "results": [_without_history(result) for result in results]})
    begun = [result for result in results if result.begun]
    if parsed.json:
        print_json(document)
    elif begun:
        _show(asked.orders[0], begun)
    return _ending(asked, results)


@dataclass(frozen=True)
class _Asked:
    """What the command is to do."""

    orders: list[Order]
    folder: Path | None
    history: list[Point] | None = None
    """Of the run that is resumed."""


def _new(parsed: argparse.Namespace, folder: Path | None, place: Place | None) -> _Asked:
    every = _every(parsed, 0)
    if every and folder is None:
        raise InputError("--checkpoint-every needs a folder to keep checkpoints in: give one with --out")
    settings = real_settings(settled(given(parsed), place), None if place is None else place.workers)
    places = [folder / values["method"] if folder and len(settings) > 1 else folder for values in settings]
    traced = parsed.trace is not None
    if traced and folder is None:
        raise InputError("--trace: real workers write theirs into the folder of the run: give one with --out")
    orders = [Order(values, str(own or ""), every, trace=traced) for values, own in zip(settings, places, strict=True)]
    return _Asked(orders, folder)


FIXED = ("method", "task", "model", "data", "dim", "optimizer", "seed")
"""Settings without which a run is another."""


def _resumed(parsed: argparse.Namespace, place: Place | None) -> _Asked:
    """The run that a checkpoint is of, with the settings that are given now."""
    if parsed.out is not None:
        raise InputError("--resume goes on in the folder of the run: leave out --out")
    checkpoint = find_checkpoint(Path(parsed.resume))
    folder = checkpoint.run_folder
    kept, now = read_config(folder / CONFIG), given(parsed)
    for name in FIXED:
        if name in now and str(now[name]) != str(kept.get(name, "")):
            raise InputError(
                f"--{name} is {now[name]}, but {folder} was run with {kept.get(name)}: leave it out, or start a new run"
            )
    if place is not None:
        kept.pop("workers")
    (values,) = real_settings({**kept, **now}, None if place is None else place.workers)
    every, traced = _every(parsed, checkpoint.every), parsed.trace is not None
    order = Order(values, str(folder), every, str(checkpoint.path), trace=traced)
    done, goal = checkpoint.total_made(values["workers"]), values["steps"] * values["workers"]
    if done >= goal:
        raise InputError(
            f"the checkpoint {checkpoint.path} is {checkpoint.mean_made()} steps on already, and --steps is "
            f"{values['steps']}: give more"
        )
    history = [point_of(line) for line in read_history(folder) if line["total_steps"] <= int(checkpoint.path.name)]
    if place is None or place.rank == 0:
        Keeper(folder, 0).forget_after(checkpoint)
    return _Asked([order], folder, history)


def _every(parsed: argparse.Namespace, otherwise: int) -> int:
    if parsed.checkpoint_every is None:
        return otherwise
    if not parsed.checkpoint_every.isdigit():
        raise InputError(f"--checkpoint-every is {parsed.checkpoint_every!r}: expected a whole number of steps")
    return int(parsed.checkpoint_every)


def _make(folders: list[Path]) -> None:
    """Make the folders of the runs, so that what is wrong with them is said before anything is trained."""
    for own in folders:
        check_folder(own)
    for own in folders:
        make_folder(own)


def _launch_all(asked: _Asked, parsed: argparse.Namespace, command: str, followers: Followers) -> list[Result]:
    """One run after the other, until one is stopped or fails."""
    meeting = MeetingPlace()
    results: list[Result] = []
    with hearing_stops() as stops:
        for order in asked.orders:

            def conduct(show: Show, keep: Keep, order: Order = order) -> Result:
                return launch(order, order.run(), meeting, stops, show, keep, parsed.restart, asked.history or ())

            results.append(_one(order, asked.history, conduct, parsed.json, command, followers))
            if results[-1].interrupted or results[-1].failed:
                break
    return results


def _take_part_in_all(
    asked: _Asked, place: Place, parsed: argparse.Namespace, command: str, followers: Followers
) -> list[Result]:
    """The same as rank 0 of workers that others have started."""
    results: list[Result] = []
    for order in asked.orders:

        def conduct(show: Show, keep: Keep, order: Order = order) -> Result:
            result = take_part(order, order.run(), place, show, keep, asked.history or ())
            assert result is not None
            return result

        results.append(_one(order, asked.history, conduct, parsed.json, command, followers))
        if results[-1].interrupted:
            break
    return results


def _one(
    order: Order,
    history: list[Point] | None,
    conduct: Callable[[Show, Keep], Result],
    quiet: bool,
    command: str,
    followers: Followers,
) -> Result:
    """One run, shown while it goes on and kept in its folder."""
    method = order.values["method"]
    track = followers.points(method)
    with LiveView(method, quiet) as view:
        kept = _Kept(order, history, command, view)

        def keep(point: Point, workers: list[WorkerPoint]) -> None:
            kept.point(point)
            track(point, workers)

        result = conduct(view.show, keep)
    if result.begun:
        # The last point once more, as it came out in the end.
        track(result.final, result.final_workers)
    kept.close(result)
    followers.join_traces(method, order.path)
    return result


class _Kept:
    """The folder of a run, if it has one. A full disk is no reason to stop training."""

    def __init__(self, order: Order, history: list[Point] | None, command: str, view: LiveView) -> None:
        self.order, self.command, self.view = order, command, view
        self._history = None if history is None else [plain(asdict(point)) for point in history]
        self._folder: RunFolder | None = None
        self._full = False

    def point(self, point: Point) -> None:
        if self.order.path is None or self._full:
            return
        try:
            # Only now: a run that never began leaves nothing behind.
            self._folder = self._folder or RunFolder(
                self.order.path, self.order.values, self.command, world="process", history=self._history
            )
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


def _ending(asked: _Asked, results: list[Result]) -> int:
    """Say how it ended, and the exit code for it."""
    kept = f"; what there is is in {asked.folder}" if asked.folder is not None else ""
    code = 0
    for order, result in zip(asked.orders, results, strict=False):
        if result.ranks_diverged:
            rank = result.ranks_diverged[0]
            where = f"worker {rank}, step {result.reports[rank].diverged_at}"
            lower = f"try a smaller --lr than {order.values['lr']:g}"
            print(f"gossamer: {result.method} diverged ({where}): {lower}{kept}", file=sys.stderr)
            code = 2
        for report in result.reports:
            if report.state == DONE and report.error:
                print(f"gossamer: {report.error}", file=sys.stderr)
                code = 2
        if result.failed:
            print(f"gossamer: {result.method}: {result.failed}{kept if result.begun else ''}", file=sys.stderr)
            code = 1
    if results[-1].interrupted:
        after = f" after {duration(results[-1].final.time)}{kept}" if results[-1].begun else ", before anybody trained"
        print(f"gossamer: stopped{after}", file=sys.stderr)
        code = 130
    return code
