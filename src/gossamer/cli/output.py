"""What a person sees: tables, and how far a run is."""

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

PLAIN_WIDTH = 160
"""Columns of a table that does not go to a terminal."""

NOTHING = "–"
"""What stands in a table where there is no figure."""

GAP = 2
"""Spaces between two columns of a table."""


def print_json(document: Any) -> None:
    """One JSON document on standard output."""
    print(json.dumps(to_json_data(document), indent=1, allow_nan=False))


def print_table(
    title: str, columns: list[str], rows: list[list[str]], numbers: bool = False, spare: Sequence[str] = ()
) -> list[str]:
    """A table on standard output; without escape codes if that is not a terminal.

    Where it is too wide, the columns named in ``spare`` are left out, the first of them first; returns those.
    """
    terminal = sys.stdout.isatty()
    console = Console(width=None if terminal else PLAIN_WIDTH, highlight=False)
    kept, left_out = _fitting(columns, rows, console.width, spare)
    table = Table(
        title=title or None,
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, GAP - 1, 0, 0),
        title_justify="left",
        title_style="bold",
    )
    for position in kept:
        justify: Literal["left", "right"] = "right" if numbers and position else "left"
        table.add_column(columns[position], justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*(row[position] for position in kept))
    with console.capture() as capture:
        console.print(table)
    print("\n".join(line.rstrip() for line in capture.get().rstrip().splitlines()))
    return left_out


def _fitting(
    columns: list[str], rows: list[list[str]], width: int, spare: Sequence[str]
) -> tuple[list[int], list[str]]:
    """The positions of the columns that fit beside each other, and the names of those left out."""
    needed = [max(map(cell_len, cells)) for cells in zip(columns, *rows, strict=True)]
    kept, left_out = list(range(len(columns))), []
    for name in spare:
        if sum(needed[position] + GAP for position in kept) - 1 <= width:
            break
        kept.remove(columns.index(name))
        left_out.append(name)
    return kept, left_out


def print_note(text: str) -> None:
    """A paragraph on standard output, as wide as the terminal."""
    width = Console().width if sys.stdout.isatty() else PLAIN_WIDTH
    print(textwrap.fill(text, min(width, 110)))


def counted(count: int, thing: str) -> str:
    """``1 worker``, ``2 workers``."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def duration(seconds: float) -> str:
    """Seconds as a person says them."""
    if seconds < 120:
        return f"{seconds:.3g} s" if seconds < 10 else f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def size(num_bytes: float) -> str:
    """Bytes as a person says them."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"


def percent(share: float | None) -> str:
    return NOTHING if share is None else f"{100 * share:.1f}%"


def figure(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.3g}"
