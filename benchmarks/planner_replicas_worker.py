"""One rank of ``benchmarks/planner_replicas.py``: probes the cluster, then trains with every candidate."""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from gossamer.plan import cluster_file
from gossamer.plan.cluster_spec import ClusterSpec
from gossamer.plan.predict import Candidate, predict
from gossamer.plan.probe.prober import probe
from gossamer.plan.probe.replica_steps import ReplicaSteps
from gossamer.plan.probe.session import ProbeSession
from gossamer.plan.runtime_model.cluster_model import ClusterModel
from gossamer.plan.verify import num_steps, train_settings
from gossamer.process.store.home_store import Host
from gossamer.process.store.rank_info import RankInfo, find_rank_info
from gossamer.train.entrypoint import run_worker
from gossamer.train.job_spec import JobSpec, real_settings
from gossamer.train.replica.place import ReplicaPlace, shard_prefix
from gossamer.train.worker_task import WorkerTask


def probe_cluster(values: dict[str, Any], rank_info: RankInfo, seconds: float) -> ClusterSpec:
    job_spec = JobSpec(real_settings({"method": "allreduce", **values}, None)[0])
    run, size = job_spec.run(), values["replica_size"]
    replica, shard = divmod(rank_info.rank, size)
    pace = job_spec.pace(run, replica, threading.Event(), shard)
    session = ProbeSession(replace(rank_info, prefix=f"{rank_info.prefix}probe/"))
    inside = ReplicaSteps(session, job_spec, rank_info)
    findings = probe(session, WorkerTask(run, replica), pace.delay, seconds, lambda phase: None, inside)
    assert not findings.lost, findings.lost
    session.share("done", True)
    inside.close()
    session.close()
    return findings.cluster_spec()


def train(values: dict[str, Any], rank_info: RankInfo, name: str, folder: str) -> float:
    """Train for real; return the time of this rank's steps."""
    replica, shard = divmod(rank_info.rank, values["replica_size"])
    of_shard = replace(
        rank_info,
        rank=replica,
        workers=values["workers"],
        prefix=f"{shard_prefix(rank_info.prefix + name, shard)}/",
        # All shards share the store of the first one.
        store_host=Host.RANK_0 if shard == 0 else Host.LAUNCHER,
    )
    place = ReplicaPlace(shard, values["replica_size"], f"{folder}/{name}-{replica}")
    status = run_worker(JobSpec(real_settings(values, None)[0]), of_shard, place=place)
    return status.step_s


def main() -> None:
    order = json.loads(sys.argv[1])
    rank_info = find_rank_info()
    values, folder = order["values"], order["folder"]
    spec = probe_cluster(values, rank_info, order["probe_s"])
    if rank_info.rank == 0:
        cluster_file.write(spec, Path(folder) / "cluster.toml")
    model = ClusterModel(spec, spec.parameters, num_runs=16)
    measured = []
    for number, fields in enumerate(order["candidates"]):
        candidate = Candidate(*fields)
        steps = num_steps(predict(model, candidate).step_s, candidate, order["run_s"])
        # No evaluation during the training.
        settings = {**train_settings(candidate, values, steps), "eval_every": 1_000_000}
        measured.append(train(settings, rank_info, f"run{number}", folder))
    (Path(folder) / f"{rank_info.rank}.json").write_text(json.dumps(measured))


if __name__ == "__main__":
    main()
