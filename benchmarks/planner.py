"""Predicted step times beside measured ones, on real workers behind slow links. Prints markdown tables.

    python benchmarks/planner.py                       # all twelve settings, half an hour
    python benchmarks/planner.py --only 50/straggler   # one of them
    python benchmarks/planner.py --table               # the table of what has been kept

Four workers, a process each, on four hosts (network namespaces: needs root and iproute2) whose links carry 50, 200 or
1,000 Mbit/s or whatever the machine can do. Compute is a wait, as on an accelerator, so that four workers do not
fight over few cores: 100 ms a step; the same with one worker three times slower; log-normal times, σ = 0.3. In each
setting the workers probe the cluster and then train with every candidate. ``benchmarks/results/planner`` keeps what was
probed and what was measured; predictions are made from the former, and the recommended candidate is compared with the
best of all that were measured.
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


def run_setting(bandwidth: str, compute: str) -> dict[str, Any]:
    """Probe, predict and measure in one setting."""
    with tempfile.TemporaryDirectory() as scrap, Hosts(WORKERS, BANDWIDTHS[bandwidth]) as hosts:
        spec, out = Path(scrap) / "spec.json", Path(scrap) / "found.json"
        values = {"task": "quadratic", "dim": PARAMETERS, "optimizer": "adam", "lr": 1e-3, **COMPUTE[compute]}
        spec.write_text(
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
                [sys.executable, str(WORKER), str(spec)],
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
            raise SystemExit(f"{bandwidth}/{compute}: no end after a quarter of an hour") from None
        finally:
            for process in processes:
                process.kill()
        found = json.loads(out.read_text())
        RESULTS.mkdir(parents=True, exist_ok=True)
        (RESULTS / f"{bandwidth}-{compute}.toml").write_text(out.with_suffix(".toml").read_text())
    found |= {"bandwidth": bandwidth, "compute": compute}
    (RESULTS / f"{bandwidth}-{compute}.json").write_text(json.dumps(found, indent=1) + "\n")
    return found


@dataclass(frozen=True)
class Setting:
    """One setting: what was measured, and what is predicted from its probe."""

    name: str
    measured: list[float]
    plan: Plan
    """Of the candidates, in some job_spec."""

    @classmethod
    def kept(cls, path: Path) -> Setting:
        found = json.loads(path.read_text())
        machines = cluster_file.read(path.with_suffix(".toml"))
        candidates = [Candidate(*each) for each in CANDIDATES]
        plan = make_plan(machines, Workload("quadratic", machines.parameters, "adam"), only=candidates)
        return cls(f"{found['bandwidth']}, {found['compute']}", [row["measured_s"] for row in found["rows"]], plan)

    def prediction(self, position: int) -> Prediction:
        method, topology, options = CANDIDATES[position]
        return next(each for each in self.plan.ranking if each.candidate == Candidate(method, topology, options))

    @property
    def recommended(self) -> int:
        """The position of the winner among the candidates."""
        return next(k for k in range(len(CANDIDATES)) if self.prediction(k) == self.plan.winner)


def show(settings: list[Setting]) -> None:
    errors = []
    lines: list[dict[str, Any]] = []
    for position, (method, topology, _) in enumerate(CANDIDATES):
        line = {"method": method, "topology": topology}
        for each in settings:
            predicted, measured = each.prediction(position).step_s, each.measured[position]
            errors.append(abs(predicted / measured - 1))
            line[each.name] = f"{1e3 * predicted:.0f} / {1e3 * measured:.0f}"
        lines.append(line)
    print("Predicted / measured milliseconds per step:\n")
    print(table(lines))
    print(
        f"\n{len(errors)} configurations: absolute error median {100 * statistics.median(errors):.1f}%, "
        f"90th percentile {100 * float(np.quantile(errors, 0.9)):.1f}%, largest {100 * max(errors):.1f}%.\n"
    )
    lines = []
    near = 0
    for each in settings:
        chosen, best = each.recommended, int(np.argmin(each.measured))
        behind = each.measured[chosen] / each.measured[best] - 1
        near += behind <= 0.05
        lines.append(
            {
                "setting": each.name,
                "recommended": " ".join(CANDIDATES[chosen][:2]),
                "measured, ms": round(1e3 * each.measured[chosen]),
                "best measured": " ".join(CANDIDATES[best][:2]),
                "ms": round(1e3 * each.measured[best]),
                "behind": f"{100 * behind:+.1f}%",
                "contraction of the two": " and ".join(f"{each.prediction(k).contraction:.2f}" for k in (chosen, best)),
            }
        )
    print(table(lines))
    print(f"\nWithin 5% of the best in {near} of {len(settings)} settings.")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", help="settings to run, such as 50/straggler,200/even")
    parser.add_argument("--table", action="store_true", help="run nothing: show what has been kept")
    parsed = parser.parse_args()
    every = [f"{bandwidth}/{compute}" for bandwidth in BANDWIDTHS for compute in COMPUTE]
    wanted = parsed.only.split(",") if parsed.only else every
    for setting in [] if parsed.table else wanted:
        print(f"{setting} …", file=sys.stderr, flush=True)
        run_setting(*setting.split("/"))
    kept = [RESULTS / f"{setting.replace('/', '-')}.json" for setting in every]
    show([Setting.kept(path) for path in kept if path.exists()])


if __name__ == "__main__":
    main()
