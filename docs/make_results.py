"""Measure the tables of docs/results.md: ``python docs/make_results.py [section …]`` prints them as Markdown.

Sections: data, graphs, uniform, averaging, quadratic. All of them take about ten minutes on a CPU.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterable

import gossamer
from gossamer.virtual.simulation import SimulationResult

METHODS = ("allreduce", "localsgd", "overlap", "divisible", "lasgd", "gossip", "a2cid2")
SEEDS = (0, 1, 2)


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    for cells in (heads, ["---" for _ in heads], *rows):
        print("| " + " | ".join(cells) + " |", flush=True)
    print(flush=True)


def mean(results: list[SimulationResult], figure: Callable[[SimulationResult], float | None]) -> float:
    return statistics.mean(float(value) for value in map(figure, results) if value is not None)


def quality(results: list[SimulationResult]) -> list[str]:
    """Accuracy of the averaged model, worst to best worker, consensus: means over the seeds."""
    accuracy = 100 * mean(results, lambda result: result.final.accuracy)
    worst = 100 * mean(results, lambda result: result.final.worker_accuracy.min)
    best = 100 * mean(results, lambda result: result.final.worker_accuracy.max)
    return [f"{accuracy:.1f}", f"{worst:.1f} to {best:.1f}", f"{mean(results, lambda r: r.final.consensus):.2g}"]


def digits(**settings: object) -> list[SimulationResult]:
    return [gossamer.simulate(task="digits", seed=seed, eval_every=1000, **settings) for seed in SEEDS]


def data() -> None:
    heads = ["method", "accuracy", "workers", "consensus", "time"]
    for partition in ("iid", "dirichlet:0.1", "by-class"):
        print(f"**`--partition {partition}`**\n")
        rows = []
        for method in METHODS:
            results = digits(method=method, partition=partition)
            rows.append([f"`{method}`", *quality(results), f"{mean(results, lambda r: r.final.time):.1f} s"])
        table(heads, rows)


def graphs() -> None:
    rows = []
    for topology in ("ring", "torus", "exponential", "complete"):
        for method in ("overlap", "gossip", "a2cid2"):
            results = digits(method=method, topology=topology, partition="by-class")
            rows.append([f"`{topology}`", f"`{method}`", *quality(results)])
    table(["topology", "method", "accuracy", "workers", "consensus"], rows)


def uniform() -> None:
    rows = []
    for method in METHODS:
        results = digits(method=method, compute="constant:50ms", link="inf")
        rows.append([f"`{method}`", f"{mean(results, lambda r: r.final.time):.1f} s", *quality(results)])
    table(["method", "time", "accuracy", "workers", "consensus"], rows)


def time_to(share: float, **settings: object) -> float:
    """When the workers are this share as far apart as they began."""
    history = gossamer.simulate(task="consensus", clock="ideal", workers=64, **settings).history
    return next(point.time for point in history if point.consensus <= share * history[0].consensus)


def averaging() -> None:
    rows = []
    for topology, steps in (("ring", 3600), ("torus", 200), ("exponential", 100), ("complete", 100)):
        times = {
            method: [time_to(1e-4, method=method, topology=topology, seed=seed, steps=steps) for seed in range(5)]
            for method in ("gossip", "a2cid2")
        }
        gossip, a2cid2 = (statistics.median(times[method]) for method in ("gossip", "a2cid2"))
        rows.append([f"`{topology}`", f"{gossip:.0f}", f"{a2cid2:.0f}", f"{gossip / a2cid2:.1f}×"])
    table(["topology", "`gossip`", "`a2cid2`", "ratio"], rows)


def quadratic() -> None:
    rows = []
    for method in ("allreduce", "localsgd", "overlap", "lasgd", "gossip", "a2cid2"):
        cells = [f"`{method}`"]
        for momentum in (0.0, 0.9):
            history = gossamer.simulate(
                task="quadratic",
                method=method,
                workers=64,
                clock="ideal",
                steps=1500,
                lr=0.01,
                momentum=momentum,
                eval_every=2000,
            ).history
            cells.append(f"{statistics.mean(point.consensus for point in history if point.time > 750):.2g}")
        rows.append(cells)
    table(["method", "SGD", "SGD, momentum 0.9"], rows)


SECTIONS = {each.__name__: each for each in (data, graphs, uniform, averaging, quadratic)}

if __name__ == "__main__":
    for name in sys.argv[1:] or SECTIONS:
        print(f"## {name}\n", flush=True)
        SECTIONS[name]()
