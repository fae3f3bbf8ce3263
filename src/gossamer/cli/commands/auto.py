"""``--method auto``: what ``gossamer train`` does before it knows its method."""

from __future__ import annotations

import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from gossamer.cli.commands.probe import probe_locally
from gossamer.config import AUTO, resolve
from gossamer.errors import InputError
from gossamer.plan import cluster_file
from gossamer.plan.auto import PROBE_S, Choice, choose
from gossamer.plan.recommend import BASELINE, Workload, make_plan
from gossamer.process.store.rank_info import RankInfo
from gossamer.train.job_spec import JobSpec, real_settings
from gossamer.train.worker_task import WorkerTask


def settled(values: dict[str, Any], rank_info: RankInfo | None) -> dict[str, Any]:
    """Return the settings with the method that ``auto`` chooses; unchanged if they name one."""
    if values.get("method") != AUTO:
        return values
    if "topology" in values:
        raise InputError("--method auto chooses the topology too: leave --topology out, or name a method")
    basis = {**values, "method": BASELINE}
    choice = _probed_here(basis) if rank_info is None else _probed_together(basis, rank_info)
    chosen = {**values, **choice.candidate.settings}
    if choice.candidate.uses_topology and choice.spec.per_node > 1 and choice.spec.nodes > 1:
        chosen["nodes"] = choice.spec.nodes
    if rank_info is None or rank_info.rank == 0:
        print(f"auto: {choice.verdict}", file=sys.stderr, flush=True)
    return chosen


def _probed_here(values: dict[str, Any]) -> Choice:
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
    return Choice(plan.winner.candidate, plan.verdict, spec)


def _probed_together(values: dict[str, Any], rank_info: RankInfo) -> Choice:
    (settings,) = real_settings(values, rank_info.workers)
    job_spec = JobSpec(settings)
    run = job_spec.run()
    pace = job_spec.pace(run, rank_info.rank, threading.Event())
    return choose(rank_info, WorkerTask(run, rank_info.rank), pace.delay, run.config.optimizer, knows_nodes=True)
