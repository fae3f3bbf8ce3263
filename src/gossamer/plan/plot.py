"""Plots of a plan: predicted step time over the number of workers and over bandwidth. Needs matplotlib."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gossamer.methods import METHODS
from gossamer.plan.cluster_spec import ClusterSpec
from gossamer.plan.predict import Candidate
from gossamer.plan.recommend import BASELINE, MIN_SPEEDUP, UNNAMED_TASK, Plan, Workload, make_plan
from gossamer.plan.what_if import scaled_bandwidth
from gossamer.topology import fits
from gossamer.topology.draw import ROUND_COLOURS, TEXT_COLOUR, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TOPOLOGIES = ("complete", "ring", "one-peer-exponential", "alternating-exponential-ring", "base")
MAX_WORKERS = 1024
DECADES_SLOWER, DECADES_FASTER = 2, 1
"""Range of bandwidths, from the cluster's own."""
POINTS_PER_DECADE = 6
MAX_LINEAR_RANGE = 10
"""Largest over smallest time from which on the time axis is logarithmic."""
CLUSTER_COLOUR, CROSSING_COLOUR = "#8b98a8", "#d6457f"
DASHES = (0, (4, 3))
DDP = "DDP with ideal overlap"


@dataclass(frozen=True)
class Curves:
    """Step times in milliseconds, one curve per method (and topology)."""

    xs: list[float]
    times_ms: dict[str, list[float | None]]
    """Of the fastest candidate that may be recommended; None where there is none."""
    ddp_ms: list[float]
    """Of DDP with ideal overlap."""
    over_allreduce: list[bool]
    """Whether something faster than all-reduce is recommended."""
    over_ddp: list[bool]
    """Whether that is also faster than DDP with ideal overlap."""
    cluster_x: float
    """The x of the cluster itself."""


@dataclass(frozen=True)
class Sweep:
    """Plans for variants of a cluster, over some methods and topologies (empty: the best of all)."""

    spec: ClusterSpec
    job: Workload
    max_contraction: float
    methods: Sequence[str] = ()
    topologies: Sequence[str] = ()

    def over_workers(self) -> Curves:
        spec = self.spec
        largest = min(MAX_WORKERS, max(64, 4 * spec.workers))
        counts = [2**k for k in range(1, int(math.log2(largest)) + 1)]
        counts = [count for count in counts if count % min(count, spec.per_node) == 0]
        plans = [self._plan(spec.with_workers(count)) for count in counts]
        return self._curves([float(count) for count in counts], plans, spec.workers)

    def over_bandwidth(self) -> Curves:
        """Vary the bandwidth from a hundredth to ten times the cluster's, in gigabits per second."""
        powers = range(-DECADES_SLOWER * POINTS_PER_DECADE, DECADES_FASTER * POINTS_PER_DECADE + 1)
        factors = [10 ** (power / POINTS_PER_DECADE) for power in powers]
        plans = [self._plan(scaled_bandwidth(self.spec, factor)) for factor in factors]
        gigabits = 8 * self.spec.main_link.bytes_per_s / 1e9
        return self._curves([gigabits * factor for factor in factors], plans, gigabits)

    def _plan(self, spec: ClusterSpec) -> Plan:
        names = self.topologies or TOPOLOGIES
        return make_plan(
            spec,
            self.job,
            methods=list(dict.fromkeys([BASELINE, *self.methods])) if self.methods else (),
            topologies=[name for name in names if fits(name, spec.workers, spec.nodes)] or ["complete"],
            max_contraction=self.max_contraction,
        )

    def _name(self, candidate: Candidate) -> str:
        per_topology = self.topologies and candidate.uses_topology
        return f"{candidate.name} over {candidate.topology}" if per_topology else candidate.name

    def _curves(self, xs: list[float], plans: Sequence[Plan], cluster_x: float) -> Curves:
        times: dict[str, list[float | None]] = {}
        for position, plan in enumerate(plans):
            for prediction in plan.ranking:
                row = times.setdefault(self._name(prediction.candidate), [None] * len(plans))
                if not plan.objection(prediction):
                    row[position] = min(row[position] or math.inf, 1e3 * prediction.step_s)
        drawn = {name: row for name, row in times.items() if any(time is not None for time in row)}
        ddp = [1e3 * next(iter(plan.ddp_s.values())) for plan in plans]
        over_allreduce = [plan.winner.candidate.method != BASELINE for plan in plans]
        over_ddp = [
            better and ddp_ms >= MIN_SPEEDUP * 1e3 * plan.winner.step_s
            for better, ddp_ms, plan in zip(over_allreduce, ddp, plans, strict=True)
        ]
        return Curves(xs, drawn, ddp, over_allreduce, over_ddp, cluster_x)


