"""The sentence that opens the page, and the time that each run needed to reach a target."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gossamer.report.formats import counted, duration, figure, percent, run_time, size
from gossamer.report.runs import StoredRun

TIE = 1.01
"""Two runs whose times differ by less than this factor were equally fast."""

NOTICEABLE = 1.05
"""Losses, bytes and consensus distances that differ by less than this factor count as equal."""

NOTICEABLE_ACCURACY = 0.0005

ACCURACY_LEVELS = [
    *(k / 20 for k in range(1, 19)),
    *(k / 100 for k in range(91, 100)),
    *(k / 1000 for k in range(991, 1000)),
]


@dataclass(frozen=True)
class Metric:
    """What the runs are compared by."""

    field: str
    """Of a point."""
    name: str
    higher_is_better: bool

    def value(self, point: Mapping[str, Any]) -> float | None:
        value = point.get(self.field)
        return value.get("mean") if isinstance(value, Mapping) else value

    def reached(self, value: float, target: float) -> bool:
        return value >= target if self.higher_is_better else value <= target

    def text(self, value: float) -> str:
        """``97.2% accuracy``, ``a loss of 0.12``."""
        return f"{percent(value)} {self.name}" if self.higher_is_better else f"a {self.name} of {figure(value)}"

    def target_text(self, target: float) -> str:
        """``95%``, ``0.2``."""
        if not self.higher_is_better:
            return figure(target)
        return percent(target, digits=0 if round(100 * target, 6).is_integer() else 1)

    def levels(self, curves: Sequence[Sequence[float]]) -> list[float]:
        """Round numbers in the range of the curves, from easy to hard."""
        if self.higher_is_better:
            return [level for level in ACCURACY_LEVELS if level <= max(map(max, curves))]
        positive = [value for curve in curves for value in curve if value > 0]
        if not positive:
            return []
        lowest, highest = (math.floor(math.log10(end)) for end in (min(positive), max(positive)))
        levels = {float(f"{digit}e{decade}") for decade in range(lowest, highest + 1) for digit in (1, 2, 5)}
        # The hardest level that all runs have reached, which 1, 2 and 5 may miss by far.
        hardest = max(min(curve) for curve in curves)
        levels |= {_rounded_up(hardest)} if hardest > 0 else set()
        return sorted(levels, reverse=True)


def _rounded_up(value: float) -> float:
    """Two significant digits, not below ``value``."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(round(value / unit, 6)) * unit:.2g}")


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
                "text": self.metric.target_text(level),
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
        return _about_one(names[0], runs[0], targets)
    tasks = list(dict.fromkeys(str(run.config.get("task")) for run in runs))
    if len(tasks) > 1:
        return f"These are {len(runs)} runs of different tasks ({_listed(tasks)}): their times cannot be compared."
    if len({run.time_unit for run in runs}) > 1:
        return f"These are {len(runs)} runs on different clocks: their times cannot be compared."
    if all(run.problem for run in runs):
        return f"{_failures(names, runs, None).removeprefix('; ')}."
    if targets is None:
        return f"These are {len(runs)} runs that have not reached a common target{_failures(names, runs, None)}."
    return _about_several(names, runs, targets)


def _about_one(name: str, run: StoredRun, targets: Targets | None) -> str:
    final, goal = run.final, run.config.get("steps", "?")
    if not final:
        return f"{name} has started and has no measurements yet."
    after = f"after {_time_text(run, final.get('time', 0.0))}"
    if run.problem:
        kind, _, why = run.problem.partition(": ")
        return f"{name} {kind} {after}: {why}."
    outcome = _outcome(run)
    with_outcome = f", with {outcome}" if outcome else ""
    if not run.finished:
        return f"{name} is at step {final['steps']} of {goal} {after}{with_outcome}."
    if final.get("interrupted"):
        return f"{name} was stopped by hand {after}, at step {final['steps']} of {goal}{with_outcome}."
    if not outcome:
        return f"{name} ended {after}."
    milestone = ""
    if targets is not None:
        time = targets.times[targets.default][0]
        target = targets.metric.target_text(targets.levels[targets.default])
        which = "" if targets.metric.name in outcome else f"{targets.metric.name}: "
        milestone = f" ({which}{target} after {run_time(time, run.time_unit)})"
    num_workers = int(run.config.get("workers", 0))
    workers = counted(num_workers, "worker")
    if final.get("workers_alive", num_workers) < num_workers:
        workers += f", {final['workers_alive']} of them alive at the end,"
    price = f"sent {size(final.get('bytes_sent'))}"
    if final.get("consensus"):
        price += f" and ended {figure(final['consensus'])} apart (consensus distance)"
    busy = percent(final.get("utilization"), digits=0)
    return f"{name} reached {outcome} {after}{milestone}; its {workers} were busy {busy} of the time, {price}."


