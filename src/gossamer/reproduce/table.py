"""The table of an experiment: a row per combination, ours as means over the seeds beside what the paper reports."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gossamer.report.formats import NOTHING
from gossamer.reproduce.experiment import Cell, Experiment
from gossamer.reproduce.measures import BASELINE, MEASURES, SPEEDUP, Summary, step_ms


@dataclass
class Row:
    cell: Cell
    summaries: dict[int, Summary] = field(default_factory=dict)
    """Of its complete runs, by seed."""

    def values(self, measure: str) -> list[float]:
        found = [MEASURES[measure].value(summary) for summary in self.summaries.values() if not diverged(summary)]
        return [value for value in found if value is not None]

    @property
    def num_diverged(self) -> int:
        return sum(map(diverged, self.summaries.values()))

    def document(self, axis_names: Sequence[str], measures: Sequence[str]) -> dict[str, Any]:
        return {
            **dict(zip(axis_names, self.cell.labels, strict=True)),
            "seeds": sorted(self.summaries),
            "diverged": self.num_diverged,
            "ours": {measure: self.values(measure) for measure in measures},
            "published": dict(self.cell.published),
        }


def diverged(summary: Summary) -> bool:
    return "diverged" in summary


def add_speedups(rows: Sequence[Row], axis_names: Sequence[str]) -> None:
    """Add to the figures of every run how many times as fast it is as that of ``BASELINE`` with the same seed."""
    if "method" not in axis_names:
        return
    position = axis_names.index("method")

    def others(row: Row) -> tuple[str, ...]:
        return row.cell.labels[:position] + row.cell.labels[position + 1 :]

    baselines = {others(row): row.summaries for row in rows if row.cell.labels[position] == BASELINE}
    for row in rows:
        compared = baselines.get(others(row), {})
        for seed, summary in row.summaries.items():
            ours, theirs = step_ms(summary), step_ms(compared[seed]) if seed in compared else None
            if ours and theirs:
                row.summaries[seed] = {**summary, SPEEDUP: theirs / ours}


def cell_text(measure: str, values: Sequence[float]) -> str:
    """The mean over the seeds, with the range if there are several."""
    if not values:
        return NOTHING
    text = MEASURES[measure].text
    mean = text(statistics.mean(values))
    low, high = text(min(values)), text(max(values))
    return mean if low == high else f"{mean} ({low} to {high})"


def table(experiment: Experiment, rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Return the columns and the rows of the table, as text."""
    columns = list(experiment.axis_names)
    reported = [measure for measure in experiment.measures if any(measure in row.cell.published for row in rows)]
    for measure in experiment.measures:
        columns.append(MEASURES[measure].title)
        if measure in reported:
            columns.append(f"paper: {MEASURES[measure].title}")
    if not experiment.is_planned:
        columns.append("seeds")
    lines = []
    for row in rows:
        cells = list(row.cell.labels)
        for measure in experiment.measures:
            cells.append(cell_text(measure, row.values(measure)))
            if measure in reported:
                published = row.cell.published.get(measure)
                cells.append(NOTHING if published is None else f"{published:g}")
        if not experiment.is_planned:
            num_diverged = row.num_diverged
            cells.append(f"{len(row.summaries)}" + (f", {num_diverged} diverged" if num_diverged else ""))
        lines.append(cells)
    return columns, lines


def markdown(experiment: Experiment, rows: Sequence[Row], about: Mapping[str, str]) -> str:
    """Return the experiment as a page: what was done, the table, where it comes from."""
    columns, lines = table(experiment, rows)
    text = [f"# {experiment.title}", "", f"{experiment.paper}. The paper: {experiment.claim}", "", experiment.note, ""]
    for cells in (columns, ["---"] * len(columns), *lines):
        text.append("| " + " | ".join(cells) + " |")
    text += ["", *(f"- {name}: {value}" for name, value in about.items()), ""]
    return "\n".join(text)
