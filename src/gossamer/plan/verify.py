"""Predictions held to what happens: run a plan for real and time its steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gossamer.errors import InputError
from gossamer.plan.predict import Candidate, Prediction
from gossamer.plan.recommend import Plan
from gossamer.process.store.rank_info import RankInfo
from gossamer.train.job_spec import JobSpec, real_settings
from gossamer.train.launcher import LocalStore, counting_stop_signals
from gossamer.train.monitor import TrainingResult
from gossamer.train.supervisor import train_as_worker, train_locally

RUN_S = 10.0
"""How long one configuration is run, about."""
LEAST_STEPS, MOST_STEPS = 24, 400
NUM_CHECKED = 3


@dataclass(frozen=True)
class Check:
    """A prediction beside what was measured."""

    prediction: Prediction
    measured_s: float

    @property
    def error(self) -> float:
        """How far the prediction was off, relative to what was measured."""
        return self.prediction.step_s / self.measured_s - 1

    def document(self) -> dict[str, Any]:
        candidate = self.prediction.candidate
        return {
            "method": candidate.method,
            "topology": candidate.topology,
            "options": dict(candidate.options),
            "predicted_s": self.prediction.step_s,
            "measured_s": self.measured_s,
            "error": self.error,
        }


def chosen(plan: Plan) -> list[Prediction]:
    """What is worth running: all-reduce, the winner, and the best of the next methods."""
    baseline = plan.baselines[plan.winner.workers]
    best: dict[str, Prediction] = {baseline.candidate.method: baseline, plan.winner.candidate.method: plan.winner}
    for each in plan.ranking:
        if each.workers == plan.winner.workers and not plan.why_not(each):
            best.setdefault(each.candidate.method, each)
    return list(best.values())[: 1 + NUM_CHECKED]


def num_steps(step_s: float, candidate: Candidate, seconds: float = RUN_S) -> int:
    """Steps that take about so long, whole periods of them."""
    period = max(1, round(candidate.period))
    wanted = min(MOST_STEPS, max(LEAST_STEPS, seconds / step_s))
    return period * math.ceil(wanted / period)


def settings_of(candidate: Candidate, settings: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """The settings of ``gossamer train`` for a candidate."""
    values = {**settings, "method": candidate.method, **candidate.options, "steps": steps}
    if candidate.over_a_graph:
        values["topology"] = candidate.topology
    if candidate.method == "divisible":
        # The dense steps at its start are not what is predicted.
        values.setdefault("warmup", 1)
    return values


def step_s(result: TrainingResult) -> float:
    """Return the time in which workers make one step each on average."""
    if result.failed or not result.final.total_steps:
        raise InputError(f"the run failed: {result.failed or 'no steps were made'}")
    speeds = [1 / status.step_s for status in result.status if status.step_s > 0]
    return len(speeds) / sum(speeds)


def measure(values: dict[str, Any], rank_info: RankInfo | None, name: str) -> float | None:
    """Train for real, with workers started here or as the worker of ``rank_info``; return the step time on rank 0."""
    (settings,) = real_settings(values, None if rank_info is None else rank_info.workers)
    job_spec = JobSpec(settings)
    run = job_spec.run()

    def ignore(*_: Any) -> None:
        pass

    if rank_info is None:
        with counting_stop_signals() as signals:
            result = train_locally(job_spec, run, LocalStore(), signals, show=ignore, on_point=ignore, restart=False)
            if signals.count:
                raise KeyboardInterrupt
        return step_s(result)
    rank_info = replace(rank_info, prefix=f"{rank_info.prefix}{name}/")
    taken = train_as_worker(job_spec, run, rank_info, show=ignore, on_point=ignore)
    return None if taken is None else step_s(taken)