def _outcome(run: StoredRun) -> str:
    """The most telling of the last figures: ``97.2% accuracy``; empty if there is none."""
    for metric in METRICS:
        value = metric.value(run.final)
        if value is not None:
            return metric.text(value)
    return ""


def _about_several(names: Sequence[str], runs: Sequence[StoredRun], targets: Targets) -> str:
    """Who was the fastest to the default target, by how much, at what price."""
    metric, level, times = targets.metric, targets.levels[targets.default], targets.times[targets.default]
    goal = f"{metric.target_text(level)} {metric.name}" if metric.higher_is_better else metric.text(level)
    failures = _failures(names, runs, times)
    reached = {k: time for k, time in enumerate(times) if time is not None and not runs[k].problem}
    if not reached:
        return f"No run that ended well reached {goal}{failures}."
    fastest_time = min(reached.values())
    tied = [k for k, time in reached.items() if time <= TIE * fastest_time]
    slower = [k for k in reached if k not in tied]
    # Of equally fast runs the sentence is about the one that ended best.
    winner = max(tied, key=lambda k: _goodness(metric, runs[k]))
    name, time = names[winner], _time_text(runs[winner], reached[winner])
    start = "" if all(run.finished for run in runs) else "So far, "
    if len(reached) == 1:
        sentence = f"{start}{'only' if start else 'Only'} {name} reached {goal}, after {time}"
    elif not slower:
        together, outcome = _listed([names[k] for k in tied]), _outcome(runs[winner])
        sentence = f"{start}{together} were equally fast to {goal}, {time}; {name} ended best, with {outcome}"
    else:
        # Against the first run of the table, as the speed-up, unless it is one of the fastest itself.
        other = 0 if 0 in slower else min(slower, key=lambda k: reached[k])
        equals = [names[k] for k in tied if k != winner]
        level_with = f" (level with {_listed(equals)})" if equals else ""
        factor = figure(reached[other] / max(fastest_time, 1e-9))
        other_time = run_time(reached[other], runs[other].time_unit)
        price = _price(metric, runs[winner].final, runs[other].final, names[other])
        sentence = (
            f"{start}{name} was the fastest to {goal}{level_with}: {time}, {factor} times as fast as {names[other]} "
            f"({other_time}), {price}"
        )
    return f"{sentence}{failures}."


def _price(metric: Metric, final: Mapping[str, Any], other: Mapping[str, Any], other_name: str) -> str:
    """What a run is worse at than another one."""
    prices = []
    quality = next((name for name in ("accuracy", "loss") if None not in (final.get(name), other.get(name))), "")
    if quality == "accuracy" and other["accuracy"] - final["accuracy"] >= NOTICEABLE_ACCURACY:
        prices.append(f"{100 * (other['accuracy'] - final['accuracy']):.1f} percentage points of final accuracy")
    if quality == "loss" and final["loss"] > NOTICEABLE * other["loss"]:
        prices.append(f"a final loss of {figure(final['loss'])} instead of {figure(other['loss'])}")
    if other.get("bytes_sent") and final["bytes_sent"] > NOTICEABLE * other["bytes_sent"]:
        prices.append(f"{figure(final['bytes_sent'] / other['bytes_sent'])} times the bytes")
    distances = [point.get("consensus") or 0.0 for point in (final, other)]
    if metric.field != "consensus" and distances[0] > NOTICEABLE * distances[1]:
        apart = f"models that end {figure(distances[0])} apart"
        prices.append(f"{apart} (consensus distance; {other_name}: {figure(distances[1])})")
    if prices:
        return f"at the price of {_listed(prices)}"
    unharmed = [quality, "bytes", "consensus distance" if metric.field != "consensus" else ""]
    return f"at no price in {_listed(list(filter(None, unharmed)))}"


def _failures(names: Sequence[str], runs: Sequence[StoredRun], times: Sequence[float | None] | None) -> str:
    """The runs that went wrong, and those that did not reach the target at any of ``times``."""
    causes: dict[str, list[str]] = {}
    for k, (name, run) in enumerate(zip(names, runs, strict=True)):
        if run.problem:
            causes.setdefault(run.problem.partition(":")[0], []).append(name)
        elif times is not None and times[k] is None:
            causes.setdefault("did not reach it" if run.finished else "still on the way", []).append(name)
    return "".join(f"; {_listed(failing)} {cause}" for cause, failing in causes.items())


def _goodness(metric: Metric, run: StoredRun) -> float:
    value = metric.value(run.final)
    if value is None:
        return float("-inf")
    return value if metric.higher_is_better else -value


def _time_text(run: StoredRun, time: float) -> str:
    """``3.2 s``, ``3.2 s of simulated time``, ``12 gradients per worker``."""
    if run.time_unit != "s":
        return f"{time:.4g} {'gradient' if time == 1 else 'gradients'} per worker"
    return duration(time) + (" of simulated time" if run.about.get("world") == "virtual" else "")


def _listed(items: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
