"""``--method auto``: what ``gossamer train`` does before it knows its method."""

from __future__ import annotations

import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from gossamer.cli.arguments import PLAN_BUDGET
from gossamer.cli.commands.probe import probe_locally
from gossamer.config import AUTO, resolve
from gossamer.errors import InputError
from gossamer.hardware import parse_duration
from gossamer.plan import cluster_file
from gossamer.plan.auto import PROBE_S, Choice, choose
from gossamer.plan.quality import make_quality_plan
from gossamer.plan.recommend import BASELINE, Workload, make_plan
from gossamer.plan.target import Target, parse_target
from gossamer.process.store.rank_info import RankInfo
from gossamer.train.job_spec import JobSpec, real_settings
from gossamer.train.worker_task import WorkerTask


def settled(
    values: dict[str, Any], rank_info: RankInfo | None, until: str | None = None, budget: str | None = None
) -> dict[str, Any]:
    """Return the settings with the method that ``auto`` chooses; unchanged if they name one.

    ``until``, ``budget``: the target to choose by, and how long candidates may train for it, as given.
    """
    if values.get("method") != AUTO:
        for option, text in (("--until", until), ("--budget", budget)):
            if text is not None:
                raise InputError(f"{option} is for --method auto, which chooses by it: leave it out")
        return values
    if budget is not None and until is None:
        raise InputError("--budget is for --until, which is missing: give a target, such as accuracy=0.9")
    target = None if until is None else parse_target(until)
    budget_s = parse_duration(budget or PLAN_BUDGET, "--budget")
    if target is not None and rank_info is not None:
        raise InputError(
            "--until is for workers that this command starts: under torchrun, use gossamer probe and plan --until first"
        )
    if str(values.get("replica_size", 1)) != "1":
        raise InputError(
            "--method auto does not work with --replica-size: let gossamer probe and plan compare with --replica-size, "
            "and name the method that they recommend"
        )
    if "topology" in values:
        raise InputError("--method auto chooses the topology too: leave --topology out, or name a method")
    basis = {**values, "method": BASELINE}
    choice = _probed_here(basis, target, budget_s) if rank_info is None else _probed_together(basis, rank_info)
    chosen = {**values, **choice.candidate.settings}
    if choice.candidate.uses_topology and choice.spec.per_node > 1 and choice.spec.nodes > 1:
        chosen["nodes"] = choice.spec.nodes
    if rank_info is None or rank_info.rank == 0:
        print(f"auto: {choice.verdict}", file=sys.stderr, flush=True)
    return chosen


def _probed_here(values: dict[str, Any], target: Target | None, budget_s: float) -> Choice:
    (settings,) = real_settings(values, None)
    (run,) = resolve(settings)
    with tempfile.TemporaryDirectory(prefix="gossamer-") as scratch:
        file = Path(scratch) / "cluster.toml"
        print(f"auto: probing for about {PROBE_S:g} s", file=sys.stderr, flush=True)
        code = probe_locally(JobSpec(settings), file, PROBE_S, as_json=True, logs=Path(scratch) / "logs")
        if code != 0 or not file.exists():
            raise InputError("--method auto could not measure these workers: name a method")
        spec = cluster_file.read(file)
    plan = make_plan(spec, Workload(run.task.name, spec.parameters, run.config.optimizer))
    if target is not None:
        print(f"auto: training candidates to {target} for up to {budget_s:g} s", file=sys.stderr, flush=True)
        # How long and how slow real workers train is not for the virtual ones, which have the probed times.
        unused = ("method", "workers", "steps", "epochs", "compute", "straggler", "nodes", "eval_every", "clock")
        trained = {name: value for name, value in values.items() if name not in unused}
        quality = make_quality_plan(plan, trained, target, budget_s)
        return Choice(quality.winner.prediction.candidate, quality.verdict, spec)
    return Choice(plan.winner.candidate, plan.verdict, spec)


def _probed_together(values: dict[str, Any], rank_info: RankInfo) -> Choice:
    (settings,) = real_settings(values, rank_info.workers)
    job_spec = JobSpec(settings)
    run = job_spec.run()
    pace = job_spec.pace(run, rank_info.rank, threading.Event())
    return choose(rank_info, WorkerTask(run, rank_info.rank), pace.delay, run.config.optimizer, knows_nodes=True)
