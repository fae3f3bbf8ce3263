"""What a person sees: tables, and how far a run is."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

PLAIN_WIDTH = 160
"""Columns of a table that does not go to a terminal."""

SECONDS_BETWEEN_LINES = 5.0


def print_table(title: str, columns: list[str], rows: list[list[str]], numbers: bool = False) -> None:
    """A table on standard output; without escape codes if that is not a terminal."""
    terminal = sys.stdout.isatty()
    table = Table(title=title or None, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    for position, column in enumerate(columns):
        table.add_column(column, justify="right" if numbers and position else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(width=None if terminal else PLAIN_WIDTH, highlight=False).print(table)


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
    return "–" if share is None else f"{100 * share:.1f}%"


def figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


class Progressing:
    """How far a run is: a live line on a terminal, a plain line now and then elsewhere. On standard error."""

    def __init__(self, name: str, total: float, quiet: bool = False) -> None:
        self.name, self.total, self.quiet = name, total, quiet
        self._live: Progress | None = None
        self._said = 0.0

    def __enter__(self) -> Progressing:
        if not self.quiet and sys.stderr.isatty():
            self._live = Progress(
                TextColumn("{task.description:10}"),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f}%"),
                TextColumn("{task.fields[line]}"),
                TimeRemainingColumn(compact=True),
                console=Console(stderr=True, highlight=False),
            )
            self._task = self._live.add_task(self.name, total=self.total, line="")
            self._live.start()
        self._said = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def at(self, done: float, line: str, news: list[str]) -> None:
        """The run is this far."""
        for item in news:
            self.say(item)
        if self._live is not None:
            self._live.update(self._task, completed=done, line=line)
        elif not self.quiet and (time.monotonic() - self._said >= SECONDS_BETWEEN_LINES or done >= self.total):
            self._said = time.monotonic()
            print(f"{self.name}: {100 * done / self.total:.0f}%  {line}", file=sys.stderr, flush=True)

    def say(self, news: str) -> None:
        """Something happened that the person should know."""
        if self._live is not None:
            self._live.console.print(f"{self.name}: {news}")
        elif not self.quiet:
            print(f"{self.name}: {news}", file=sys.stderr, flush=True)
