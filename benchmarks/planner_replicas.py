"""Compare predicted with measured step times of replicas: real ranks, on slow links. Prints markdown tables.

    python benchmarks/planner_replicas.py                        # all six settings, seven minutes; needs root
    python benchmarks/planner_replicas.py --only 2x2-fsdp-100    # one of them
    python benchmarks/planner_replicas.py --table                # the tables of the stored results

A host is a network namespace with one replica of two ranks, DDP or FSDP2 inside (gloo, CPU). Links between hosts carry
100 or 1,000 Mbit/s, or whatever the machine can do. Compute is a wait of 100 ms a step, as on an accelerator, spread
over the passes of four blocks, so that ranks do not compete for few cores. In each setting the ranks probe, and then
train with every candidate. ``benchmarks/results/planner-replicas`` stores the cluster file and the measured times; the
tables predict from the former.
"""

from __future__ import annotations

import argparse
import json
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gossamer.plan import cluster_file
from gossamer.plan.predict import Candidate, predict
from gossamer.plan.runtime_model.cluster_model import ClusterModel
from gossamer.process.store.rank_info import free_port
from hosts import Hosts
from tables import table

WORKER = Path(__file__).with_name("planner_replicas_worker.py")
TASK = Path(__file__).with_name("planner_replicas_task.py")
RESULTS = Path(__file__).with_name("results") / "planner-replicas"
RANKS = 2
PROBE_S, RUN_S = 15.0, 6.0

SETTINGS: dict[str, tuple[int, str, float | None]] = {
    "2x2-fsdp-100": (2, "fsdp", 100),
    "2x2-ddp-100": (2, "ddp", 100),
    "2x2-fsdp-1000": (2, "fsdp", 1000),
    "2x2-fsdp-unlimited": (2, "fsdp", None),
    "3x2-fsdp-100": (3, "fsdp", 100),
    "3x2-ddp-1000": (3, "ddp", 1000),
}
"""Replicas, what is inside, Mbit/s between; by name."""

CANDIDATES: list[tuple[str, str, dict[str, Any]]] = [
    ("allreduce", "complete", {}),
    ("diloco", "complete", {"period": 8}),
    ("lasgd", "complete", {"period": 4}),
    ("a2cid2", "ring", {"rate": 0.25}),
]


def run_setting(name: str) -> None:
    """Probe and measure in one setting, and store the result."""
    replicas, inside, rate_mbit = SETTINGS[name]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch, Hosts(replicas, rate_mbit) as hosts:
        values = {
            "task": str(TASK), "batch": 1, "optimizer": "adam", "lr": 1e-3, "compute": "constant:100ms",
            "workers": replicas, "replica_size": RANKS, "inside": inside,
        }  # fmt: skip
        order = {"values": values, "candidates": CANDIDATES, "probe_s": PROBE_S, "run_s": RUN_S, "folder": scratch}
        shared = {
            "WORLD_SIZE": str(replicas * RANKS),
            "MASTER_ADDR": hosts.address(0),
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "FATAL",
            "GOSSAMER_SECRET": secrets.token_hex(16),
        }
        processes = [
            hosts.start(
                rank // RANKS,
                [sys.executable, str(WORKER), json.dumps(order)],
                {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank % RANKS)},
            )
            for rank in range(replicas * RANKS)
        ]
        try:
            for process in processes:
                if process.wait(timeout=300):
                    raise SystemExit(f"{name}: a rank failed")
        except subprocess.TimeoutExpired:
            raise SystemExit(f"{name}: not finished after five minutes") from None
        finally:
            for process in processes:
                process.kill()
                process.wait()
        of_replicas = [json.loads((Path(scratch) / f"{k * RANKS}.json").read_text()) for k in range(replicas)]
        # Time in which replicas make one step each on average.
        measured = [statistics.harmonic_mean(times) for times in zip(*of_replicas, strict=True)]
        RESULTS.mkdir(parents=True, exist_ok=True)
        (RESULTS / f"{name}.toml").write_text((Path(scratch) / "cluster.toml").read_text())
    (RESULTS / f"{name}.json").write_text(json.dumps({"measured_s": measured}, indent=1) + "\n")
    print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr)


def show(names: list[str]) -> None:
    errors, lines = [], []
    for name in names:
        measured = json.loads((RESULTS / f"{name}.json").read_text())["measured_s"]
        spec = cluster_file.read(RESULTS / f"{name}.toml")
        model = ClusterModel(spec, spec.parameters, num_runs=16)
        for fields, measured_s in zip(CANDIDATES, measured, strict=True):
            predicted_s = predict(model, Candidate(*fields)).step_s
            errors.append(abs(predicted_s / measured_s - 1))
            lines.append(
                {
                    "replicas, inside, Mbit/s between": ", ".join(name.split("-")),
                    "method": fields[0],
                    "predicted, ms": f"{1e3 * predicted_s:.0f}",
                    "measured, ms": f"{1e3 * measured_s:.0f}",
                    "error": f"{100 * (predicted_s / measured_s - 1):+.1f}%",
                }
            )
    print(table(lines))
    print(
        f"\n{len(errors)} configurations in {len(names)} settings: absolute error median "
        f"{100 * statistics.median(errors):.1f}%, largest {100 * max(errors):.1f}%."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", help=f"settings to run, of {', '.join(SETTINGS)}")
    parser.add_argument("--table", action="store_true", help="run nothing: print the table of the stored results")
    parsed = parser.parse_args()
    # The ranks and the hosts go with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    wanted = parsed.only.split(",") if parsed.only else list(SETTINGS)
    for name in [] if parsed.table else wanted:
        run_setting(name)
    show([name for name in SETTINGS if (RESULTS / f"{name}.json").exists()])


if __name__ == "__main__":
    main()
