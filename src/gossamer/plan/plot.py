"""Pictures of a plan: predicted step time over the number of workers and over bandwidth."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gossamer.errors import InputError
from gossamer.methods import METHODS
from gossamer.plan.machines import Machines
from gossamer.plan.predict import Candidate, graph
from gossamer.plan.recommend import UNNAMED, Plan, Workload, make_plan
from gossamer.plan.what_if import scaled_bandwidth
from gossamer.topology.draw import ROUND_COLOURS, SUFFIXES, TEXT_COLOUR

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TOPOLOGIES = ("complete", "ring", "one-peer-exponential", "alternating-exponential-ring", "base")
MOST_WORKERS = 1024
SLOWER, FASTER = 2, 1
"""Decades of bandwidth to both sides of the cluster's own."""
POINTS_PER_DECADE = 6
DECADE = 10
QUIET, CROSSING = "#8b98a8", "#d6457f"


@dataclass(frozen=True)
class Curves:
    """Step times in milliseconds over some x, one curve per method."""

    xs: list[float]
    times_ms: dict[str, list[float | None]]
    """By method, or by method and topology: its best plan that averages well enough; None where it has none."""
    ddp_ms: list[float]
    pays: list[bool]
    """Where something else than all-reduce is recommended."""
    here: float
    """Where the cluster is."""


@dataclass(frozen=True)
class Sketch:
    """What is drawn: a cluster, a job, and which methods and topologies (none given: all, the best of each)."""

    machines: Machines
    job: Workload
    mixing: float
    methods: Sequence[str] = ()
    topologies: Sequence[str] = ()

    def over_workers(self) -> Curves:
        """The same kind of nodes, from 2 workers up."""
        machines = self.machines
        most = min(MOST_WORKERS, max(64, 4 * machines.workers))
        counts = [2**k for k in range(1, int(math.log2(most)) + 1)]
        counts = [count for count in counts if count % min(count, machines.per_node) == 0]
        plans = [self._plan(machines.with_workers(count)) for count in counts]
        return self._curves([float(count) for count in counts], plans, machines.workers)

    def over_bandwidth(self) -> Curves:
        """The same cluster on links from a hundredth to ten times as fast, in gigabits per second."""
        machines = self.machines
        link = machines.between if machines.nodes > 1 else machines.inside
        powers = range(-SLOWER * POINTS_PER_DECADE, FASTER * POINTS_PER_DECADE + 1)
        factors = [10 ** (power / POINTS_PER_DECADE) for power in powers]
        plans = [self._plan(scaled_bandwidth(machines, factor)) for factor in factors]
        here = 8 * link.bytes_per_s / 1e9
        return self._curves([here * factor for factor in factors], plans, here)

    def _plan(self, machines: Machines) -> Plan:
        fitting = [name for name in self.topologies or TOPOLOGIES if _fits(name, machines)]
        methods = list(dict.fromkeys(["allreduce", *self.methods])) if self.methods else ()
        return make_plan(machines, self.job, methods=methods, topologies=fitting or ["complete"], mixing=self.mixing)

    def _name(self, candidate: Candidate) -> str:
        apart = self.topologies and candidate.over_a_graph
        return f"{candidate.method} over {candidate.topology}" if apart else candidate.method

    def _curves(self, xs: list[float], plans: Sequence[Plan], here: float) -> Curves:
        times: dict[str, list[float | None]] = {}
        for position, plan in enumerate(plans):
            for each in plan.ranking:
                row = times.setdefault(self._name(each.candidate), [None] * len(plans))
                if not plan.why_not(each):
                    row[position] = min(row[position] or math.inf, 1e3 * each.step_s)
        drawn = {name: row for name, row in times.items() if any(time is not None for time in row)}
        ddp = [1e3 * next(iter(plan.ddp_s.values())) for plan in plans]
        return Curves(xs, drawn, ddp, [plan.winner.candidate.method != "allreduce" for plan in plans], here)


def _fits(topology: str, machines: Machines) -> bool:
    try:
        graph(topology, machines.workers, machines.nodes)
    except InputError:
        return False
    return True


