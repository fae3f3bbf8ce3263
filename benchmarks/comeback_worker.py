"""A worker of ``benchmarks/comeback.py``: writes when it reaches each stage, as JSON lines. Needs torch only.

python benchmarks/comeback_worker.py '{"contender": "a2cid2", ...}'
"""

from __future__ import annotations

import time

began = time.time()

import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
import threading  # noqa: E402
from collections.abc import Callable  # noqa: E402
from typing import Any  # noqa: E402

from worker_reports import end_with_parent, report  # noqa: E402

JobSpec = dict[str, Any]
Step = Callable[[], None]

WATCH_S = 0.002
INPUTS = 1000
LIMIT_S = 600.0


def train_with_gossamer(job_spec: JobSpec) -> None:
    import torch

    report("torch")
    import gossamer

    _ = gossamer.join, gossamer.Swarm
    report("library")
    model, optimizer = build(job_spec)
    report("model")
    swarm = gossamer.join(model, optimizer, method=job_spec["contender"], topology="ring")
    report("joined")
    lockstep = swarm._runtime.method.lockstep
    stepped = threading.Event()

    def watch() -> None:
        """Report the first exchange, and the first one that carries a gradient of this process."""
        metrics = swarm._runtime.metrics
        while metrics.exchanges == 0:
            time.sleep(WATCH_S)
        report("exchanged")
        if not lockstep:
            stepped.wait()
            before = metrics.exchanges
            while metrics.exchanges == before:
                time.sleep(WATCH_S)
        report("contributed")

    threading.Thread(target=watch, daemon=True).start()
    inputs = torch.ones(1, INPUTS)
    while True:
        time.sleep(job_spec["wait_s"])
        model(inputs).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        stepped.set()
        report("step")


def train_with_torchft(job_spec: JobSpec) -> None:
    import torch

    report("torch")
    from torchft_loop import TorchftWorker

    report("library")
    model, inner = build(job_spec)
    report("model")
    worker = TorchftWorker(job_spec, model, inner)
    report("joined")
    inputs = torch.ones(1, INPUTS)

    def backward() -> None:
        time.sleep(job_spec["wait_s"])
        model(inputs).mean().backward()

    contributed = False
    for step in worker.steps(backward):
        if step.participants > 1 and not contributed:
            report("exchanged")
            if step.contributed:
                report("contributed")
                contributed = True
        report("step" if step.participants == job_spec["workers"] else "step alone")


def build(job_spec: JobSpec) -> tuple[Any, Any]:
    """Return a model and its optimizer."""
    from torch import manual_seed, nn, optim

    manual_seed(0)
    width = job_spec["parameters"] // (2 * INPUTS)
    model = nn.Sequential(nn.Linear(INPUTS, width), nn.ReLU(), nn.Linear(width, INPUTS))
    if job_spec["contender"] == "overlap":
        from gossamer import AccumAdam

        return model, AccumAdam(model.parameters(), lr=1e-4)
    return model, optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)


def main() -> None:
    job_spec: JobSpec = json.loads(sys.argv[1])
    end_with_parent(LIMIT_S)
    report("main", began, pid=os.getpid())
    train = train_with_torchft if job_spec["contender"].startswith("torchft") else train_with_gossamer
    train(job_spec)


if __name__ == "__main__":
    main()
