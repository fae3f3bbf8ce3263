"""One worker of ``benchmarks/quality.py``: probes, plans (worker 0), and trains with the chosen candidates.

While they train, worker 0 looks at the average of all models, which the workers keep in files: they share a machine.
"""

from __future__ import annotations

import copy
import itertools
import json
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils import vector_to_parameters

import gossamer
from gossamer.plan import cluster_file
from gossamer.plan.cluster_spec import ClusterSpec
from gossamer.plan.learning_curve import when_reached
from gossamer.plan.quality import QualityPlan, Trial, make_quality_plan
from gossamer.plan.recommend import Workload, make_plan
from gossamer.plan.target import LOSS, Target, parse_target
from gossamer.process.store.rank_info import find_rank, find_rank_info
from gossamer.train.job_spec import JobSpec, real_settings
from gossamer.train.worker_task import WorkerTask
from planner_worker import probe_cluster

MAX_MEASURED = 6
CLOSE_FACTOR = 1.5
"""Candidates are measured whose predicted time is at most this many times the best one, and all-reduce."""

PATIENCE = 2.0
"""How long a run may take, in predicted times to the target."""

MIN_RUN_S, MAX_RUN_S = 8.0, 60.0
FILE_WAIT_S = 600.0


def wait_for(path: Path) -> Path:
    until = time.monotonic() + FILE_WAIT_S
    while not path.exists():
        if time.monotonic() > until:
            raise SystemExit(f"no {path.name} after {FILE_WAIT_S:.0f} s")
        time.sleep(0.05)
    return path


def plan_for_quality(spec: ClusterSpec, values: dict[str, Any], target: Target, budget_s: float) -> QualityPlan:
    plan = make_plan(spec, Workload(values["task"], spec.parameters, "sgd"))
    settings = {name: value for name, value in values.items() if name not in ("compute", "straggler")}
    return make_quality_plan(plan, settings, target, budget_s)


def to_measure(plan: QualityPlan) -> list[Trial]:
    """Return the winner, all-reduce, and the others that may be as fast, the best of each method first."""
    best_s = plan.trials[0].time_s
    close = [trial for trial in plan.trials if trial.time_s <= CLOSE_FACTOR * best_s]
    first_of_method = {trial.prediction.candidate.method: trial for trial in reversed(close)}
    chosen = [plan.winner, plan.baseline]
    for trial in [*sorted(first_of_method.values(), key=lambda trial: trial.time_s), *close]:
        if trial not in chosen and len(chosen) < MAX_MEASURED:
            chosen.append(trial)
    return chosen if plan.winner is not plan.baseline else chosen[1:]


class Average:
    """The average of the workers' models, by way of a file of each worker's newest weights."""

    def __init__(self, folder: Path, rank: int, workers: int, task: WorkerTask, target: Target) -> None:
        self._task, self._target, self._model = task, target, copy.deepcopy(task.plain_model)
        initial = task.parameters().numpy()
        paths = [folder / f"weights-{each}" for each in range(workers)]
        unfinished = paths[rank].with_suffix(".part")
        initial.tofile(unfinished)
        unfinished.rename(paths[rank])
        self._files = [np.memmap(wait_for(path), np.float32, "r+") for path in paths]
        self._own = self._files[rank]

    def publish(self) -> None:
        self._own[:] = self._task.parameters().numpy()

    def error(self) -> float:
        task, model = self._task, self._task.plain_model
        vector_to_parameters(torch.from_numpy(np.mean(self._files, axis=0)), self._model.parameters())
        task.plain_model = self._model
        try:
            loss, accuracy = task.evaluate()
        finally:
            task.plain_model = model
        error = loss if self._target.measure == LOSS else 1.0 - (accuracy or 0.0)
        assert error is not None
        return error


def train(
    values: dict[str, Any], candidate: dict[str, Any], target: Target, seconds: float, folder: Path
) -> float | None:
    """Train as one of the workers until the target is reached; return on worker 0 when it was."""
    (settings,) = real_settings({**values, **candidate}, None)
    job_spec, rank = JobSpec(settings), find_rank()[0]
    run = job_spec.run()
    task = WorkerTask(run, rank)
    pace = job_spec.pace(run, rank, threading.Event())
    average, enough = Average(folder, rank, run.config.workers, task, target), folder / "enough"
    swarm = gossamer.join(task.plain_model, task.optimizer, seed=values["seed"], **candidate)
    times, errors, start = [], [], time.monotonic()
    for number in itertools.count():
        began = time.monotonic()
        if enough.exists() or began - start > seconds:
            break
        task.gradient(number)
        if rank == 0 and number:
            # The accelerator would be at work: this takes a small part of the time for which the worker waits.
            times.append(began - start)
            errors.append(average.error())
            if errors[-1] <= target.error:
                enough.touch()
        pace.delay(began)
        task.update(number)
        average.publish()
    swarm.finish()
    found = when_reached(times, errors, target.error) if times else None
    return None if found is None or found.extrapolated else found.steps


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(sys.argv[1]).parent
    rank_info, values, target = find_rank_info(), settings["values"], parse_target(settings["until"])
    rank, workers = rank_info.rank, rank_info.workers
    spec = probe_cluster(values, replace(rank_info, prefix=f"{rank_info.prefix}probe/"), settings["probe_s"])
    runs_file = folder / "runs.json"
    rows: list[dict[str, Any]] = []
    if rank == 0:
        cluster_file.write(spec, folder / "cluster.toml")
        plan = plan_for_quality(spec, values, target, settings["budget_s"])
        measured = to_measure(plan)
        rows = [trial.document(plan.baseline) | {"recommended": trial is plan.winner} for trial in measured]
        runs = [
            {
                "candidate": trial.prediction.candidate.settings,
                "seconds": min(MAX_RUN_S, max(MIN_RUN_S, PATIENCE * trial.time_s)),
            }
            for trial in measured
        ]
        unfinished = runs_file.with_suffix(".part")
        unfinished.write_text(json.dumps(runs))
        unfinished.rename(runs_file)
    for number, run in enumerate(json.loads(wait_for(runs_file).read_text())):
        reached = []
        for seed in settings["seeds"]:
            run_folder = folder / f"{number}-{seed}"
            run_folder.mkdir(exist_ok=True)
            seeded = {**values, "workers": workers, "seed": seed}
            reached.append(train(seeded, run["candidate"], target, run["seconds"], run_folder))
        if rank == 0:
            rows[number]["measured_s"] = reached
            print(
                f"  {rows[number]['method']} {rows[number]['topology']}: {rows[number]['time_s']} {reached}", flush=True
            )
    if rank == 0:
        Path(settings["out"]).write_text(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