def draw(plan: Plan, path: Path, methods: Sequence[str] = (), topologies: Sequence[str] = ()) -> list[str]:
    """Draw both plots into one file; return a sentence about each."""
    figure = new_figure(path, (12.5, 5.6))
    spec, job = plan.spec, plan.job
    sweep = Sweep(spec, job, plan.max_contraction, methods, topologies)
    panels = [("workers", sweep.over_workers())]
    if math.isfinite(spec.main_link.bytes_per_s):
        panels.append(("bandwidth", sweep.over_bandwidth()))
    colours = _colours(name for _, curves in panels for name in curves.times_ms)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    where = "between nodes" if spec.nodes > 1 else "inside the node"
    sentences = []
    for panel, (kind, curves) in zip(axes, panels, strict=True):
        label = "workers" if kind == "workers" else f"bandwidth {where}, Gbit/s"
        sentences.append(_draw_panel(panel, curves, label, kind, colours))
    size = f"{job.parameters / 1e6:.3g} M parameters"
    title = size if job.task == UNNAMED_TASK else f"{job.task}, {size}"
    figure.suptitle(f"{title}: predicted time per step", fontsize=14, color=TEXT_COLOUR)
    legend = dict(pair for panel in axes for pair in zip(*reversed(panel.get_legend_handles_labels()), strict=True))
    figure.legend(
        legend.values(),
        legend.keys(),
        loc="outside lower center",
        ncols=len(legend),
        frameon=False,
        labelcolor=TEXT_COLOUR,
    )
    save_figure(figure, path, dpi=140)
    return sentences


def _colours(names: Iterable[str]) -> dict[str, str]:
    """Return the colour of each curve, the same in both plots: in the order of the table of methods, then others."""
    order = {method: position for position, method in enumerate(METHODS)}
    others = sorted(set(names) - {BASELINE}, key=lambda name: (order.get(name.partition(" ")[0], len(order)), name))
    return {BASELINE: TEXT_COLOUR, **dict(zip(others, itertools.cycle(ROUND_COLOURS)))}


def _draw_panel(axes: Axes, curves: Curves, label: str, kind: str, colours: dict[str, str]) -> str:
    """Draw one plot; return a sentence that says where the recommended plan is faster than others."""
    from matplotlib.ticker import LogLocator, NullLocator

    for position, method in enumerate(name for name in colours if name in curves.times_ms):
        points = [(x, time) for x, time in zip(curves.xs, curves.times_ms[method], strict=True) if time is not None]
        # Different widths keep curves visible that lie on each other.
        width = 3.0 if method == BASELINE else max(1.4, 7.0 - position)
        axes.plot(*zip(*points, strict=True), color=colours[method], linewidth=width, alpha=0.9, label=method)
    axes.plot(curves.xs, curves.ddp_ms, color=TEXT_COLOUR, linestyle=DASHES, linewidth=1.2, label=DDP)
    axes.set_xscale("log", base=2 if kind == "workers" else 10)
    times = [time for row in curves.times_ms.values() for time in row if time is not None]
    if max(times) < MAX_LINEAR_RANGE * min(times):
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
    axes.axvline(curves.cluster_x, color=CLUSTER_COLOUR, linewidth=1.0, linestyle=":")
    axes.annotate("this cluster", (curves.cluster_x, 1.0), xycoords=("data", "axes fraction"), xytext=(-4, -4),
                  textcoords="offset points", ha="right", va="top", fontsize=9, color="#5a6878")  # fmt: skip
    parts = []
    for name, faster, style in (("all-reduce", curves.over_allreduce, "-"), (DDP, curves.over_ddp, DASHES)):
        where, crossings = _ranges(curves.xs, faster, "workers" if kind == "workers" else "Gbit/s")
        parts.append(f"faster than {name} {where}")
        for x in crossings:
            axes.axvline(x, color=CROSSING_COLOUR, linewidth=1.4, linestyle=style)
    axes.set_title("\n".join(parts), fontsize=10, color=CROSSING_COLOUR)
    return f"over {label}: {', '.join(parts)}"


def _ranges(xs: Sequence[float], faster: Sequence[bool], unit: str) -> tuple[str, list[float]]:
    """Return in which ranges of ``xs`` it is faster, in words, and where these begin and end."""
    if all(faster):
        return "in the whole range", []
    if not any(faster):
        return "nowhere in this range", []
    words, crossings = [], []
    for k in range(1, len(xs)):
        if faster[k] != faster[k - 1]:
            at, side = (xs[k], "from") if faster[k] else (xs[k - 1], "up to")
            words.append(f"{side} {at:.3g} {unit}")
            crossings.append(at)
    return ", ".join(words), crossings
