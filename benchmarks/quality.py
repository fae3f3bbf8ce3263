"""Does ``gossamer plan --until`` choose well? Plans in twelve settings, and measures the time to the target for real.

    python benchmarks/quality.py                            # all twelve settings, three quarters of an hour
    python benchmarks/quality.py --only 50/straggler/iid    # one of them
    python benchmarks/quality.py --table                    # the table of the stored results

Four workers, one process each, on four hosts (network namespaces: needs root and iproute2) behind links of 50, 200 or
1,000 Mbit/s, with and without one worker that is three times slower, digits dealt at random or by class. Gradients are
real; a wait makes each take 100 ms, as on an accelerator, so that four workers do not compete for few cores. In each
setting the workers probe the cluster and worker 0 plans for the time to the target. Then they train with the
recommended candidate, with all-reduce, and with the others that are predicted to take at most 1.5 times the best time
(six at most). Measured is the time from the start of the training until the average of the workers' models has reached
the target, its mean over the seeds. They are not those of the plan.
"""

from __future__ import annotations

import argparse
import json
import math
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from gossamer.process.store.rank_info import free_port
from hosts import Hosts
from tables import table

WORKER = Path(__file__).with_name("quality_worker.py")
TASK = Path(__file__).with_name("quality_task.py")
RESULTS = Path(__file__).with_name("results") / "quality"
WORKERS = 4
UNTIL = "loss=0.2"
PROBE_S, BUDGET_S, SEEDS = 20.0, 60.0, (10, 11)
LIMIT_S = 1800.0
CLOSE = 0.15
"""A recommendation is good if its measured time is at most this much above the best one."""

BANDWIDTHS = ("50", "200", "1000")
SPEEDS: dict[str, dict[str, str]] = {"even": {}, "straggler": {"straggler": "3:3"}}
PARTITIONS = ("iid", "by-class")
SETTINGS = [f"{band}/{speed}/{partition}" for band in BANDWIDTHS for speed in SPEEDS for partition in PARTITIONS]


def run_setting(setting: str) -> None:
    """Plan and measure in one setting, and store the result."""
    bandwidth, speed, partition = setting.split("/")
    values = {"task": str(TASK), "partition": partition, "compute": "constant:100ms", **SPEEDS[speed]}
    with tempfile.TemporaryDirectory() as scratch, Hosts(WORKERS, float(bandwidth)) as hosts:
        out = Path(scratch) / "result.json"
        order = {"values": values, "until": UNTIL, "probe_s": PROBE_S, "budget_s": BUDGET_S, "seeds": SEEDS}
        settings = Path(scratch) / "settings.json"
        settings.write_text(json.dumps({**order, "out": str(out)}))
        environment = {
            "WORLD_SIZE": str(WORKERS),
            "MASTER_ADDR": hosts.address(0),
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": "1",
            "GOSSAMER_SECRET": secrets.token_hex(32),
        }
        processes = [
            hosts.start(rank, [sys.executable, str(WORKER), str(settings)], {**environment, "RANK": str(rank)})
            for rank in range(WORKERS)
        ]
        try:
            for process in processes:
                process.wait(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            raise SystemExit(f"{setting}: not finished after {LIMIT_S / 60:.0f} minutes") from None
        finally:
            for process in processes:
                process.kill()
        if not out.exists():
            raise SystemExit(f"{setting}: a worker failed")
        result = {"setting": setting, "until": UNTIL, **json.loads(out.read_text())}
    RESULTS.mkdir(parents=True, exist_ok=True)
    stored(setting).write_text(json.dumps(result, indent=1) + "\n")


def stored(setting: str) -> Path:
    return RESULTS / f"{setting.replace('/', '-')}.json"


def measured_s(row: dict[str, Any]) -> float:
    """Return the mean over the seeds; infinite if one did not reach the target in time."""
    return math.inf if None in row["measured_s"] else mean(row["measured_s"])


def line(result: dict[str, Any]) -> dict[str, Any]:
    rows = result["rows"]
    chosen, best = next(row for row in rows if row["recommended"]), min(rows, key=measured_s)
    baseline = next(row for row in rows if row["method"] == "allreduce")
    return {
        "setting": result["setting"].replace("/", ", "),
        "recommended": f"{chosen['method']} {chosen['topology']}",
        "predicted s": round(chosen["time_s"], 2),
        "measured s": round(measured_s(chosen), 2),
        "best measured": f"{best['method']} {best['topology']}",
        "s": round(measured_s(best), 2),
        "behind": f"{100 * (measured_s(chosen) / measured_s(best) - 1):+.1f}%",
        "allreduce s": round(measured_s(baseline), 2),
        "measured candidates": len(rows),
    }


def show(results: list[dict[str, Any]]) -> None:
    lines = [line(result) for result in results]
    print(table(lines))
    num_close = sum(float(each["behind"].rstrip("%")) <= 100 * CLOSE for each in lines)
    print(f"\nWithin {100 * CLOSE:.0f}% of the best measured in {num_close} of {len(lines)} settings.")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", help="settings to run, such as 50/straggler/iid,200/even/by-class")
    parser.add_argument("--table", action="store_true", help="run nothing: print the table of the stored results")
    parsed = parser.parse_args()
    wanted = parsed.only.split(",") if parsed.only else SETTINGS
    if unknown := set(wanted) - set(SETTINGS):
        raise SystemExit(f"no setting {', '.join(sorted(unknown))}: expected some of {', '.join(SETTINGS)}")
    for setting in [] if parsed.table else wanted:
        print(f"{setting} …", file=sys.stderr, flush=True)
        run_setting(setting)
    show([json.loads(stored(setting).read_text()) for setting in SETTINGS if stored(setting).exists()])


if __name__ == "__main__":
    main()
