"""The table of ``benchmarks/peers.py``."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from peers_cases import Outcome
from peers_contenders import Contender

KILL_COLUMNS = {
    "longest step": "SIGKILL: longest step of a survivor, s",
    "return": "return: start to contribution, s",
    "longest step during return": "longest step of the others meanwhile, s",
}
SHARE_COLUMN = "one 10 times slower: share of the steps alone"

Results = dict[str, list[dict[str, Outcome]]]


def rows(contenders: Sequence[Contender], results: Results, cases: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row per contender: medians over the turns, their range, and what went wrong."""
    alone = {one.optimizer: results[one.name] for one in contenders if one.kind == "none"}
    found = []
    for contender in contenders:
        if contender.kind == "none":
            continue
        row: dict[str, Any] = {"contender": contender.label or f"`{contender.name}`"}
        turns = results[contender.name]
        if "kill" in cases:
            outcomes = [turn["kill"] for turn in turns]
            for figure, column in KILL_COLUMNS.items():
                row[column] = cell([outcome.get(figure) for outcome in outcomes], outcomes)
        if "straggler" in cases:
            shares = [share(turn, other) for turn, other in zip(turns, alone[contender.optimizer], strict=True)]
            row[SHARE_COLUMN] = cell(shares, [turn["straggler"] for turn in turns])
        found.append(row)
    return found


def share(turn: dict[str, Outcome], alone: dict[str, Outcome]) -> float | None:
    mine, theirs = (one["straggler"].get("steps per second") for one in (turn, alone))
    return mine / theirs if isinstance(mine, float) and isinstance(theirs, float) else None


def cell(figures: Sequence[float | str | None], outcomes: Sequence[Outcome]) -> str:
    """Return the median and the range of the figures there are, and how often which problem was in the way."""
    known = [figure for figure in figures if isinstance(figure, float)]
    problems = Counter(
        str(outcome.get("problem", "not measured"))
        for figure, outcome in zip(figures, outcomes, strict=True)
        if not isinstance(figure, float)
    )
    text = f"**{statistics.median(known):.2f}**" if known else ""
    if len(known) > 1:
        text += f" ({min(known):.2f} to {max(known):.2f})"
    notes = Counter(str(outcome["note"]) for outcome in outcomes if "note" in outcome)
    parts = [text] if known else []
    for said, count in (problems + notes).items():
        parts.append(said if count == len(figures) else f"{count} of {len(figures)}: {said}")
    return "; ".join(parts)
