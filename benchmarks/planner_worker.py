"""One worker of ``benchmarks/planner.py``: probes, then trains with every candidate in turn, in one process."""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from gossamer.plan import clusterfile
from gossamer.plan.forms import Scene
from gossamer.plan.machines import Machines
from gossamer.plan.meeting import Meeting
from gossamer.plan.predict import Candidate, predict
from gossamer.plan.probe import probe
from gossamer.plan.verify import measure, num_steps, settings_of
from gossamer.process.place import Place, find_place
from gossamer.seeds import stream
from gossamer.train.job import Job as TrainJob
from gossamer.train.order import Order, real_settings
from gossamer.train.pace import Pace


def probed(values: dict[str, Any], place: Place, seconds: float) -> Machines:
    (settings,) = real_settings({"method": "allreduce", **values}, place.workers)
    order = Order(settings)
    run = order.run()
    rng = stream(1, "compute", place.rank)
    pace = Pace(order.compute(place.workers), order.waits, place.rank, rng, threading.Event())
    meeting = Meeting(place)
    findings = probe(meeting, TrainJob(run, place.rank), pace.keep, seconds, lambda what: None)
    assert not findings.lost, findings.lost
    meeting.tell("done", True)
    meeting.close()
    return findings.machines()


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    place = find_place()
    values = spec["values"]
    began = time.monotonic()
    machines = probed(values, replace(place, prefix=f"{place.prefix}probe/"), spec["probe_s"])
    probe_s = time.monotonic() - began
    scene = Scene(machines, machines.parameters, num_runs=16)
    candidates = [Candidate(*each) for each in spec["candidates"]]
    predictions = [predict(scene, each) for each in candidates]
    rows = []
    for number, (candidate, prediction) in enumerate(zip(candidates, predictions, strict=True)):
        steps = num_steps(prediction.step_s, candidate, spec["run_s"])
        measured = measure(settings_of(candidate, values, steps), place, f"run{number}")
        rows.append(
            {
                "method": candidate.method,
                "topology": candidate.topology,
                "options": dict(candidate.options),
                "steps": steps,
                "measured_s": measured,
            }
        )
        if place.rank == 0:
            print(f"  {candidate.label} {candidate.topology}: {prediction.step_s:.4f} {measured:.4f}", flush=True)
    if place.rank == 0:
        found = {"rows": rows, "probe_s": probe_s}
        Path(spec["out"]).write_text(json.dumps(found))
        clusterfile.write(machines, Path(spec["out"]).with_suffix(".toml"))


if __name__ == "__main__":
    main()
