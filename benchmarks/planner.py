"""Compare predicted with measured step times, of real workers on slow links. Prints markdown tables.

    python benchmarks/planner.py                       # all twelve settings, half an hour
    python benchmarks/planner.py --only 50/straggler   # one of them
    python benchmarks/planner.py --table               # the tables of the stored results

Four workers, one process each, run on four hosts (network namespaces: needs root and iproute2). Their links carry 50,
200 or 1,000 Mbit/s, or whatever the machine can do. Compute is a wait, as on an accelerator, so that four workers do
not compete for few cores: 100 ms a step; the same with one worker three times slower; log-normal times, σ = 0.3. In
each setting the workers probe the cluster and then train with every candidate. ``benchmarks/results/planner`` stores
the cluster file and the measured times. The tables predict from the former, and compare the recommended candidate with
the fastest one measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gossamer.plan import cluster_file
from gossamer.plan.predict import Candidate, Prediction
from gossamer.plan.recommend import Plan, Workload, make_plan
from gossamer.process.store.rank_info import free_port
from hosts import Hosts
from tables import table

ROOT = Path(__file__).resolve().parents[1]
WORKER = Path(__file__).with_name("planner_worker.py")
RESULTS = Path(__file__).with_name("results") / "planner"
WORKERS = 4
PARAMETERS = 500_000
PROBE_S, RUN_S = 25.0, 6.0

BANDWIDTHS: dict[str, float | None] = {"50": 50, "200": 200, "1000": 1000, "unlimited": None}
COMPUTE: dict[str, dict[str, str]] = {
    "even": {"compute": "constant:100ms"},
    "straggler": {"compute": "constant:100ms", "straggler": "3:3"},
    "lognormal": {"compute": "lognormal:100ms,0.3"},
}
TOPOLOGIES = ("ring", "complete", "one-peer-exponential")
CANDIDATES: list[tuple[str, str, dict[str, Any]]] = [
    ("allreduce", "complete", {}),
    ("localsgd", "complete", {"period": 8}),
    ("lasgd", "complete", {"period": 1}),
    ("divisible", "complete", {"period": 8, "ratio": 128.0}),
    *(("overlap", topology, {}) for topology in TOPOLOGIES),
    *(("gossip", topology, {"rate": 1.0}) for topology in TOPOLOGIES),
    *(("a2cid2", topology, {"rate": 1.0}) for topology in TOPOLOGIES),
]


def run_setting(bandwidth: str, compute: str) -> None:
    """Probe and measure in one setting, and store the result."""
    with tempfile.TemporaryDirectory() as scratch, Hosts(WORKERS, BANDWIDTHS[bandwidth]) as hosts:
        settings, out = Path(scratch) / "settings.json", Path(scratch) / "result.json"
        values = {"task": "quadratic", "dim": PARAMETERS, "optimizer": "adam", "lr": 1e-3, **COMPUTE[compute]}
        settings.write_text(
            json.dumps(
                {
                    "values": values,
                    "candidates": CANDIDATES,
                    "probe_s": PROBE_S,
                    "run_s": RUN_S,
                    "out": str(out),
                }
            )
        )
        port = free_port()
        processes = [
            hosts.start(
                rank,
                [sys.executable, str(WORKER), str(settings)],
                {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(WORKERS),
                    "MASTER_ADDR": hosts.address(0),
                    "MASTER_PORT": str(port),
                    "OMP_NUM_THREADS": "1",
                    "TORCH_CPP_LOG_LEVEL": "FATAL",
                },
            )
            for rank in range(WORKERS)
        ]
        try:
            for process in processes:
                process.wait(timeout=900)
        except subprocess.TimeoutExpired:
            raise SystemExit(f"{bandwidth}/{compute}: not finished after a quarter of an hour") from None
        finally:
            for process in processes:
                process.kill()
        result = json.loads(out.read_text())
        RESULTS.mkdir(parents=True, exist_ok=True)
        (RESULTS / f"{bandwidth}-{compute}.toml").write_text(out.with_suffix(".toml").read_text())
    result |= {"bandwidth": bandwidth, "compute": compute}
    (RESULTS / f"{bandwidth}-{compute}.json").write_text(json.dumps(result, indent=1) + "\n")


@dataclass(frozen=True)
class Setting:
    """One setting: the measured step times, and the plan from its cluster file."""

    name: str
    measured: list[float]
    """In the order of ``CANDIDATES``."""
    plan: Plan

    @classmethod
    def read(cls, path: Path) -> Setting:
        result = json.loads(path.read_text())
        spec = cluster_file.read(path.with_suffix(".toml"))
        candidates = [Candidate(*fields) for fields in CANDIDATES]
        plan = make_plan(spec, Workload("quadratic", spec.parameters, "adam"), only=candidates)
        return cls(f"{result['bandwidth']}, {result['compute']}", [row["measured_s"] for row in result["rows"]], plan)

    def prediction(self, position: int) -> Prediction:
        candidate = Candidate(*CANDIDATES[position])
        return next(prediction for prediction in self.plan.ranking if prediction.candidate == candidate)

    @property
    def recommended(self) -> int:
        """The position of the winner in ``CANDIDATES``."""
        return next(k for k in range(len(CANDIDATES)) if self.prediction(k) == self.plan.winner)


def show(settings: list[Setting]) -> None:
    errors = []
    lines: list[dict[str, Any]] = []
    for position, (method, topology, _) in enumerate(CANDIDATES):
        line = {"method": method, "topology": topology}
        for setting in settings:
            predicted, measured = setting.prediction(position).step_s, setting.measured[position]
            errors.append(abs(predicted / measured - 1))
            line[setting.name] = f"{1e3 * predicted:.0f} / {1e3 * measured:.0f}"
        lines.append(line)
    print("Predicted / measured milliseconds per step:\n")
    print(table(lines))
    print(
        f"\n{len(errors)} configurations: absolute error median {100 * statistics.median(errors):.1f}%, "
        f"90th percentile {100 * float(np.quantile(errors, 0.9)):.1f}%, largest {100 * max(errors):.1f}%.\n"
    )
    lines = []
    num_close = 0
    for setting in settings:
        chosen, best = setting.recommended, int(np.argmin(setting.measured))
        behind = setting.measured[chosen] / setting.measured[best] - 1
        num_close += behind <= 0.05
        lines.append(
            {
                "setting": setting.name,
                "recommended": " ".join(CANDIDATES[chosen][:2]),
                "measured, ms": round(1e3 * setting.measured[chosen]),
                "best measured": " ".join(CANDIDATES[best][:2]),
                "ms": round(1e3 * setting.measured[best]),
                "behind": f"{100 * behind:+.1f}%",
                "contraction of the two": " and ".join(
                    f"{setting.prediction(k).contraction:.2f}" for k in (chosen, best)
                ),
            }
        )
    print(table(lines))
    print(f"\nWithin 5% of the best in {num_close} of {len(settings)} settings.")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", help="settings to run, such as 50/straggler,200/even")
    parser.add_argument("--table", action="store_true", help="run nothing: print the tables of the stored results")
    parsed = parser.parse_args()
    every = [f"{bandwidth}/{compute}" for bandwidth in BANDWIDTHS for compute in COMPUTE]
    wanted = parsed.only.split(",") if parsed.only else every
    for setting in [] if parsed.table else wanted:
        print(f"{setting} …", file=sys.stderr, flush=True)
        run_setting(*setting.split("/"))
    stored = [RESULTS / f"{setting.replace('/', '-')}.json" for setting in every]
    show([Setting.read(path) for path in stored if path.exists()])


if __name__ == "__main__":
    main()
