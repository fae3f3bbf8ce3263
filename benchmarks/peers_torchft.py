"""The loop with torchft of ``benchmarks/peers_worker.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchft_loop import TorchftWorker
from worker_reports import report


def train(job_spec: dict[str, Any], model: nn.Module, backward: Callable[[], None]) -> None:
    worker = TorchftWorker(job_spec, model, torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9))
    together, contributed = 0, False
    for step in worker.steps(backward):
        report("step")
        if step.contributed and not contributed:
            contributed = True
            report("contribution")
        together += step.participants == job_spec["workers"]
        if together == job_spec["warm_up_steps"]:
            together += 1
            report("joint training")
