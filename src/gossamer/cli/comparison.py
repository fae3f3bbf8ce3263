"""The table that closes a comparison of methods, of virtual or real workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from gossamer.cli.output import NOTHING, figure, percent, print_note, print_table, size
from gossamer.results import Point, Spread


class Outcome(Protocol):
    """What a run came to, as far as the table shows it."""

    @property
    def method(self) -> str: ...

    @property
    def workers(self) -> int: ...

    @property
    def final(self) -> Point: ...

    @property
    def events(self) -> list[str]: ...


R = TypeVar("R", bound=Outcome)


def show_comparison(
    title: str, results: Sequence[R], time_words: str, time: Callable[[float], str], whole: Callable[[R], bool]
) -> None:
    """One row per run; ``whole``: whether it came to its end, so that its time says something."""
    first = results[0]
    rows = []
    for result in results:
        end = result.final
        rows.append(
            [
                result.method,
                time(end.time),
                f"{first.final.time / end.time:.2f}×" if whole(first) and whole(result) else NOTHING,
                f"{end.steps}",
                figure(end.loss),
                percent(end.accuracy),
                _spread(end.worker_accuracy),
                figure(end.consensus),
                f"{end.exchanges}",
                size(end.bytes_sent / result.workers),
                f"{100 * end.utilization:.0f}%",
            ]
        )
    # What the task does not have, such as an accuracy, needs no column.
    shown = [k for k in range(len(COLUMNS)) if any(row[k] != NOTHING for row in rows)]
    names = [list(COLUMNS)[k] for k in shown]
    spare = [name for name in SPARE if name in names]
    left_out = print_table(title, names, [[row[k] for k in shown] for row in rows], numbers=True, spare=spare)
    meanings = [f"{name}: {COLUMNS[name]}" for name in names if COLUMNS[name] and name not in left_out]
    not_shown = f". Not shown for want of room: {', '.join(left_out)}" if left_out else ""
    print()
    print_note("; ".join(meanings).format(time=time_words, first=first.method) + not_shown + ".")
    for result in results:
        for events in result.events:
            print(f"{result.method}: {events}")


COLUMNS = {
    "method": "",
    "time": "{time}",
    "speed": "against {first}",
    "steps": "per worker",
    "loss": "of the averaged model on the test set",
    "accuracy": "of the same",
    "workers": "accuracy of their own models",
    "consensus": "how far the models are apart",
    "exchanges": "averagings, of two workers or of many",
    "sent": "per worker",
    "busy": "share of the time not spent waiting",
}
"""The columns of the closing table, and what they mean."""

SPARE = ("exchanges", "steps", "busy", "speed", "loss", "workers")
"""What a narrow terminal can do without, the first first."""


def _spread(spread: Spread) -> str:
    if spread.min is None or spread.max is None:
        return NOTHING
    least, most = percent(spread.min), percent(spread.max)
    return least if least == most else f"{least.removesuffix('%')}–{most}"
