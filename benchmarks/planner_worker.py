"""One worker of ``benchmarks/planner.py``: probes, then trains with every candidate in turn, in one process."""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from gossamer.plan import cluster_file
from gossamer.plan.closed_form import Scene
from gossamer.plan.machines import Machines
from gossamer.plan.predict import Candidate, predict
from gossamer.plan.probe.prober import probe
from gossamer.plan.probe.session import ProbeSession
from gossamer.plan.verify import measure, num_steps, settings_of
from gossamer.process.store.rank_info import RankInfo, find_rank_info
from gossamer.seeds import stream
from gossamer.train.job_spec import JobSpec, real_settings
from gossamer.train.pace import Pace
from gossamer.train.worker_task import WorkerTask as TrainJob


def probed(values: dict[str, Any], rank_info: RankInfo, seconds: float) -> Machines:
    (settings,) = real_settings({"method": "allreduce", **values}, rank_info.workers)
    job_spec = JobSpec(settings)
    run = job_spec.run()
    rng = stream(1, "compute", rank_info.rank)
    pace = Pace(job_spec.compute(rank_info.workers), job_spec.waits, rank_info.rank, rng, threading.Event())
    session = ProbeSession(rank_info)
    findings = probe(session, TrainJob(run, rank_info.rank), pace.keep, seconds, lambda what: None)
    assert not findings.lost, findings.lost
    session.tell("done", True)
    session.close()
    return findings.machines()


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    rank_info = find_rank_info()
    values = spec["values"]
    began = time.monotonic()
    machines = probed(values, replace(rank_info, prefix=f"{rank_info.prefix}probe/"), spec["probe_s"])
    probe_s = time.monotonic() - began
    scene = Scene(machines, machines.parameters, num_runs=16)
    candidates = [Candidate(*each) for each in spec["candidates"]]
    predictions = [predict(scene, each) for each in candidates]
    rows = []
    for number, (candidate, prediction) in enumerate(zip(candidates, predictions, strict=True)):
        steps = num_steps(prediction.step_s, candidate, spec["run_s"])
        measured = measure(settings_of(candidate, values, steps), rank_info, f"run{number}")
        rows.append(
            {
                "method": candidate.method,
                "topology": candidate.topology,
                "options": dict(candidate.options),
                "steps": steps,
                "measured_s": measured,
            }
        )
        if rank_info.rank == 0:
            print(f"  {candidate.label} {candidate.topology}: {prediction.step_s:.4f} {measured:.4f}", flush=True)
    if rank_info.rank == 0:
        found = {"rows": rows, "probe_s": probe_s}
        Path(spec["out"]).write_text(json.dumps(found))
        cluster_file.write(machines, Path(spec["out"]).with_suffix(".toml"))


if __name__ == "__main__":
    main()