def draw(plan: Plan, path: Path, methods: Sequence[str] = (), topologies: Sequence[str] = ()) -> list[str]:
    """Draw both pictures into one file; returns what they show, in words."""
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(
            f"cannot draw to {path}: expected a name that ends in {', '.join(SUFFIXES)}; choose one of them"
        )
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("drawing needs matplotlib, which is not installed: pip install 'gossamer[plot]'") from None
    machines, job = plan.machines, plan.job
    link = machines.between if machines.nodes > 1 else machines.inside
    figure = Figure(figsize=(12.5, 5.6), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    said = []
    sketch = Sketch(machines, job, plan.mixing, methods, topologies)
    panels = [("workers", sketch.over_workers())]
    if math.isfinite(link.bytes_per_s):
        panels.append(("bandwidth", sketch.over_bandwidth()))
    colours = _colours(name for _, curves in panels for name in curves.times_ms)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    where = "between nodes" if machines.nodes > 1 else "inside the node"
    for each, (kind, curves) in zip(axes, panels, strict=True):
        label = "workers" if kind == "workers" else f"bandwidth {where}, Gbit/s"
        said.append(_panel(each, curves, label, kind, colours))
    size = f"{job.parameters / 1e6:.3g} M parameters"
    what = size if job.task == UNNAMED else f"{job.task}, {size}"
    figure.suptitle(f"{what}: predicted time per step", fontsize=14, color=TEXT_COLOUR)
    drawn = dict(pair for each in axes for pair in zip(*reversed(each.get_legend_handles_labels()), strict=True))
    figure.legend(
        drawn.values(),
        drawn.keys(),
        loc="outside lower center",
        ncols=len(drawn),
        frameon=False,
        labelcolor=TEXT_COLOUR,
    )
    try:
        figure.savefig(path, dpi=140)
    except OSError as error:
        raise InputError(
            f"cannot write {path} ({error.strerror}): expected a folder that exists; check the path"
        ) from None
    return said


def _colours(names: Iterable[str]) -> dict[str, str]:
    """One for each curve, the same in both pictures; all-reduce first, the others as in the table of methods."""
    order = {method: position for position, method in enumerate(METHODS)}
    others = sorted(set(names) - {"allreduce"}, key=lambda name: (order[name.partition(" ")[0]], name))
    return {"allreduce": TEXT_COLOUR, **dict(zip(others, itertools.cycle(ROUND_COLOURS)))}


def _panel(axes: Axes, curves: Curves, label: str, kind: str, colours: dict[str, str]) -> str:
    from matplotlib.ticker import LogLocator, NullLocator

    for position, method in enumerate(name for name in colours if name in curves.times_ms):
        points = [(x, time) for x, time in zip(curves.xs, curves.times_ms[method], strict=True) if time is not None]
        # Curves that lie on each other are told apart by their widths.
        width = 3.0 if method == "allreduce" else max(1.4, 7.0 - position)
        axes.plot(*zip(*points, strict=True), color=colours[method], linewidth=width, alpha=0.9, label=method)
    axes.plot(
        curves.xs, curves.ddp_ms, color=TEXT_COLOUR, linestyle=(0, (4, 3)), linewidth=1.2, label="DDP at its best"
    )
    axes.set_xscale("log", base=2 if kind == "workers" else 10)
    times = [time for row in curves.times_ms.values() for time in row if time is not None]
    if max(times) < DECADE * min(times):
        axes.set_ylim(bottom=0)
    else:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    axes.set_xlabel(label)
    axes.set_ylabel("milliseconds per step")
    axes.grid(True, color="#e6ebf2", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.axvline(curves.here, color=QUIET, linewidth=1.0, linestyle=":")
    axes.annotate("this cluster", (curves.here, 1.0), xycoords=("data", "axes fraction"), xytext=(-4, -4),
                  textcoords="offset points", ha="right", va="top", fontsize=9, color="#5a6878")  # fmt: skip
    if len(set(curves.pays)) == 1:
        words = "pays everywhere" if curves.pays[0] else "pays nowhere"
        axes.set_title(f"{words} in this range", fontsize=10, color=CROSSING)
        return f"over {label}: decentralization {words} in the picture"
    said = []
    for k in range(1, len(curves.xs)):
        if curves.pays[k] != curves.pays[k - 1]:
            at, words = (curves.xs[k], "from") if curves.pays[k] else (curves.xs[k - 1], "up to")
            said.append(f"{words} {at:.3g} {'workers' if kind == 'workers' else 'Gbit/s'}")
            axes.axvline(at, color=CROSSING, linewidth=1.4)
    axes.set_title(f"pays {', '.join(said)}", fontsize=10, color=CROSSING)
    return f"over {label}: decentralization pays {', '.join(said)}"
