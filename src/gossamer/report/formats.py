"""Numbers as people read them, the same in the terminal's tables and on the page."""

from __future__ import annotations

NOTHING = "–"
"""A cell of a table without a value."""


def counted(count: int, thing: str) -> str:
    """``1 worker``, ``2 workers``."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def duration(seconds: float) -> str:
    """Seconds, minutes or hours."""
    if seconds < 120:
        return f"{seconds:.3g} s" if seconds < 10 else f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def run_time(time: float | None, unit: str) -> str:
    """A time of a run: with its unit if that is seconds, else a bare number of gradients per worker."""
    if time is None:
        return NOTHING
    return duration(time) if unit == "s" else f"{time:.4g}"


def size(num_bytes: float | None) -> str:
    """Bytes with a decimal prefix."""
    if num_bytes is None:
        return NOTHING
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"


def percent(share: float | None, digits: int = 1) -> str:
    return NOTHING if share is None else f"{100 * share:.{digits}f}%"


def figure(value: float | None) -> str:
    """Three significant digits."""
    return NOTHING if value is None else f"{value:.3g}"
