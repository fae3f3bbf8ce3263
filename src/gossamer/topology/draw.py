"""Draw a topology into a png, svg or pdf file. Needs matplotlib."""

from __future__ import annotations

import itertools
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gossamer.errors import InputError
from gossamer.topology.structures import CayleyGraph
from gossamer.topology.topology import Topology

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
MAX_LABELLED_WORKERS = 64
MAX_DRAWN_EDGES = 100_000
MAX_COLOURED_ROUNDS = 10
MAX_KAMADA_KAWAI_WORKERS = 150
ROUND_COLOURS = (
    "#4269d0", "#e8883a", "#3ca951", "#d6457f", "#8a5cd0", "#2aa7b8", "#b08a2e", "#7b8794", "#a8324a", "#5f8f2f",
)  # fmt: skip
EDGE_COLOUR = "#8b98a8"
WORKER_COLOUR = "#26364d"
TEXT_COLOUR = "#1c2733"


def draw(topology: Topology, path: str | os.PathLike[str]) -> None:
    """Draw the workers and their edges into a file; an edge's colour shows in which rounds it is used."""
    if topology.num_edges > MAX_DRAWN_EDGES:
        raise InputError(
            f"{topology.name} of {topology.workers} workers has {topology.num_edges} edges, too many for a picture: "
            f"expected at most {MAX_DRAWN_EDGES}; draw it with fewer workers"
        )
    figure = new_figure(Path(path), (7.0, 7.6))
    axes = figure.add_subplot()
    axes.set_aspect("equal")
    axes.axis("off")
    points = positions(topology)
    _draw_edges(axes, topology, points)
    _draw_workers(axes, topology, points)
    axes.margins(0.06)
    constants = topology.constants()
    facts = f"χ1 {constants.chi1:.3g}   χ2 {constants.chi2:.3g}   spectral gap {constants.spectral_gap:.3g}"
    count = f"{topology.workers} worker{'s' if topology.workers > 1 else ''}"
    axes.set_title(f"{topology.name}, {count}", fontsize=15, color=TEXT_COLOUR, pad=24)
    axes.text(0.5, 1.012, facts, transform=axes.transAxes, ha="center", va="bottom", fontsize=10.5, color="#5a6878")
    save_figure(figure, Path(path), dpi=150)


def new_figure(path: Path, size: tuple[float, float]) -> Figure:
    """Return an empty figure. Raise ``InputError`` if it could not be saved to a file of this name."""
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(
            f"cannot draw to {path}: expected a name that ends in {', '.join(SUFFIXES)}; choose one of them"
        )
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("drawing needs matplotlib, which is not installed: pip install matplotlib") from None
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: Path, dpi: int) -> None:
    try:
        figure.savefig(path, dpi=dpi)
    except OSError as error:
        raise InputError(
            f"cannot write {path} ({error.strerror}): expected a folder that exists; check the path"
        ) from None


