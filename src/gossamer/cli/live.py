"""A run while it goes on: one calm screen on a terminal, plain lines elsewhere. On standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gossamer.cli.output import counted, duration, figure, percent
from gossamer.report.view import TRAINING, UNUSUAL, View, WorkerRow

SECONDS_BETWEEN_LINES = 5.0
SECONDS_BETWEEN_SCREENS = 0.2

MOST_ROWS = 16
"""Workers that have a row of their own on the screen, if it is high enough."""

OTHER_LINES = 9
"""Lines of the screen that are not workers."""

BARS = "▁▂▃▄▅▆▇█"
SPARKS = 32
"""Letters of a sparkline."""

STYLES = {"gone": "red", "failed": "red", "silent": "yellow", "slow": "yellow", "waiting": "dim"}


class Course:
    """How a figure went, in a bounded number of values: the more there were, the more of them each stands for."""

    def __init__(self) -> None:
        self.means: list[float] = []
        self._each, self._sum, self._count = 1, 0.0, 0

    def add(self, value: float | None) -> None:
        if value is None or value != value or value in (float("inf"), float("-inf")):
            return
        self._sum, self._count = self._sum + value, self._count + 1
        if self._count == self._each:
            self.means.append(self._sum / self._count)
            self._sum, self._count = 0.0, 0
        if len(self.means) == 2 * SPARKS:
            self.means = [(a + b) / 2 for a, b in zip(self.means[::2], self.means[1::2], strict=True)]
            self._each *= 2

    def spark(self) -> str:
        """The course as a line of bars."""
        shown = self.means if len(self.means) <= SPARKS else self.means[-SPARKS:]
        if len(self.means) > SPARKS:
            at = [k * len(self.means) // SPARKS for k in range(SPARKS)]
            shown = [self.means[k] for k in at]
        if not shown:
            return ""
        least, most = min(shown), max(shown)
        scale = (len(BARS) - 1) / (most - least) if most > least else 0.0
        return "".join(BARS[round((value - least) * scale)] for value in shown)


class LiveView:
    """Shows one run of one method."""

    def __init__(self, name: str, quiet: bool) -> None:
        self.name, self.quiet = name, quiet
        self._live: Live | None = None
        self._shown = 0.0
        self._newest: View | Callable[[], View] | None = None
        """What has not been shown yet."""
        self._loss, self._consensus = Course(), Course()
        self._accuracy: float | None = None

    def __enter__(self) -> LiveView:
        if not self.quiet and sys.stderr.isatty():
            console = Console(stderr=True, highlight=False)
            self._live = Live(console=console, auto_refresh=False, transient=True)
            self._live.start()
        # A screen at once; lines only where it takes a while.
        self._shown = 0.0 if self._live is not None else time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._newest is not None and error is None:
            self._draw(self._newest)
        if self._live is not None:
            self._live.stop()

    def show(self, view: View | Callable[[], View], events: list[str]) -> None:
        """The run is this far, and this is new; the view is made only when it is shown."""
        for item in events:
            self.say(item)
        if self.quiet:
            return
        self._newest = view
        between = SECONDS_BETWEEN_LINES if self._live is None else SECONDS_BETWEEN_SCREENS
        if time.monotonic() - self._shown >= between:
            self._draw(view)

    def _draw(self, view: View | Callable[[], View]) -> None:
        self._shown, self._newest = time.monotonic(), None
        made = view if isinstance(view, View) else view()
        if self._live is None:
            print(f"{self.name}: {line(made)}", file=sys.stderr, flush=True)
            return
        # Taken only now and then.
        self._accuracy = made.accuracy if made.accuracy is not None else self._accuracy
        self._loss.add(made.train_loss)
        self._consensus.add(made.consensus)
        self._live.update(self._screen(made, self._live.console), refresh=True)

    def say(self, events: str) -> None:
        """Something happened that the person should know."""
        if self._live is not None:
            self._live.console.print(f"{self.name}: {events}", markup=False)
        elif not self.quiet:
            print(f"{self.name}: {events}", file=sys.stderr, flush=True)

    def _screen(self, view: View, console: Console) -> RenderableType:
        head = Table.grid(padding=(0, 2))
        left = f"{_rounded(view.left_s)} left" if view.left_s is not None and view.share < 1 else ""
        bar = ProgressBar(total=1.0, completed=view.share, width=max(8, min(32, console.width - 48)))
        head.add_row(Text(self.name, style="bold"), bar, f"{100 * view.share:.0f}%", moment(view), left)
        curves = Table.grid(padding=(0, 2))
        for name, value, course in (
            ("loss", view.train_loss, self._loss),
            ("consensus", view.consensus, self._consensus),
        ):
            if value is not None:
                curves.add_row(name, figure(value), "" if console.options.ascii_only else course.spark())
        if self._accuracy is not None:
            curves.add_row("accuracy", percent(self._accuracy), "")
        return Group(head, curves, *_workers(view, max(3, min(MOST_ROWS, console.height - OTHER_LINES))))


def line(view: View) -> str:
    """How far the run is, in one plain line."""
    if view.rows and all(row.state == "starting" for row in view.rows):
        return f"{counted(len(view.rows), 'worker')} starting"
    parts = [f"{100 * view.share:.0f}%", f"time {moment(view)}"]
    if view.train_loss is not None:
        parts.append(f"loss {view.train_loss:.3g}")
    if view.accuracy is not None:
        parts.append(f"accuracy {percent(view.accuracy)}")
    if view.consensus is not None:
        parts.append(f"consensus {view.consensus:.2g}")
    parts += [f"worker {row.rank} {row.state}" for row in view.rows if row.state in UNUSUAL][:4]
    if view.left_s is not None and view.share < 1:
        parts.append(f"{_rounded(view.left_s)} left")
    return "  ".join(parts)


def moment(view: View) -> str:
    return duration(view.time) if view.time_unit == "s" else f"{view.time:.4g}"


def _rounded(seconds: float) -> str:
    return f"{round(seconds)} s" if seconds < 120 else duration(seconds)


def _workers(view: View, most: int) -> list[RenderableType]:
    """A row for each worker; where they are many, for those that have something to say and the slowest."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    unit = "s" if view.time_unit == "s" else "unit"
    with_loss = any(row.loss is not None for row in view.rows)
    for column in ("worker", "steps", f"steps/{unit}", *(("loss",) if with_loss else ()), "exchanges"):
        table.add_column(column, justify="right")
    table.add_column("")
    rows = view.rows if len(view.rows) <= most else most_telling(view.rows, most - 1)
    for row in rows:
        loss = (figure(row.loss),) if with_loss else ()
        said = "" if row.state == TRAINING else row.state
        cells = (str(row.rank), str(row.steps), f"{row.speed:.3g}", *loss, str(row.exchanges), said)
        table.add_row(*cells, style=STYLES.get(row.state, ""))
    shown = {row.rank for row in rows}
    others = [row for row in view.rows if row.rank not in shown]
    if not others:
        return [table]
    speeds, exchanges = [row.speed for row in others], [row.exchanges for row in others]
    summed = f"{len(others)} more: {min(speeds):.3g}–{max(speeds):.3g} steps/{unit}, {sum(exchanges)} exchanges"
    return [table, Text(summed, style="dim")]


def most_telling(rows: list[WorkerRow], most: int) -> list[WorkerRow]:
    """Those with something to say first, then the slowest, in the order of their ranks."""
    chosen = sorted(rows, key=lambda row: (row.state not in UNUSUAL, row.steps))[:most]
    return sorted(chosen, key=lambda row: row.rank)
