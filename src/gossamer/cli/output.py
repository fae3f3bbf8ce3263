"""What the commands print: JSON documents, tables and notes."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, Literal

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from gossamer.results import to_json_data

WIDTH_WITHOUT_TERMINAL = 160
"""Columns of a table that does not go to a terminal."""

GAP = 2
"""Spaces between two columns of a table."""


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