def positions(topology: Topology) -> np.ndarray:
    """Return the coordinates of each worker, [workers, 2], about as large as the unit circle."""
    n = topology.workers
    kind = topology.layout.partition(":")[0]
    if n == 1:
        return np.zeros((1, 2))
    if kind == "circle":
        return circle(n)
    if kind == "open-circle":
        return circle(n + 1)[:n] if n > 2 else np.array([[-1.0, 0.0], [1.0, 0.0]])
    if kind == "hub":
        return np.concatenate([np.zeros((1, 2)), circle(n - 1)])
    if kind == "grid":
        assert isinstance(topology.structure, CayleyGraph)
        row, column = np.unravel_index(np.arange(n), topology.structure.shape)
        return np.stack([column, -row], axis=-1) * (2.0 / max(topology.structure.shape))
    if kind == "clusters":
        nodes = _num_nodes(topology)
        return np.repeat(circle(nodes), n // nodes, axis=0) + _node_radius(nodes) * np.tile(
            circle(n // nodes), (nodes, 1)
        )
    import networkx as nx

    graph = topology.graph()
    start = dict(enumerate(circle(n)))  # fixed, so that the picture is deterministic
    if n <= MAX_KAMADA_KAWAI_WORKERS:
        points = nx.kamada_kawai_layout(graph, pos=start)
    else:
        points = nx.spring_layout(graph, pos=start, iterations=60, seed=0)
    return np.array([points[rank] for rank in range(n)])


def circle(n: int) -> np.ndarray:
    """Return n points on the unit circle, clockwise from the top."""
    angle = 2 * np.pi * np.arange(n) / n
    return np.stack([np.sin(angle), np.cos(angle)], axis=-1)


def _draw_edges(axes: Axes, topology: Topology, positions: np.ndarray) -> None:
    from matplotlib.collections import LineCollection
    from matplotlib.lines import Line2D

    edges = topology.edges
    if len(edges) == 0:
        return
    density = len(edges) / topology.workers
    width = float(np.clip(9.0 / math.sqrt(topology.workers) / max(1.0, density / 3) ** 0.5, 0.3, 2.2))
    opacity = float(np.clip(2.4 / max(1.0, density) ** 0.6, 0.2, 0.9))
    curves = [curve(topology, positions, i, j) for i, j in edges.tolist()]
    used_in = _rounds_of_edges(topology)
    if _num_nodes(topology) > 1:
        curves, used_in = _draw_nodes(axes, topology, curves, used_in)
        width, opacity = 3.0, 0.8
    kinds = sorted(set(used_in))
    coloured = topology.period > 1 and len(kinds) <= len(ROUND_COLOURS)
    palette = dict(zip(kinds, ROUND_COLOURS, strict=False)) if coloured else dict.fromkeys(kinds, EDGE_COLOUR)
    colours = [palette[rounds] for rounds in used_in]
    axes.add_collection(LineCollection(curves, colors=colours, linewidths=width, alpha=opacity, zorder=1))
    if coloured:
        labels = [", ".join(str(number + 1) for number in rounds) for rounds in kinds]
        handles = [
            Line2D([], [], color=palette[rounds], linewidth=3, label=label)
            for rounds, label in zip(kinds, labels, strict=True)
        ]
        axes.legend(
            handles=handles,
            title=f"used in round (of {topology.period})",
            loc="upper center",
            bbox_to_anchor=(0.5, 0.0),
            ncols=len(handles) if max(map(len, labels)) <= 4 else 4,
            frameon=False,
            fontsize=10,
            title_fontsize=10,
            handlelength=1.4,
            columnspacing=1.4,
            labelcolor=TEXT_COLOUR,
        )


def _rounds_of_edges(topology: Topology) -> list[tuple[int, ...]]:
    """Return the rounds that use each edge; none if there are too many rounds for different colours."""
    used: dict[tuple[int, int], list[int]] = {}
    if 1 < topology.period <= MAX_COLOURED_ROUNDS:
        for number, groups in enumerate(topology.rounds):
            for group in groups:
                for pair in itertools.combinations(group.members, 2):
                    used.setdefault(pair, []).append(number)
    return [tuple(used.get((i, j), ())) for i, j in topology.edges.tolist()]


def _num_nodes(topology: Topology) -> int:
    kind, _, detail = topology.layout.partition(":")
    return int(detail) if kind == "clusters" else 1


def _draw_nodes(
    axes: Axes, topology: Topology, curves: list[np.ndarray], used_in: list[tuple[int, ...]]
) -> tuple[list[np.ndarray], list[tuple[int, ...]]]:
    """Draw a disc for each node; return one line per pair of nodes instead of the edges between their workers."""
    from matplotlib.patches import Circle

    nodes = _num_nodes(topology)
    centres = circle(nodes)
    for centre in centres:
        axes.add_patch(
            Circle(tuple(centre), 1.55 * _node_radius(nodes), facecolor="#e6ebf2", edgecolor="none", zorder=1.5)
        )
    node_edges = (topology.edges // (topology.workers // nodes)).tolist()
    between = {(u, v): rounds for (u, v), rounds in zip(node_edges, used_in, strict=True) if u != v}
    return [centres[list(pair)] for pair in between], list(between.values())


def _node_radius(nodes: int) -> float:
    return 0.5 * min(math.sin(math.pi / nodes), 0.6)


def curve(topology: Topology, positions: np.ndarray, i: int, j: int) -> np.ndarray:
    """Return a straight line; a bent one for the wrap-around edges of a torus, which would lie on other edges."""
    start, end = positions[i], positions[j]
    direction = end - start
    if topology.layout != "grid":
        return np.stack([start, end])
    spacing = np.abs(positions[1] - positions[0]).sum()
    length = float(np.hypot(*direction))
    if length < 1.5 * spacing:
        return np.stack([start, end])
    t = np.linspace(0.0, 1.0, 24)[:, None]
    sideways = np.array([-direction[1], direction[0]]) / length
    bend: np.ndarray = start + t * direction + 0.34 * spacing * np.sin(np.pi * t) ** 0.6 * sideways
    return bend


def _draw_workers(axes: Axes, topology: Topology, positions: np.ndarray) -> None:
    labelled = topology.workers <= MAX_LABELLED_WORKERS
    nearest = _nearest_distance(positions)
    # Marker sizes are areas in points²; the picture is about 400 points wide for two units.
    span = max(float(np.ptp(positions, axis=0).max()), 1e-9) if topology.workers > 1 else 1.0
    diameter = float(np.clip(0.55 * nearest / span * 400, 13.0 if labelled else 1.5, 26.0))
    style: dict[str, Any] = {"s": diameter**2, "color": WORKER_COLOUR, "edgecolors": "white", "zorder": 2}
    axes.scatter(positions[:, 0], positions[:, 1], linewidths=1.2 if labelled else 0.0, **style)
    if not labelled:
        return
    font_size = min(11.0, 0.46 * diameter)
    for rank, (x, y) in enumerate(positions):
        axes.text(x, y, str(rank), color="white", fontsize=font_size, ha="center", va="center_baseline", zorder=3)


def _nearest_distance(positions: np.ndarray) -> float:
    from scipy.spatial import cKDTree

    if len(positions) == 1:
        return 1.0
    distances = np.asarray(cKDTree(positions).query(positions, k=2)[0])
    return float(np.quantile(distances[:, 1], 0.1))
