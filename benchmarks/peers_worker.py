"""A worker of ``benchmarks/peers.py``: trains until it is killed, and reports as lines of JSON. Needs torch only.

    python benchmarks/peers_worker.py '{"kind": "gossamer", ...}'

It reports every ``step``, ``joint training`` when it has trained together with all others for some steps, and its first
``contribution``: an average of several workers contains a gradient that this process computed.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from process_worker import Waiting, make_optimizer
from worker_reports import end_with_parent, report

JobSpec = dict[str, Any]
Backward = Callable[[], None]

WATCH_S = 0.005
LR = 1e-4


def train_alone(job_spec: JobSpec, model: nn.Module, backward: Backward) -> None:
    """Nothing is joined."""
    optimizer = make_optimizer(job_spec["optimizer"], model.parameters(), LR)
    plain_loop(job_spec, optimizer, backward)


def train_with_ddp(job_spec: JobSpec, model: nn.Module, backward: Backward) -> None:
    dist.init_process_group("gloo")
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = make_optimizer(job_spec["optimizer"], model.parameters(), LR)
    plain_loop(job_spec, optimizer, lambda: gradient(wrapped))


def train_with_gossamer(job_spec: JobSpec, model: nn.Module, backward: Backward) -> None:
    import gossamer

    optimizer = make_optimizer(job_spec["optimizer"], model.parameters(), LR)
    settings = job_spec["settings"]
    swarm = gossamer.join(model, optimizer, method=job_spec["contender"], topology="ring", **settings)
    began = threading.Event()

    def watch() -> None:
        """Report the first exchange that ends after the first gradient, or after the first step."""
        began.wait()
        before = swarm.metrics().exchanges
        while swarm.metrics().exchanges == before:
            time.sleep(WATCH_S)
        report("contribution")

    def backward_before_exchange() -> None:
        backward()
        if not job_spec["in_background"]:
            # The exchange of this very step carries the gradient.
            began.set()

    threading.Thread(target=watch, daemon=True).start()
    plain_loop(job_spec, optimizer, backward_before_exchange, began)


def plain_loop(
    job_spec: JobSpec, optimizer: torch.optim.Optimizer, backward: Backward, began: threading.Event | None = None
) -> None:
    made = 0
    while True:
        backward()
        optimizer.step()
        optimizer.zero_grad()
        if began is not None:
            began.set()
        report("step")
        made += 1
        if made == job_spec["warm_up_steps"]:
            report("joint training")


def gradient(model: nn.Module) -> None:
    model(torch.zeros(1, requires_grad=True)).sum().backward()


def main() -> None:
    job_spec: JobSpec = json.loads(sys.argv[1])
    end_with_parent(job_spec["limit_s"])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Waiting(job_spec["parameters"], job_spec["wait_s"])
    kind = job_spec["kind"]
    if kind == "torchft":
        from peers_torchft import train
    elif kind == "hivemind":
        from peers_hivemind import train
    else:
        train = {"none": train_alone, "ddp": train_with_ddp, "gossamer": train_with_gossamer}[kind]
    train(job_spec, model, lambda: gradient(model))


if __name__ == "__main__":
    main()
