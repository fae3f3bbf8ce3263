"""Exchanges per step of real workers over a slow link, with each codec. Needs root and iproute2 (``hosts.py``).

    python benchmarks/wire_hosts.py                 # two workers, 20 Mbit/s, 0.5 M parameters, 100 ms steps

All codecs run one after the other in one go; the table shows ratios to float32.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time

from hosts import Hosts
from tables import table

PARAMETERS, STEP_S, RATE = 500_000, 0.1, 20.0


def work(codec: str, seconds: float) -> None:
    """Train as one of the workers, with a wait in place of the gradient's arithmetic; print the counts as JSON."""
    import torch

    import gossamer

    torch.set_num_threads(1)
    model = torch.nn.Linear(PARAMETERS // 1000, 1000, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    swarm = gossamer.join(model, optimizer, method="gossip", topology="complete", wire=codec, rate=RATE)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        model.weight.grad = torch.randn_like(model.weight)
        time.sleep(STEP_S)
        optimizer.step()
    metrics = swarm.metrics()
    swarm.finish()
    if os.environ["RANK"] == "0":
        print(json.dumps({"steps": metrics.steps, "exchanges": metrics.exchanges, "bytes_sent": metrics.bytes_sent}))


def measure(codec: str, mbit: float, seconds: float) -> dict[str, int]:
    with Hosts(2, mbit) as hosts:
        common = {"MASTER_ADDR": hosts.address(0), "MASTER_PORT": "29500", "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--worker", codec, "--seconds", str(seconds)]
        workers = [
            hosts.start(host, command, {**common, "RANK": str(host)}, output=subprocess.PIPE) for host in range(2)
        ]
        outputs = [worker.communicate()[0] for worker in workers]
    lines = [line for line in outputs[0].splitlines() if line.startswith("{")]
    if not lines:
        raise SystemExit(f"a worker failed:\n{outputs[0]}")
    return json.loads(lines[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=20.0, help="rate of the link")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long each codec trains")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.seconds)
        return
    rows, first = [], 0.0
    for codec in ("float32", "bfloat16", "int8"):
        counts = measure(codec, options.mbit, options.seconds)
        per_step = counts["exchanges"] / counts["steps"]
        first = first or per_step
        sent = counts["bytes_sent"] / counts["exchanges"]
        rows.append({"wire": codec, "exchanges per step": per_step, "ratio": per_step / first, "bytes": round(sent)})
    print(table(rows))


if __name__ == "__main__":
    main()
