"""A run of real workers while it goes on: one calm screen on a terminal, plain lines elsewhere. On standard error."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gossamer.cli.output import SECONDS_BETWEEN_LINES, duration, figure
from gossamer.train.watching import Row, View

MOST_ROWS = 16
"""Workers that have a row of their own on the screen."""

UNUSUAL = ("slow", "silent", "gone", "failed")


class LiveView:
    """Shows one run of one method."""

    def __init__(self, name: str, quiet: bool) -> None:
        self.name, self.quiet = name, quiet
        self._live: Live | None = None
        self._said = 0.0

    def __enter__(self) -> LiveView:
        if not self.quiet and sys.stderr.isatty():
            console = Console(stderr=True, highlight=False)
            self._live = Live(console=console, refresh_per_second=5, transient=True)
            self._live.start()
        self._said = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, view: View, news: list[str]) -> None:
        """The run is this far, and this is new."""
        for item in news:
            self.say(item)
        if self._live is not None:
            self._live.update(screen(self.name, view))
        elif not self.quiet and time.monotonic() - self._said >= SECONDS_BETWEEN_LINES:
            self._said = time.monotonic()
            print(f"{self.name}: {_line(view)}", file=sys.stderr, flush=True)

    def say(self, news: str) -> None:
        """Something happened that the person should know."""
        if self._live is not None:
            self._live.console.print(f"{self.name}: {news}")
        elif not self.quiet:
            print(f"{self.name}: {news}", file=sys.stderr, flush=True)


def _share(view: View) -> float:
    return min(1.0, view.total_steps / view.goal)


def _left(view: View) -> str:
    """How long it will take from here, if that can be said."""
    if not view.total_steps or not view.time:
        return ""
    left = round(view.time * (1 / _share(view) - 1))
    return f"{left} s left" if left < 120 else f"{duration(left)} left"


def _line(view: View) -> str:
    parts = [f"{100 * _share(view):.0f}%", f"time {duration(view.time)}"]
    if view.train_loss is not None:
        parts.append(f"loss {view.train_loss:.3g}")
    parts += [f"worker {row.rank} {row.state}" for row in view.rows if row.state in UNUSUAL][:4]
    if not view.total_steps:
        parts = [f"{sum(row.state == 'starting' for row in view.rows)} workers starting"]
    return "  ".join([*parts, _left(view)]).rstrip()


def screen(name: str, view: View) -> Group:
    """What a terminal shows."""
    head = Table.grid(padding=(0, 2))
    loss = f"loss {view.train_loss:.3g}" if view.train_loss is not None else ""
    head.add_row(
        Text(name, style="bold"),
        ProgressBar(total=1.0, completed=_share(view), width=24),
        f"{100 * _share(view):.0f}%",
        duration(view.time),
        loss,
        _left(view),
    )
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("worker", "steps", "steps/s", "loss", "exchanges"):
        table.add_column(column, justify="right")
    table.add_column("")
    rows = view.rows if len(view.rows) <= MOST_ROWS else _most_telling(view.rows)
    for row in rows:
        style = {"gone": "red", "failed": "red", "silent": "yellow", "slow": "yellow"}.get(row.state, "")
        said = "" if row.state == "training" else row.state
        table.add_row(
            *(str(row.rank), str(row.steps), f"{row.speed:.1f}", figure(row.loss), str(row.exchanges), said),
            style=style,
        )
    more = [Text(f"… and {len(view.rows) - len(rows)} more", style="dim")] if len(rows) < len(view.rows) else []
    return Group(head, table, *more)


def _most_telling(rows: list[Row]) -> list[Row]:
    """Those with something to say first, then the slowest, in the order of their ranks."""
    chosen = sorted(rows, key=lambda row: (row.state not in UNUSUAL, row.steps))[:MOST_ROWS]
    return sorted(chosen, key=lambda row: row.rank)
