"""One worker of ``benchmarks/planner.py``: probes the cluster, then trains with every candidate, in one process."""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from gossamer.plan import cluster_file
from gossamer.plan.cluster_spec import ClusterSpec
from gossamer.plan.predict import Candidate, predict
from gossamer.plan.probe.prober import probe
from gossamer.plan.probe.session import ProbeSession
from gossamer.plan.runtime_model.cluster_model import ClusterModel
from gossamer.plan.verify import measure, num_steps, train_settings
from gossamer.process.store.rank_info import RankInfo, find_rank_info
from gossamer.train.job_spec import JobSpec, real_settings
from gossamer.train.worker_task import WorkerTask


def probe_cluster(values: dict[str, Any], rank_info: RankInfo, seconds: float) -> ClusterSpec:
    (settings,) = real_settings({"method": "allreduce", "seed": 1, **values}, rank_info.workers)
    job_spec = JobSpec(settings)
    run = job_spec.run()
    pace = job_spec.pace(run, rank_info.rank, threading.Event())
    session = ProbeSession(rank_info)
    findings = probe(session, WorkerTask(run, rank_info.rank), pace.delay, seconds, lambda phase: None)
    assert not findings.lost, findings.lost
    session.share("done", True)
    session.close()
    return findings.cluster_spec()


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    rank_info = find_rank_info()
    values = settings["values"]
    began = time.monotonic()
    spec = probe_cluster(values, replace(rank_info, prefix=f"{rank_info.prefix}probe/"), settings["probe_s"])
    probe_s = time.monotonic() - began
    model = ClusterModel(spec, spec.parameters, num_runs=16)
    candidates = [Candidate(*fields) for fields in settings["candidates"]]
    predictions = [predict(model, candidate).step_s for candidate in candidates]
    rows = []
    for number, (candidate, predicted_s) in enumerate(zip(candidates, predictions, strict=True)):
        steps = num_steps(predicted_s, candidate, settings["run_s"])
        measured_s = measure(train_settings(candidate, values, steps), rank_info, f"run{number}")
        rows.append(
            {
                "method": candidate.method,
                "topology": candidate.topology,
                "options": dict(candidate.options),
                "steps": steps,
                "measured_s": measured_s,
            }
        )
        if rank_info.rank == 0:
            print(f"  {candidate.label} {candidate.topology}: {predicted_s:.4f} {measured_s:.4f}", flush=True)
    if rank_info.rank == 0:
        Path(settings["out"]).write_text(json.dumps({"rows": rows, "probe_s": probe_s}))
        cluster_file.write(spec, Path(settings["out"]).with_suffix(".toml"))


if __name__ == "__main__":
    main()
