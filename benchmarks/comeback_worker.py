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
from datetime import timedelta  # noqa: E402
from typing import Any  # noqa: E402

JobSpec = dict[str, Any]
Step = Callable[[], None]

WATCH_S = 0.002
INPUTS = 1000


def report(at: str, when: float | None = None, **more: Any) -> None:
    line = {"at": at, "time": time.time() if when is None else when, **more}
    os.write(1, (json.dumps(line) + "\n").encode())


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
    import torch.distributed as dist

    report("torch")
    from torchft import Manager, Optimizer, ProcessGroupGloo

    report("library")
    model, inner = build(job_spec)
    report("model")
    timeouts = {name: timedelta(seconds=value) for name, value in job_spec["timeouts"].items()}
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeouts.get("timeout", timedelta(seconds=60))),
        load_state_dict=load_state_dict,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        use_async_quorum=job_spec["use_async_quorum"],
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=job_spec["lighthouse"],
        replica_id=f"replica_{job_spec['rank']}",
        hostname="127.0.0.1",
        **timeouts,
    )
    optimizer = Optimizer(manager, inner)
    report("joined")
    inputs, contributed = torch.ones(1, INPUTS), False
    parameters = list(model.parameters())
    sizes = [parameter.numel() for parameter in parameters]
    while True:
        optimizer.zero_grad()
        time.sleep(job_spec["wait_s"])
        model(inputs).mean().backward()
        # Not by its DistributedDataParallel: in version 0.2.0 survivors end there (AssertionError in ddp.py, line 76).
        gradients = torch.cat([parameter.grad.flatten() for parameter in parameters])
        manager.allreduce(gradients).wait()
        for parameter, mean in zip(parameters, gradients.split(sizes), strict=True):
            parameter.grad.copy_(mean.view_as(parameter))
        healed, before = not manager.is_participating(), manager.current_step()
        optimizer.step()
        if manager.current_step() == before:
            # The step was not committed.
            continue
        if manager.num_participants() > 1 and not contributed:
            report("exchanged")
            if not healed:
                report("contributed")
                contributed = True
        if manager.num_participants() == job_spec["workers"]:
            report("step")
        else:
            report("step alone")


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
    report("main", began)
    train = train_with_torchft if job_spec["contender"].startswith("torchft") else train_with_gossamer
    train(job_spec)


if __name__ == "__main__":
    main()
