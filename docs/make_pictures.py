"""Draw the pictures of the docs from runs of the virtual cluster, in a minute: ``python docs/make_pictures.py``."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import gossamer
from gossamer.cli import main as command
from gossamer.topology import build
from gossamer.topology.draw import curve, positions

IMAGES = Path(__file__).parent / "images"

# Readable on white and on black.
INK, COMPUTE, WAIT, EXCHANGE = "#788088", "#17a398", "#a0a8b080", "#e8871e"
STYLE = {
    "svg.hashsalt": "gossamer",
    "svg.fonttype": "none",
    "font.size": 11,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
}

TIMELINES = {
    "a2cid2": ["--straggler", "3:3", "--link", "10mbit/1ms"],
    "overlap": ["--link", "5mbit/1ms", "--compute", "lognormal:50ms,0.2"],
    "lasgd": ["--straggler", "3:3", "--link", "5mbit/1ms"],
    "divisible": ["--link", "2mbit/1ms"],
}
METHOD_OPTIONS = {"divisible": ["--warmup", "1", "--period", "8"]}
"""Options that allreduce does not have."""
TITLES = {
    "a2cid2": "a2cid2: no worker waits",
    "overlap": "overlap: communication runs during the next gradient",
    "lasgd": "lasgd: no worker waits, all-reduce runs in the background",
    "divisible": "divisible: short messages between steps, a long one in the background",
}
UNTIL_S = 1.0
GALLERY = ("ring", "path", "star", "torus", "hypercube", "exponential", "random-regular", "complete")


def trace(*options: str) -> list[dict[str, Any]]:
    """Return the trace events of a run of four workers on digits."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        file = Path(folder) / "trace.json"
        code = command(
            ["simulate", "--task", "digits", "--workers", "4", "--steps", "25", "--trace", str(file), *options]
        )
        assert code == 0
        return json.loads(file.read_text())["traceEvents"]


def spans(events: list[dict[str, Any]], name: str, rank: int) -> list[tuple[float, float]]:
    """Return start and duration of a worker's events of this name in the time that is drawn, in seconds."""
    ranks = {event["pid"]: int(event["args"]["name"].split()[1]) for event in events if event["name"] == "process_name"}
    return [
        (event["ts"] / 1e6, event["dur"] / 1e6)
        for event in events
        if event["ph"] == "X" and event["name"] == name and ranks[event["pid"]] == rank and event["ts"] < UNTIL_S * 1e6
    ]


def draw_timeline(axes: Axes, title: str, events: list[dict[str, Any]]) -> None:
    for rank in range(4):
        axes.broken_barh(spans(events, "wait", rank), (rank - 0.19, 0.08), color=WAIT, linewidth=0)
        axes.broken_barh(
            spans(events, "compute", rank), (rank - 0.4, 0.5), color=COMPUTE, edgecolor="#ffffff80", linewidth=0.8
        )
        axes.broken_barh(spans(events, "exchange", rank), (rank + 0.14, 0.26), color=EXCHANGE, alpha=0.75)
    axes.set(xlim=(0, UNTIL_S), ylim=(3.6, -0.6), yticks=range(4), yticklabels=[f"worker {rank}" for rank in range(4)])
    axes.set_title(title, loc="left", color=INK, fontsize=11)
    axes.tick_params(length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def timeline(method: str, options: list[str]) -> Figure:
    """Draw the time lines of all-reduce and of this method on the same cluster."""
    figure, (above, below) = plt.subplots(2, 1, figsize=(7.5, 4.2), sharex=True, layout="constrained")
    draw_timeline(above, "allreduce: every step waits for the slowest worker", trace("--method", "allreduce", *options))
    draw_timeline(below, TITLES[method], trace("--method", method, *options, *METHOD_OPTIONS.get(method, [])))
    below.set_xlabel("simulated seconds")
    for name, colour, width in (("compute", COMPUTE, 7), ("wait", WAIT, 3), ("communicate", EXCHANGE, 7)):
        above.plot([], [], color=colour, linewidth=width, label=name)
    figure.legend(loc="outside upper center", ncols=3, frameon=False, handlelength=1.2)
    return figure


def consensus() -> Figure:
    """Draw the consensus distance of 64 workers on a ring that only average."""
    figure, axes = plt.subplots(figsize=(7.5, 3), layout="constrained")
    for method, colour in (("gossip", EXCHANGE), ("a2cid2", COMPUTE)):
        result = gossamer.simulate(task="consensus", method=method, workers=64, clock="ideal", steps=400)
        first = result.history[0].consensus
        axes.plot([p.time for p in result.history], [p.consensus / first for p in result.history], colour, label=method)
    axes.set(yscale="log", xlabel="time, in gradients per worker", ylabel="consensus distance, relative")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


def gallery() -> Figure:
    """Draw graphs of sixteen workers."""
    figure, grid = plt.subplots(2, 4, figsize=(7.5, 4.2), layout="constrained")
    for axes, name in zip(grid.flat, GALLERY, strict=True):
        topology = build(name, workers=16, seed=0)
        where = positions(topology)
        for i, j in topology.edges.tolist():
            axes.plot(*curve(topology, where, i, j).T, color=INK, linewidth=0.7, alpha=0.7)
        axes.scatter(*where.T, s=26, color=COMPUTE, zorder=2)
        axes.set_title(f"{name}\nχ1 = {topology.constants(1.0).chi1:.3g}", color=INK, fontsize=10)
        axes.set_aspect("equal")
        axes.axis("off")
    return figure


def save(name: str, figure: Figure) -> None:
    figure.savefig(IMAGES / f"{name}.svg", transparent=True, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    with plt.rc_context(STYLE):
        for method, options in TIMELINES.items():
            save(f"timeline-{method}", timeline(method, options))
        save("consensus-a2cid2", consensus())
        save("topologies", gallery())
