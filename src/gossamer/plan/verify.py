"""Verify predictions: train with real workers and time their steps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gossamer.errors import InputError
from gossamer.methods import find
from gossamer.plan.predict import Candidate, Prediction
from gossamer.plan.recommend import BASELINE, Plan
from gossamer.process.store.rank_info import RankInfo
from gossamer.runs.monitor import TrainingResult
from gossamer.train.job_spec import JobSpec, real_settings
from gossamer.train.launcher import LocalStore, counting_stop_signals
from gossamer.train.supervisor import train_as_worker, train_locally

RUN_S = 10.0
"""How long one candidate runs, about."""
MIN_STEPS, MAX_STEPS = 24, 400
NUM_VERIFIED = 3
"""Methods that run besides all-reduce."""


@dataclass(frozen=True)
class Check:
    prediction: Prediction
    measured_s: float

    @property
    def error(self) -> float:
        """The error of the prediction, relative to the measured time."""
        return self.prediction.step_s / self.measured_s - 1

    def document(self) -> dict[str, Any]:
        candidate = self.prediction.candidate
        return {
            "method": candidate.name,
            "topology": candidate.topology,
            "options": dict(candidate.options),
            "predicted_s": self.prediction.step_s,
            "measured_s": self.measured_s,
            "error": self.error,
        }


def to_verify(plan: Plan) -> list[Prediction]:
    """Return the predictions worth verifying: all-reduce, the winner, and the best candidates of the next methods."""
    baseline, winner = plan.baselines[plan.winner.ranks], plan.winner
    best = {BASELINE if winner.replica is None else "": baseline, winner.candidate.method: winner}
    for prediction in plan.ranking:
        alike = prediction.workers == winner.workers and prediction.replica == winner.replica
        if alike and not plan.objection(prediction):
            best.setdefault(prediction.candidate.method, prediction)
    return list(best.values())[: 1 + NUM_VERIFIED]


def num_steps(step_s: float, candidate: Candidate, seconds: float = RUN_S) -> int:
    """Return the number of steps that take about this long, in whole periods."""
    period = max(1, round(candidate.period))
    steps = min(MAX_STEPS, max(MIN_STEPS, seconds / step_s))
    return period * math.ceil(steps / period)


def train_settings(candidate: Candidate, settings: Mapping[str, Any], steps: int) -> dict[str, Any]:
    values = {**settings, **candidate.settings, "steps": steps}
    if any(field.name == "warmup" for field in dataclasses.fields(find(candidate.method).Config)):
        # Predictions are about the steps after the warm-up.
        values.setdefault("warmup", 1)
    return values


def replica_settings(prediction: Prediction) -> dict[str, Any]:
    """Return the settings of ``gossamer train`` for the replicas of a prediction; none without replicas."""
    if prediction.replica is None:
        return {}
    return {"replica_size": prediction.replica_size, "inside": prediction.replica.inside}


def step_s(result: TrainingResult) -> float:
    """Return the time in which workers make one step each on average."""
    if result.failed or not result.final.total_steps:
        raise InputError(f"the run failed: {result.failed or 'no worker finished a step'}")
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
    rank_info = dataclasses.replace(rank_info, prefix=f"{rank_info.prefix}{name}/")
    taken = train_as_worker(job_spec, run, rank_info, show=ignore, on_point=ignore)
    return None if taken is None else step_s(taken)
