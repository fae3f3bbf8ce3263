"""Results as markdown."""

from __future__ import annotations

from typing import Any


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as a markdown table."""
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    lines += ["| " + " | ".join(shown(value) for value in row.values()) + " |" for row in rows]
    return "\n".join(lines)


def shown(value: Any) -> str:
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value < 10 else f"{value:.1f}"
