"""The sentence that opens the page, and the time that each run needed to reach a target."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gossamer.report.formats import counted, duration, figure, percent, run_time, size
from gossamer.report.runs import StoredRun

NOTICEABLE, NOTICEABLE_ACCURACY = 1.02, 0.0005
"""Times, losses, bytes and consensus distances that differ by less than this factor count as equal; accuracies, by less
than this share."""

ACCURACY_LEVELS = [
    *(k / 20 for k in range(1, 19)),
    *(k / 100 for k in range(91, 100)),
    *(k / 1000 for k in range(991, 1000)),
]


@dataclass(frozen=True)
class Metric:
    field: str
    """Of a point."""
    name: str
    higher_is_better: bool

    def value(self, point: Mapping[str, Any]) -> float | None:
        value = point.get(self.field)
        return value.get("mean") if isinstance(value, Mapping) else value

    def reached(self, value: float, target: float) -> bool:
        return value >= target if self.higher_is_better else value <= target

    def number(self, value: float) -> str:
        """``97.2%``, ``0.12``."""
        return f"{100 * value:.1f}".removesuffix(".0") + "%" if self.higher_is_better else figure(value)

    def text(self, value: float) -> str:
        """``97.2% accuracy``, ``a loss of 0.12``."""
        return (
            f"{self.number(value)} {self.name}" if self.higher_is_better else f"a {self.name} of {self.number(value)}"
        )

    def levels(self, curves: Sequence[Sequence[float]]) -> list[float]:
        """Round numbers in the range of the curves, from easy to hard."""
        if self.higher_is_better:
            return [level for level in ACCURACY_LEVELS if level <= max(map(max, curves))]
        positive = [value for curve in curves for value in curve if value > 0]
        if not positive:
            return []
        lowest, highest = (math.floor(math.log10(end)) for end in (min(positive), max(positive)))
        levels = {float(f"{digit}e{decade}") for decade in range(lowest, highest + 1) for digit in (1, 2, 5)}
        hardest = max(min(curve) for curve in curves)
        if hardest > 0:
            # The hardest level that all runs have reached, rounded up to two digits: 1, 2 and 5 may miss it by far.
            unit = 10.0 ** (math.floor(math.log10(hardest)) - 1)
            levels.add(float(f"{math.ceil(round(hardest / unit, 6)) * unit:.2g}"))
        return sorted(levels, reverse=True)


METRICS = (
    Metric("accuracy", "accuracy", True),
    Metric("worker_accuracy", "mean accuracy of the workers' own models", True),
    Metric("loss", "loss", False),
    Metric("train_loss", "training loss", False),
    Metric("consensus", "consensus distance", False),
)
"""In the order of preference; real workers know the averaged model, and so its accuracy and loss, only at the end."""


@dataclass(frozen=True)
class Targets:
    """Values of a metric, and when each run reached them first."""

    metric: Metric
    levels: list[float]
    times: list[list[float | None]]
    """By level and run; None if the run never reached it."""
    default: int
    """Index of the hardest level that all runs reached."""
    time_units: list[str]

    def document(self) -> dict[str, Any]:
        choices = [
            {
                "target": level,
                "text": self.metric.number(level),
                "cells": [run_time(time, unit) for time, unit in zip(times, self.time_units, strict=True)],
            }
            for level, times in zip(self.levels, self.times, strict=True)
        ]
        meaning = f"until the {self.metric.name} first reached"
        return {"metric": self.metric.field, "meaning": meaning, "default": self.default, "choices": choices}


def find_targets(runs: Sequence[StoredRun]) -> Targets | None:
    """Choose a metric that all runs have, and its targets; None if there is nothing to compare."""
    metric = _find_metric(runs)
    if metric is None:
        return None
    curves = [_curve(metric, run) for run in runs]
    completed = [k for k, run in enumerate(runs) if run.finished and not run.problem] or list(range(len(runs)))
    levels, times = [], []
    for level in metric.levels([[value for _, value in curves[k]] for k in completed if curves[k]]):
        # A target that a run has met before its first step says nothing about speed.
        if any(curve and metric.reached(curve[0][1], level) for curve in curves):
            continue
        reached = [next((time for time, value in curve if metric.reached(value, level)), None) for curve in curves]
        if any(time is not None for time in reached):
            levels.append(level)
            times.append(reached)
    if not levels:
        return None
    num_reached = [sum(reached[k] is not None for k in completed) for reached in times]
    default = max(range(len(levels)), key=lambda index: (num_reached[index], index))
    return Targets(metric, levels, times, default, [run.time_unit for run in runs])


def _find_metric(runs: Sequence[StoredRun]) -> Metric | None:
    """The first metric of which every run with measurements has a curve."""
    measured = [run for run in runs if run.points]
    for metric in METRICS:
        if measured and all(len(_curve(metric, run)) > 1 for run in measured):
            return metric
    return None


def _curve(metric: Metric, run: StoredRun) -> list[tuple[float, float]]:
    values = ((point["time"], metric.value(point)) for point in run.points)
    return [(time, value) for time, value in values if value is not None]


# The sentence


def headline(names: Sequence[str], runs: Sequence[StoredRun], targets: Targets | None) -> str:
    """Return one sentence that says what happened."""
    if len(runs) == 1:
        return _about_one(names[0], runs[0])
    if len({(run.config.get("task"), run.time_unit) for run in runs}) > 1:
        return f"These are {len(runs)} runs of different tasks or clocks: their times cannot be compared."
    if targets is None or all(run.problem for run in runs):
        return f"These are {len(runs)} runs that have not reached a common target{_failures(names, runs)}."
    return _about_several(names, runs, targets)


def _about_one(name: str, run: StoredRun) -> str:
    final = run.final
    if not final:
        return f"{name} has started and has no measurements yet."
    after = f"after {_time_text(run, final.get('time', 0.0))}"
    if run.problem:
        kind, _, why = run.problem.partition(": ")
        return f"{name} {kind} {after}: {why}."
    values = ((metric, metric.value(final)) for metric in METRICS)
    outcome = next((metric.text(value) for metric, value in values if value is not None), "nothing measured")
    if not run.finished or final.get("interrupted"):
        status = "was stopped by hand" if run.finished else "is"
        return f"{name} {status} at {run.progress(final['steps'])} {after}, with {outcome}."
    price = f"sent {size(final.get('bytes_sent'))}"
    if final.get("consensus"):
        price += f" and ended {figure(final['consensus'])} apart (consensus distance)"
    workers, busy = counted(int(run.config.get("workers", 0)), "worker"), percent(final.get("utilization"), digits=0)
    return f"{name} reached {outcome} {after}; its {workers} were busy {busy} of the time, {price}."


def _about_several(names: Sequence[str], runs: Sequence[StoredRun], targets: Targets) -> str:
    """Who was the fastest to the default target, by how much, at what price."""
    goal, times = targets.metric.text(targets.levels[targets.default]), targets.times[targets.default]
    failures = _failures(names, runs, times)
    reached = {k: time for k, time in enumerate(times) if time is not None and not runs[k].problem}
    if not reached:
        return f"No run that ended well reached {goal}{failures}."
    winner, *slower = sorted(reached, key=reached.__getitem__)
    name, time = names[winner], _time_text(runs[winner], reached[winner])
    start = "" if all(run.finished for run in runs) else "So far, "
    if not slower:
        return f"{start}{'only' if start else 'Only'} {name} reached {goal}, after {time}{failures}."
    # Against the first run of the table, as the speed-up, unless that is the fastest itself.
    other = 0 if 0 in slower else slower[0]
    factor = reached[other] / max(reached[winner], 1e-9)
    price = _price(targets.metric, runs[winner].final, runs[other].final, names[other])
    if factor < NOTICEABLE:
        return f"{start}{name} and {names[other]} were equally fast to {goal}: {time}, {name} {price}{failures}."
    other_time = run_time(reached[other], runs[other].time_unit)
    return (
        f"{start}{name} was the fastest to {goal}: {time}, {figure(factor)} times as fast as {names[other]} "
        f"({other_time}), {price}{failures}."
    )


def _price(metric: Metric, final: Mapping[str, Any], other: Mapping[str, Any], other_name: str) -> str:
    accuracy, loss, sent, distance = (
        [point.get(field) or 0.0 for point in (final, other)]
        for field in ("accuracy", "loss", "bytes_sent", "consensus")
    )
    prices = []
    if accuracy[1] - accuracy[0] >= NOTICEABLE_ACCURACY:
        prices.append(f"{100 * (accuracy[1] - accuracy[0]):.1f} percentage points of final accuracy")
    if not any(accuracy) and loss[0] > NOTICEABLE * loss[1]:
        prices.append(f"a final loss of {figure(loss[0])} instead of {figure(loss[1])}")
    if sent[0] > NOTICEABLE * sent[1] > 0:
        prices.append(f"{figure(sent[0] / sent[1])} times the bytes")
    if metric.field != "consensus" and distance[0] > NOTICEABLE * distance[1]:
        apart = f"models that end {figure(distance[0])} apart"
        prices.append(f"{apart} (consensus distance; {other_name}: {figure(distance[1])})")
    return f"at the price of {_listed(prices)}" if prices else "at no price in quality, bytes or consensus distance"


def _failures(names: Sequence[str], runs: Sequence[StoredRun], times: Sequence[float | None] = ()) -> str:
    """The runs that went wrong, and those that did not reach the target at any of ``times``."""
    causes: dict[str, list[str]] = {}
    for k, (name, run) in enumerate(zip(names, runs, strict=True)):
        if run.problem:
            causes.setdefault(run.problem.partition(":")[0], []).append(name)
        elif times and times[k] is None:
            causes.setdefault("did not reach it" if run.finished else "still on the way", []).append(name)
    return "".join(f"; {_listed(failing)} {cause}" for cause, failing in causes.items())


def _time_text(run: StoredRun, time: float) -> str:
    """``3.2 s``, ``3.2 s of simulated time``, ``12 gradients per worker``."""
    if run.time_unit != "s":
        return f"{time:.4g} {'gradient' if time == 1 else 'gradients'} per worker"
    return duration(time) + (" of simulated time" if run.about.get("world") == "virtual" else "")


def _listed(items: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
