"""``gossamer train``: train with real workers, started here or by torchrun."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gossamer.cli.commands.auto import settled
from gossamer.cli.live import LiveView
from gossamer.cli.options import given, out_folder, parse_number, read_config, run_folders, shown_command
from gossamer.cli.output import print_json, show_comparison
from gossamer.cli.trackers import Trackers
from gossamer.config import find_methods
from gossamer.errors import InputError
from gossamer.methods import find
from gossamer.process.joining.join_facts import name_ranks
from gossamer.process.net.tls import VARIABLES
from gossamer.process.roster.newcomer import parse_address
from gossamer.process.store.rank_info import RankInfo, started_rank_info
from gossamer.report.formats import counted, duration
from gossamer.results import Point
from gossamer.runs.monitor import TrainingResult, read_point
from gossamer.runs.point_writer import PointWriter
from gossamer.runs.run_folder import CONFIG, RunFolder, make_folders, read_history, remove_if_empty, write_comparison
from gossamer.runs.status import DONE
from gossamer.train.checkpoint import CheckpointKeeper, Layout, find_checkpoint
from gossamer.train.entrypoint import LEAVE_ON_NOTHING, LEAVE_ON_TERM
from gossamer.train.job_spec import JobSpec, real_settings
from gossamer.train.launcher import LocalStore, counting_stop_signals, warm_up
from gossamer.train.supervisor import run_launched, train_as_worker, train_locally


def run(parsed: argparse.Namespace, arguments: Sequence[str]) -> int:
    folder = out_folder(parsed)
    os.environ.update({VARIABLES[name]: path for name in VARIABLES if (path := getattr(parsed, f"tls_{name}"))})
    if parsed.join is not None:
        return join(parsed, arguments)
    rank_info = started_rank_info()
    if rank_info is not None and parsed.listen is not None:
        raise InputError("--listen: workers can come to this run at MASTER_ADDR:MASTER_PORT anyway, leave it out")
    if rank_info is None:
        warm_up()
    command = shown_command(arguments)
    request = _resumed(parsed, rank_info) if parsed.resume is not None else _new(parsed, folder, rank_info)
    if parsed.listen is not None and any(job_spec.values.get("replica_size", 1) != 1 for job_spec in request.job_specs):
        raise InputError(
            "--listen: no workers can come to a run of replicas, leave it out or train without --replica-size"
        )
    if rank_info is not None and rank_info.rank != 0:
        leave_on = LEAVE_ON_TERM if parsed.leave_on_sigterm else LEAVE_ON_NOTHING
        statuses = [run_launched(job_spec, job_spec.run(), rank_info, leave_on) for job_spec in request.job_specs]
        missing = [rank for status in statuses for rank in status.missing]
        return 1 if missing and not parsed.allow_missing else 0
    folders = [
        path for path in (request.folder, *(job_spec.path for job_spec in request.job_specs)) if path is not None
    ]
    if parsed.resume is None:
        make_folders(folders)
    try:
        methods = [job_spec.method for job_spec in request.job_specs]
        with Trackers(parsed, methods, request.folder is not None) as trackers:
            if rank_info is not None:
                results = _train_all(request, partial(train_as_worker, rank_info=rank_info), parsed, command, trackers)
            else:
                store = _listening_store(parsed.listen)
                with counting_stop_signals() as signals:
                    train = partial(train_locally, store=store, signals=signals, restart=parsed.restart)
                    results = _train_all(request, train, parsed, command, trackers)
    finally:
        remove_if_empty(reversed(folders))
    document = {"command": command, "results": [result.document() for result in results]}
    if request.folder is not None and len(request.job_specs) > 1:
        write_comparison(request.folder, document)
    begun = [result for result in results if result.begun]
    if parsed.json:
        print_json(document)
    elif begun:
        _show(request.job_specs[0], begun)
    return _ending(request, results, rank_info is None, parsed.allow_missing)


def _listening_store(listen: str | None) -> LocalStore:
    """Return the store of the workers; say how others can come, if it listens for them."""
    if listen is None:
        return LocalStore()
    store = LocalStore(*parse_address(listen, "--listen is"))
    secret = f"GOSSAMER_SECRET={store.made_secret} " if store.made_secret else ""
    print(f"gossamer: to add workers: {secret}gossamer train --join {listen}", file=sys.stderr, flush=True)
    return store


OF_THIS_MACHINE = ("workers", "device", "compute", "straggler")
"""Settings that --join takes from the command line; the others are the run's."""


