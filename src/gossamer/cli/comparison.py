"""The table that closes a comparison of methods, of virtual or real workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, TypeVar

from gossamer.cli.output import print_note, print_table
from gossamer.report.formats import NOTHING
from gossamer.report.summary import COLUMNS, cells, speedup, time_meaning
from gossamer.results import to_json_data

if TYPE_CHECKING:
    from gossamer.train.monitor import TrainingResult
    from gossamer.virtual.simulation import SimulationResult

OPTIONAL = ("exchanges", "steps", "busy", "speed-up", "loss", "workers")
"""Columns that a narrow terminal leaves out, in this order."""


R = TypeVar("R", "SimulationResult", "TrainingResult")


def show_comparison(
    title: str, results: Sequence[R], *, world: str, time_unit: str, has_speed: Callable[[R], bool]
) -> None:
    """Print one row per run. ``has_speed``: False for a run that diverged or failed, whose pace says nothing."""
    first = results[0]
    points = [to_json_data(asdict(result.final)) for result in results]
    rows = []
    for result, final in zip(results, points, strict=True):
        is_comparable = len(results) > 1 and has_speed(first) and has_speed(result)
        against_first = speedup(points[0], final) if is_comparable else None
        rows.append({"method": result.method, **cells(final, time_unit, against_first)})
    # A task without an accuracy needs no column for it.
    columns = [name for name in rows[0] if any(row[name] != NOTHING for row in rows)]
    optional = [name for name in OPTIONAL if name in columns]
    table = [[row[name] for name in columns] for row in rows]
    left_out = print_table(title, columns, table, numbers=True, optional=optional)
    clock = time_meaning({world}, {time_unit})
    meanings = [
        f"{name}: {COLUMNS[name].format(time=clock, first=first.method)}"
        for name in columns
        if name in COLUMNS and name not in left_out
    ]
    not_shown = f". Not shown, the terminal is too narrow: {', '.join(left_out)}" if left_out else ""
    print()
    print_note("; ".join(meanings) + not_shown + ".")
    for result in results:
        for event in result.events:
            print(f"{result.method}: {event}")
