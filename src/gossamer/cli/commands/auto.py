"""``--method auto``: what ``gossamer train`` does before it knows its method."""

from __future__ import annotations

import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from gossamer.config import resolve
from gossamer.errors import InputError
from gossamer.plan import cluster_file, local
from gossamer.plan.auto import AUTO, SECONDS, Choice, choose
from gossamer.plan.machines import Machines
from gossamer.plan.recommend import Workload, make_plan
from gossamer.process.store.rank_info import RankInfo
from gossamer.seeds import stream
from gossamer.train.job_spec import DEFAULT_WORKERS, JobSpec, real_settings
from gossamer.train.pace import Pace
from gossamer.train.worker_task import WorkerTask


def settled(values: dict[str, Any], rank_info: RankInfo | None) -> dict[str, Any]:
    """The settings with a method in the place of ``auto``; as they were if they name one."""
    if values.get("method") != AUTO:
        return values
    if "topology" in values:
        raise InputError("--method auto chooses the topology too: leave --topology out, or name a method")
    basis = {**values, "method": "allreduce"}
    machines, choice = _probed_here(basis) if rank_info is None else _probed_together(basis, rank_info)
    candidate = choice.candidate
    chosen = {**values, "method": candidate.method, **candidate.options}
    if candidate.over_a_graph:
        chosen["topology"] = candidate.topology
        if machines.per_node > 1 and machines.nodes > 1:
            chosen["nodes"] = machines.nodes
    if rank_info is None or rank_info.rank == 0:
        print(f"auto: {choice.verdict}", file=sys.stderr, flush=True)
    return chosen


def _probed_here(values: dict[str, Any]) -> tuple[Machines, Choice]:
    """Probe with workers started here, and plan."""
    # What is wrong with the settings is said before any process is started.
    (settings,) = real_settings(values, None)
    workers = int(settings.get("workers", DEFAULT_WORKERS))
    (run,) = resolve(settings)
    given = [part for name, value in values.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    with tempfile.TemporaryDirectory(prefix="gossamer-") as scrap:
        file = Path(scrap) / "cluster.toml"
        print(f"auto: probing for about {SECONDS:g} s", file=sys.stderr, flush=True)
        code = local.launch(
            ["probe", *given, "--workers", str(workers), "--seconds", f"{SECONDS:g}", "--out", str(file), "--json"],
            workers,
            quiet=True,
        )
        if code != 0 or not file.exists():
            raise InputError("--method auto could not measure these workers: name a method")
        machines = cluster_file.read(file)
    plan = make_plan(machines, Workload(run.task.name, machines.parameters, run.config.optimizer))
    return machines, Choice(plan.winner.candidate, plan.verdict, machines)


def _probed_together(values: dict[str, Any], rank_info: RankInfo) -> tuple[Machines, Choice]:
    """Probe as one of the workers that others have started, and plan."""
    (settings,) = real_settings(values, rank_info.workers)
    job_spec = JobSpec(settings)
    run = job_spec.run()
    rng = stream(run.config.seed, "compute", rank_info.rank)
    pace = Pace(job_spec.compute(rank_info.workers), job_spec.waits, rank_info.rank, rng, threading.Event())
    choice = choose(rank_info, WorkerTask(run, rank_info.rank), pace.keep, run.config.optimizer, knows_nodes=True)
    return choice.machines, choice