def join(parsed: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Add workers to a run in progress."""
    from gossamer.train.newcomers.join_run import JoinedRun

    values = given(parsed)
    others = [name for name in values if name not in OF_THIS_MACHINE]
    others += [name for name in ("out", "resume", "checkpoint_every", "listen", "trace") if getattr(parsed, name)]
    if others:
        raise InputError(f"--join takes the job from the run: leave out --{others[0].replace('_', '-')}")
    count = int(parse_number(str(values.pop("workers", 1)), "--workers", int, 1))
    warm_up()
    joined = JoinedRun(parsed.join, count, values)
    job_spec = joined.job_spec
    with counting_stop_signals() as signals, LiveView(job_spec.method, parsed.json) as view:
        ranks = name_ranks([rank_info.rank for rank_info in joined.rank_infos])
        view.say(f"{ranks} of the run at {parsed.join}")
        result = joined.train(signals, view.show, parsed.restart)
    done = any(status.state == DONE for status in result.status)
    if parsed.json:
        print_json({"command": shown_command(arguments), "results": [result.document()]})
    elif done:
        _show(job_spec, [result])
    if result.failed:
        print(f"gossamer: {result.method}: {result.failed}", file=sys.stderr)
    elif not done:
        print(f"gossamer: {ranks} left the run, which goes on", file=sys.stderr)
    return _failure_code(result)


@dataclass(frozen=True)
class _Request:
    """The runs that the command line describes."""

    job_specs: list[JobSpec]
    folder: Path | None
    history: list[Point] | None = None
    """Of the run that is resumed."""


def _new(parsed: argparse.Namespace, folder: Path | None, rank_info: RankInfo | None) -> _Request:
    checkpoint_every = _checkpoint_every(parsed, 0)
    if checkpoint_every and folder is None:
        raise InputError("--checkpoint-every needs a folder for the checkpoints: give one with --out")
    settings = real_settings(
        settled(given(parsed), rank_info, parsed.until, parsed.budget), None if rank_info is None else rank_info.workers
    )
    folders = run_folders(folder, [find(values["method"]).name for values in settings])
    traced = parsed.trace is not None
    if traced and folder is None:
        raise InputError("--trace: real workers write their traces into the folder of the run: give one with --out")
    job_specs = [
        JobSpec(values, str(path or ""), checkpoint_every, trace=traced)
        for values, path in zip(settings, folders, strict=True)
    ]
    return _Request(job_specs, folder)


FIXED = ("method", "task", "model", "data", "dim", "optimizer", "seed")
"""Settings that a resumed run cannot change."""


def _resumed(parsed: argparse.Namespace, rank_info: RankInfo | None) -> _Request:
    """Return the run to resume from a checkpoint, with the settings that are given now."""
    if parsed.out is not None:
        raise InputError("--resume continues in the folder of the run: leave out --out")
    checkpoint = find_checkpoint(Path(parsed.resume))
    folder = checkpoint.run_folder
    before, now = read_config(folder / CONFIG), given(parsed)
    if "method" in now:
        now["method"] = ",".join(source.spec for source in find_methods(now["method"]))
    for name in FIXED:
        if name in now and str(now[name]) != str(before.get(name, "")):
            raise InputError(
                f"--{name} is {now[name]}, but {folder} was run with {before.get(name)}: leave it out, or start anew"
            )
    if rank_info is not None:
        before.pop("workers")
    (values,) = real_settings({**before, **now}, None if rank_info is None else rank_info.workers)
    checkpoint_every, traced = _checkpoint_every(parsed, checkpoint.every), parsed.trace is not None
    layout = Layout.of(values)
    named_from = checkpoint.named_from(layout)
    job_spec = JobSpec(values, str(folder), checkpoint_every, str(checkpoint.path), traced, named_from)
    done, goal = checkpoint.total_steps(layout), values["steps"] * values["workers"]
    if done >= goal:
        raise InputError(
            f"the checkpoint {checkpoint.path} is already at step {checkpoint.mean_steps()}, but --steps is "
            f"{values['steps']}: give more"
        )
    history = [read_point(line) for line in read_history(folder) if line["total_steps"] <= int(checkpoint.path.name)]
    if rank_info is None or rank_info.rank == 0:
        CheckpointKeeper(folder, 0).delete_after(checkpoint)
    return _Request([job_spec], folder, history)


def _checkpoint_every(parsed: argparse.Namespace, default: int) -> int:
    if parsed.checkpoint_every is None:
        return default
    return int(parse_number(parsed.checkpoint_every, "--checkpoint-every", int, 0))


def _train_all(
    request: _Request,
    train: Callable[..., TrainingResult | None],
    parsed: argparse.Namespace,
    command: str,
    trackers: Trackers,
) -> list[TrainingResult]:
    """Do one run after the other, until one is stopped or fails."""
    results: list[TrainingResult] = []
    for job_spec in request.job_specs:
        results.append(_train(job_spec, request.history, train, parsed.json, command, trackers))
        if results[-1].interrupted or results[-1].failed:
            break
    return results


def _train(
    job_spec: JobSpec,
    history: list[Point] | None,
    train: Callable[..., TrainingResult | None],
    quiet: bool,
    command: str,
    trackers: Trackers,
) -> TrainingResult:
    """Do one run: show it while it goes on, and write it into its folder."""
    method = job_spec.method
    track = trackers.points(method)
    run_folder = None
    if job_spec.path is not None:
        run_folder = RunFolder(job_spec.path, job_spec.values, command, method=method, world="process", history=history)
    with LiveView(method, quiet) as view:
        writer = PointWriter(run_folder, track, view.say)
        result = train(job_spec, job_spec.run(), show=view.show, on_point=writer, history=history or ())
    assert result is not None
    writer.end(result)
    trackers.join_traces(method, job_spec.path)
    return result


def _show(job_spec: JobSpec, results: list[TrainingResult]) -> None:
    c = job_spec.run().config
    title = f"{c.task}, {counted(c.workers, 'worker')}, {c.topology}, real processes, seed {c.seed}"
    show_comparison(
        title,
        results,
        world="process",
        time_unit="s",
        has_speed=lambda result: not (result.failed or result.ranks_diverged),
    )


def _failure_code(result: TrainingResult) -> int:
    if result.bad_input:
        return 2
    return 1 if result.failed else 0


def _ending(request: _Request, results: list[TrainingResult], started_here: bool, allow_missing: bool) -> int:
    """Print how the runs ended if they did not complete. Return the exit code."""
    saved = f"; results so far are in {request.folder}" if request.folder is not None else ""
    code = 0
    for job_spec, result in zip(request.job_specs, results, strict=False):
        if result.ranks_diverged:
            rank = result.ranks_diverged[0]
            where = f"worker {rank}, step {result.status[rank].diverged_at}"
            hint = f"try a smaller --lr than {job_spec.values['lr']:g}"
            print(f"gossamer: {result.method} diverged ({where}): {hint}{saved}", file=sys.stderr)
            code = 2
        for status in result.status:
            if status.state == DONE and status.error:
                print(f"gossamer: {status.error}", file=sys.stderr)
                code = 2
        missing = {rank for status in result.status if status.state == DONE for rank in status.missing}
        if started_here:
            # Their processes have ended, and that was said. Elsewhere they may train on.
            missing -= set(result.gone)
        if missing and not result.interrupted:
            where = f"{result.method}: the final model is without {name_ranks(sorted(missing))}"
            hint = "" if allow_missing else "; --allow-missing accepts that"
            print(f"gossamer: {where}{hint}", file=sys.stderr)
            code = code if allow_missing else 1
        if result.failed:
            print(f"gossamer: {result.method}: {result.failed}{saved if result.begun else ''}", file=sys.stderr)
            code = _failure_code(result)
    if results[-1].interrupted:
        after = f" after {duration(results[-1].final.time)}{saved}" if results[-1].begun else " before training began"
        print(f"gossamer: stopped{after}", file=sys.stderr)
        code = 130
    return code
