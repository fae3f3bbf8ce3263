"""Shows a run while it trains, on standard error: one screen on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gossamer.report.formats import counted, duration, figure, percent, run_time
from gossamer.report.view import TRAINING, UNUSUAL, View, WorkerRow

SECONDS_BETWEEN_LINES = 5.0
SECONDS_BETWEEN_SCREENS = 0.2

MAX_ROWS = 16
"""Workers that have a row on the screen, if it is high enough."""

OTHER_LINES = 9
"""Lines of the screen that are not rows of workers."""

BARS = "▁▂▃▄▅▆▇█"
SPARKLINE_LENGTH = 32

STYLES = {"gone": "red", "failed": "red", "silent": "yellow", "slow": "yellow", "waiting": "dim"}


class Sparkline:
    """The course of a figure in a bounded number of means: the more values, the more of them each mean stands for."""

    def __init__(self) -> None:
        self.means: list[float] = []
        self._values_per_mean, self._sum, self._count = 1, 0.0, 0

    def add(self, value: float | None) -> None:
        if value is None or not math.isfinite(value):
            return
        self._sum, self._count = self._sum + value, self._count + 1
        if self._count == self._values_per_mean:
            self.means.append(self._sum / self._count)
            self._sum, self._count = 0.0, 0
        if len(self.means) == 2 * SPARKLINE_LENGTH:
            self.means = [(a + b) / 2 for a, b in zip(self.means[::2], self.means[1::2], strict=True)]
            self._values_per_mean *= 2

    def text(self) -> str:
        shown = self.means
        if len(shown) > SPARKLINE_LENGTH:
            shown = [shown[k * len(shown) // SPARKLINE_LENGTH] for k in range(SPARKLINE_LENGTH)]
        if not shown:
            return ""
        lowest, highest = min(shown), max(shown)
        scale = (len(BARS) - 1) / (highest - lowest) if highest > lowest else 0.0
        return "".join(BARS[round((value - lowest) * scale)] for value in shown)


class LiveView:
    def __init__(self, name: str, quiet: bool) -> None:
        self.name, self.quiet = name, quiet
        self._live: Live | None = None
        self._shown_at = 0.0
        self._pending: View | Callable[[], View] | None = None
        """The newest view, as long as it has not been shown."""
        self._train_loss, self._consensus = Sparkline(), Sparkline()
        self._accuracy: float | None = None

    def __enter__(self) -> LiveView:
        if not self.quiet and sys.stderr.isatty():
            console = Console(stderr=True, highlight=False)
            self._live = Live(console=console, auto_refresh=False, transient=True)
            self._live.start()
        # The screen appears at once; lines only if the run takes a while.
        self._shown_at = 0.0 if self._live is not None else time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pending is not None and error is None:
            self._draw(self._pending)
        if self._live is not None:
            self._live.stop()

    def show(self, view: View | Callable[[], View], events: list[str]) -> None:
        """Show the newest state and new events; a view given as a function is built only if it is shown."""
        for event in events:
            self.say(event)
        if self.quiet:
            return
        self._pending = view
        interval_s = SECONDS_BETWEEN_LINES if self._live is None else SECONDS_BETWEEN_SCREENS
        if time.monotonic() - self._shown_at >= interval_s:
            self._draw(view)

    def _draw(self, view: View | Callable[[], View]) -> None:
        self._shown_at, self._pending = time.monotonic(), None
        view = view if isinstance(view, View) else view()
        if self._live is None:
            print(f"{self.name}: {line(view)}", file=sys.stderr, flush=True)
            return
        # Most views have none: evaluations are rare.
        self._accuracy = view.accuracy if view.accuracy is not None else self._accuracy
        self._train_loss.add(view.train_loss)
        self._consensus.add(view.consensus)
        self._live.update(self._screen(view, self._live.console), refresh=True)

    def say(self, event: str) -> None:
        """Print an event above the screen, or as a line."""
        if self._live is not None:
            self._live.console.print(f"{self.name}: {event}", markup=False)
        elif not self.quiet:
            print(f"{self.name}: {event}", file=sys.stderr, flush=True)

    def _screen(self, view: View, console: Console) -> RenderableType:
        head = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=1.0, completed=view.share, width=max(8, min(32, console.width - 48)))
        now = run_time(view.time, view.time_unit)
        head.add_row(Text(self.name, style="bold"), bar, f"{100 * view.share:.0f}%", now, time_left(view))
        curves = Table.grid(padding=(0, 2))
        for name, value, sparkline in (
            ("train loss", view.train_loss, self._train_loss),
            ("consensus", view.consensus, self._consensus),
        ):
            if value is not None:
                curves.add_row(name, figure(value), "" if console.options.ascii_only else sparkline.text())
        if self._accuracy is not None:
            curves.add_row("accuracy", percent(self._accuracy), "")
        if view.worker_accuracy is not None:
            curves.add_row("workers", percent(view.worker_accuracy), "mean accuracy of their own models")
        return Group(head, curves, *_workers(view, max(3, min(MAX_ROWS, console.height - OTHER_LINES))))


def line(view: View) -> str:
    if view.rows and all(row.state == "starting" for row in view.rows):
        return f"{counted(len(view.rows), 'worker')} starting"
    parts = [f"{100 * view.share:.0f}%", f"time {run_time(view.time, view.time_unit)}"]
    if view.train_loss is not None:
        parts.append(f"train loss {view.train_loss:.3g}")
    if view.accuracy is not None:
        parts.append(f"accuracy {percent(view.accuracy)}")
    if view.worker_accuracy is not None:
        parts.append(f"workers' accuracy {percent(view.worker_accuracy)}")
    if view.consensus is not None:
        parts.append(f"consensus {view.consensus:.2g}")
    parts += [f"worker {row.rank} {row.state}" for row in view.rows if row.state in UNUSUAL][:4]
    return "  ".join([*parts, *filter(None, [time_left(view)])])


def time_left(view: View) -> str:
    """``60 s left``; empty if there is no estimate."""
    if view.left_s is None or view.share >= 1:
        return ""
    return f"{round(view.left_s)} s left" if view.left_s < 120 else f"{duration(view.left_s)} left"


def _workers(view: View, max_rows: int) -> list[RenderableType]:
    """A row for each worker; of many workers, for those in unusual states and the slowest."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    unit = "s" if view.time_unit == "s" else "unit"
    with_loss = any(row.train_loss is not None for row in view.rows)
    for column in ("worker", "steps", f"steps/{unit}", *(("train loss",) if with_loss else ()), "exchanges"):
        table.add_column(column, justify="right")
    table.add_column("")
    rows = view.rows if len(view.rows) <= max_rows else most_notable(view.rows, max_rows - 1)
    for row in rows:
        loss = (figure(row.train_loss),) if with_loss else ()
        state = "" if row.state == TRAINING else row.state
        cells = (str(row.rank), str(row.steps), f"{row.speed:.3g}", *loss, str(row.exchanges), state)
        table.add_row(*cells, style=STYLES.get(row.state, ""))
    shown = {row.rank for row in rows}
    others = [row for row in view.rows if row.rank not in shown]
    if not others:
        return [table]
    speeds, exchanges = [row.speed for row in others], [row.exchanges for row in others]
    total = f"{len(others)} more: {min(speeds):.3g}–{max(speeds):.3g} steps/{unit}, {sum(exchanges)} exchanges"
    return [table, Text(total, style="dim")]


def most_notable(rows: list[WorkerRow], max_rows: int) -> list[WorkerRow]:
    """Choose workers in unusual states first, then the slowest; return them in the order of their ranks."""
    chosen = sorted(rows, key=lambda row: (row.state not in UNUSUAL, row.steps))[:max_rows]
    return sorted(chosen, key=lambda row: row.rank)
