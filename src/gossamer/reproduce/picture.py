"""The picture of an experiment: a measure over an axis, or over the time of the runs. Needs matplotlib."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from gossamer.reproduce.experiment import FULL, Experiment
from gossamer.reproduce.folder import planned_runs
from gossamer.reproduce.measures import MEASURES
from gossamer.reproduce.table import Row
from gossamer.runs.run_folder import read_history
from gossamer.topology.draw import ROUND_COLOURS, TEXT_COLOUR, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LABEL_HEIGHT = 0.45
"""Inches per label of an axis with names."""


@dataclass
class Series:
    """What one colour shows: a combination of the other axes."""

    x: list[float] = field(default_factory=list)
    y: list[float] = field(default_factory=list)
    ranges: list[tuple[float, float]] = field(default_factory=list)
    """Over the seeds."""
    published: list[tuple[float, float]] = field(default_factory=list)


def draw(experiment: Experiment, size: str, rows: Sequence[Row], folder: Path, path: Path) -> None:
    """Draw the runs in ``folder`` to ``path``.

    Over time and over numbers: lines. Over names: a line of the picture for each name, so that long ones fit.
    """
    x, y = experiment.picture["x"], experiment.picture["y"]
    position = experiment.axis_names.index(x) if x != "time" else -1
    labels = list(dict.fromkeys(row.cell.labels[position] for row in rows)) if x != "time" else []
    has_names = bool(labels) and not all(label.replace(".", "", 1).isdigit() for label in labels)
    figure = new_figure(path, (7.5, 1.6 + LABEL_HEIGHT * len(labels) if has_names else 4.8))
    axes = figure.add_subplot()
    if x == "time":
        series = {", ".join(row.cell.labels): _over_time(row, folder, y) for row in rows if row.summaries}
    else:
        # The reduced size trains another task than the paper.
        series = _over_axis(rows, position, labels, y, with_published=size == FULL or experiment.is_planned)
    for number, (name, each) in enumerate(series.items()):
        colour = ROUND_COLOURS[number % len(ROUND_COLOURS)]
        (_draw_dots if has_names else _draw_line)(axes, name, each, colour, is_time=x == "time")
    measured, other = (axes.set_xlabel, axes.set_ylabel) if has_names else (axes.set_ylabel, axes.set_xlabel)
    measured(MEASURES[y].title, color=TEXT_COLOUR)
    if has_names:
        axes.set_yticks(range(len(labels)), labels)
        axes.invert_yaxis()
    else:
        other(x, color=TEXT_COLOUR)
        if labels:
            axes.set_xticks(range(len(labels)), labels)
        if y == "consensus":
            axes.set_yscale("log")
    axes.set_title(f"{experiment.title}\n({experiment.size_name(size)})", fontsize=11, color=TEXT_COLOUR)
    axes.grid(color="#e3e8ee", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if len(series) > 1 or any(each.published for each in series.values()):
        axes.legend(frameon=False, fontsize=8)
    save_figure(figure, path, dpi=150)


def _draw_line(axes: Axes, name: str, series: Series, colour: str, is_time: bool) -> None:
    axes.plot(series.x, series.y, label=name, color=colour, marker="" if is_time else "o", markersize=4, linewidth=1.6)
    for x, (low, high) in zip(series.x, series.ranges, strict=False):
        axes.plot([x, x], [low, high], color=colour, linewidth=1)
    if series.published:
        xs, ys = zip(*series.published, strict=True)
        axes.scatter(xs, ys, marker="x", color=colour, zorder=3, label=f"paper: {name}")


def _draw_dots(axes: Axes, name: str, series: Series, colour: str, is_time: bool) -> None:
    axes.scatter(series.y, series.x, label=name, color=colour, s=28, zorder=3)
    for x, (low, high) in zip(series.x, series.ranges, strict=True):
        axes.plot([low, high], [x, x], color=colour, linewidth=1.2)
    if series.published:
        xs, ys = zip(*series.published, strict=True)
        axes.scatter(ys, xs, marker="x", color=colour, zorder=4, label=f"paper: {name}")


def _over_axis(
    rows: Sequence[Row], position: int, labels: Sequence[str], measure: str, with_published: bool
) -> dict[str, Series]:
    found: dict[str, Series] = {}
    for row in rows:
        values = row.values(measure)
        others = [label for index, label in enumerate(row.cell.labels) if index != position]
        series = found.setdefault(", ".join(others) or "ours", Series())
        x = float(labels.index(row.cell.labels[position]))
        if values:
            series.x.append(x)
            series.y.append(statistics.mean(values))
            series.ranges.append((min(values), max(values)))
        if with_published and measure in row.cell.published:
            series.published.append((x, row.cell.published[measure]))
    return found


def _over_time(row: Row, folder: Path, measure: str) -> Series:
    """Return the mean over the seeds of a measure at each point of the runs' history."""
    histories = [read_history(run.path) for run in planned_runs(folder, [row.cell], sorted(row.summaries))]
    series = Series()
    for points in zip(*histories, strict=False):
        values = [MEASURES[measure].value(point) for point in points]
        known = [value for value in values if value is not None]
        # A consensus distance of 0, at the start, has no place on a logarithmic axis.
        if known and statistics.mean(known) > 0:
            series.x.append(statistics.mean(point["time"] for point in points))
            series.y.append(statistics.mean(known))
    return series
