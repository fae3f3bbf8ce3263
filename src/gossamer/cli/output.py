"""What the commands print: JSON documents, tables, notes, and the table that closes a comparison of methods."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from gossamer.report.formats import NOTHING
from gossamer.report.summary import COLUMNS, cells, speedup, time_meaning
from gossamer.results import to_json_data

if TYPE_CHECKING:
    from gossamer.runs.monitor import TrainingResult
    from gossamer.virtual.simulation import SimulationResult

WIDTH_WITHOUT_TERMINAL = 160
"""Columns of a table that does not go to a terminal."""

GAP = 2
"""Spaces between two columns of a table."""

OPTIONAL = ("exchanges", "steps", "busy", "speed-up", "loss", "workers")
"""Columns that a narrow terminal leaves out, in this order."""

R = TypeVar("R", "SimulationResult", "TrainingResult")


def print_json(document: Any) -> None:
    print(json.dumps(to_json_data(document), indent=1, allow_nan=False))


def print_table(
    title: str, columns: list[str], rows: list[list[str]], numbers: bool = False, optional: Sequence[str] = ()
) -> list[str]:
    """Print a table on standard output, without escape codes if that is not a terminal.

    If it is too wide, leave out columns named in ``optional``, in that order. Return the names of those left out.
    """
    console = Console(width=None if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL, highlight=False)
    positions, left_out = _fitting(columns, rows, console.width, optional)
    table = Table(
        title=title or None,
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, GAP - 1, 0, 0),
        title_justify="left",
        title_style="bold",
    )
    for position in positions:
        justify: Literal["left", "right"] = "right" if numbers and position else "left"
        table.add_column(columns[position], justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*(row[position] for position in positions))
    with console.capture() as capture:
        console.print(table)
    print("\n".join(line.rstrip() for line in capture.get().rstrip().splitlines()))
    return left_out


def _fitting(
    columns: list[str], rows: list[list[str]], width: int, optional: Sequence[str]
) -> tuple[list[int], list[str]]:
    """Return the positions of the columns that fit into ``width``, and the names of those left out."""
    widths = [max(map(cell_len, cells)) for cells in zip(columns, *rows, strict=True)]
    positions, left_out = list(range(len(columns))), []
    for name in optional:
        if sum(widths[position] + GAP for position in positions) - 1 <= width:
            break
        positions.remove(columns.index(name))
        left_out.append(name)
    return positions, left_out


def print_note(text: str) -> None:
    """Print a paragraph on standard output, wrapped to the width of the terminal."""
    width = Console().width if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL
    print(textwrap.fill(text, min(width, 110)))


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
