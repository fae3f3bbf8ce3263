"""``gossamer reproduce``: repeat a published experiment, and show ours beside the paper's figures."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gossamer.cli.options import parse_number, shown_command
from gossamer.cli.output import print_json, print_note, print_table
from gossamer.config import find_device
from gossamer.errors import InputError
from gossamer.report.formats import counted
from gossamer.reproduce.experiment import FULL, REDUCED, SIZES, Cell, Experiment, find, names
from gossamer.reproduce.folder import PlannedRun, check_file, planned_runs
from gossamer.reproduce.measures import SPEEDUP
from gossamer.reproduce.table import Row, add_speedups, markdown, table
from gossamer.runs.run_folder import write_json, write_text
from gossamer.tasks import TASKS


def run(parsed: argparse.Namespace, arguments: Sequence[str]) -> int:
    if parsed.name is None:
        _list(parsed.json)
        return 0
    experiment = find(parsed.name)
    size = parsed.size or (REDUCED if find_device(parsed.device).type == "cpu" else FULL)
    seeds = range(experiment.seeds if parsed.seeds is None else parse_number(parsed.seeds, "--seeds", int, 1))
    cells = experiment.cells(size, _chosen(parsed.only))
    if not cells:
        raise InputError(f"--only leaves no row of {experiment.name}: leave it out")
    folder = Path(parsed.out if parsed.out is not None else f"reproduced/{experiment.name}-{size}")
    if parsed.out == "":
        raise InputError("--out is empty: expected the name of a folder, which will be created")
    check_file(folder, experiment.name, size)
    command = shown_command(arguments)
    rows = {cell.labels: Row(cell) for cell in cells}
    interrupted = False
    if experiment.is_planned:
        from gossamer.reproduce.prediction import predicted

        for row in rows.values():
            row.summaries[0] = predicted(experiment, row.cell, seed=0)
        _make(folder, experiment, size, command)
    else:
        placed = [_placed(cell, parsed) for cell in cells]
        if parsed.data is not None and not any("data" in cell.settings for cell in placed):
            print(f"note: --data is not used: {experiment.name} needs none at {size} size", file=sys.stderr)
        rows = {cell.labels: Row(cell) for cell in placed}
        interrupted = _train(experiment, size, planned_runs(folder, placed, seeds), rows, folder, command, parsed.json)
    about = {
        "command": command,
        "size": size,
        "machine": _machine(parsed.device),
        "gossamer": _version(),
    }
    complete = [row for row in rows.values() if row.summaries]
    if SPEEDUP in experiment.measures:
        add_speedups(complete, experiment.axis_names)
    document = {
        "experiment": experiment.name,
        **about,
        "interrupted": interrupted,
        "rows": [row.document(experiment.axis_names, experiment.measures) for row in complete],
    }
    if complete:
        document |= _write(experiment, size, complete, folder, about, document)
    if parsed.json:
        print_json(document)
    else:
        _show(experiment, size, complete, document)
    if interrupted:
        print(f"gossamer: stopped; the same command goes on from {folder}", file=sys.stderr)
    return 130 if interrupted else 0


def _list(as_json: bool) -> None:
    experiments = [find(name) for name in names()]
    entries = [
        {
            "experiment": each.name,
            "title": each.title,
            "paper": each.paper,
            "runs": {size: 0 if each.is_planned else len(each.cells(size)) * each.seeds for size in SIZES},
        }
        for each in experiments
    ]
    if as_json:
        print_json({"experiments": entries})
        return
    lines = [
        [
            each.name,
            each.title,
            "predicted" if each.is_planned else f"{len(each.cells(REDUCED)) * each.seeds}",
            "predicted" if each.is_planned else f"{len(each.cells(FULL)) * each.seeds}",
        ]
        for each in experiments
    ]
    print_table("", ["experiment", "what", "runs, reduced", "runs, full"], lines)


def _chosen(given: Sequence[str]) -> dict[str, list[str]]:
    """Return the labels by axis that --only names."""
    chosen: dict[str, list[str]] = {}
    for entry in given:
        axis, equals, labels = entry.partition("=")
        if not equals or not axis or not labels:
            raise InputError(f"--only is {entry!r}: expected AXIS=VALUE, such as method=gossip")
        chosen.setdefault(axis, []).extend(label.strip() for label in labels.split(","))
    return chosen


def _placed(cell: Cell, parsed: argparse.Namespace) -> Cell:
    """Return the combination with the device and the data of the command line."""
    settings: dict[str, Any] = {**cell.settings, "device": parsed.device}
    if find_device(parsed.device).type == "cpu":
        # The one that the full size asks for is for a GPU.
        settings.pop("gradient_backend", None)
    if parsed.data is not None and "data" in TASKS.get(settings["task"], ()):
        settings["data"] = parsed.data
    return replace(cell, settings=settings)


def _train(
    experiment: Experiment,
    size: str,
    runs: Sequence[PlannedRun],
    rows: Mapping[tuple[str, ...], Row],
    folder: Path,
    command: str,
    quiet: bool,
) -> bool:
    """Do all runs that are not complete in the folder; return whether Ctrl-C ended it."""
    # The list of experiments, without a name, needs neither torch nor matplotlib.
    from gossamer.cli.live_simulation import simulate_live
    from gossamer.virtual.compute.comparison_cache import ComparisonCache

    cache = ComparisonCache()
    todo = []
    for planned in runs:
        summary = planned.summary()
        if summary is None:
            todo.append(planned)
        else:
            rows[planned.cell.labels].summaries[planned.seed] = summary
    # Errors in the settings, such as a wrong --data, are reported before anything is trained.
    if todo:
        todo[0].resolve(cache.build_task)
    _make(folder, experiment, size, command)
    if not quiet:
        done = len(runs) - len(todo)
        before = f"; {done} of {len(runs)} were complete" if done else ""
        print(f"{experiment.name}: {counted(len(todo), 'run')} to do{before}", file=sys.stderr)
    for number, planned in enumerate(todo, 1):
        if planned.remove_incomplete() and not quiet:
            print(f"{experiment.name}: {planned.path} was not complete: run again", file=sys.stderr)
        name = f"[{number}/{len(todo)}] {', '.join(planned.cell.labels)}, seed {planned.seed}"
        try:
            resolved = planned.resolve(cache.build_task)
            result = simulate_live(resolved, planned.path, command, name, quiet=quiet, cache=cache)
        except KeyboardInterrupt:
            return True
        if result.interrupted:
            return True
        summary = planned.summary()
        assert summary is not None
        rows[planned.cell.labels].summaries[planned.seed] = summary
    return False


def _make(folder: Path, experiment: Experiment, size: str, command: str) -> None:
    """Create the folder of the experiment. ``InputError`` if it has another one, or cannot be written to."""
    path = check_file(folder, experiment.name, size)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {folder} cannot be created: {error.strerror}; give another folder") from None
    write_json(path, {"experiment": experiment.name, "size": size, "command": command})


def _write(
    experiment: Experiment,
    size: str,
    rows: Sequence[Row],
    folder: Path,
    about: Mapping[str, str],
    document: Mapping[str, Any],
) -> dict[str, str]:
    """Write table and picture; return their paths by kind."""
    written = {"table": str(folder / "table.md")}
    write_json(folder / "table.json", document)
    write_text(folder / "table.md", markdown(experiment, rows, about))
    if experiment.picture:
        from gossamer.reproduce.picture import draw

        try:
            draw(experiment, size, rows, folder, folder / "picture.png")
            written["picture"] = str(folder / "picture.png")
        except InputError as error:
            written["no_picture"] = str(error)
    return written


def _show(experiment: Experiment, size: str, rows: Sequence[Row], document: Mapping[str, Any]) -> None:
    if not rows:
        return
    columns, lines = table(experiment, rows)
    print_table(f"{experiment.title} ({experiment.size_name(size)})", columns, lines)
    print()
    print_note(f"{experiment.paper}. The paper: {experiment.claim}")
    print_note(experiment.note)
    for kind in ("table", "picture"):
        if kind in document:
            print(f"{kind}: {document[kind]}")
    if "no_picture" in document:
        print(f"no picture: {document['no_picture']}")


def _machine(device: str) -> str:
    import torch

    if find_device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()}, {counted(torch.get_num_threads(), 'thread')}"


def _version() -> str:
    import gossamer

    return gossamer.__version__
