"""A training loop with torchft's manager, for workers of the benchmarks. Needs torchft."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchft import Manager, Optimizer, ProcessGroupGloo


@dataclass(frozen=True)
class Step:
    """A step that was committed."""

    participants: int
    """Whose gradients were averaged."""
    contributed: bool
    """Whether this worker's own gradient was among them."""


class TorchftWorker:
    """A model under training with torchft: one replica, one process."""

    def __init__(self, job_spec: dict[str, Any], model: nn.Module, inner: torch.optim.Optimizer) -> None:
        self.model = model
        timeouts = {name: timedelta(seconds=value) for name, value in job_spec["timeouts"].items()}
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

        def load_state_dict(state: dict[str, Any]) -> None:
            model.load_state_dict(state["model"])
            inner.load_state_dict(state["optimizer"])

        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=timeouts.get("timeout", timedelta(seconds=60))),
            load_state_dict=load_state_dict,
            state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
            min_replica_size=1,
            use_async_quorum=job_spec["use_async_quorum"],
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=self.store.port,
            lighthouse_addr=job_spec["lighthouse"],
            replica_id=f"replica_{job_spec['rank']}",
            hostname="127.0.0.1",
            **timeouts,
        )
        self.optimizer = Optimizer(self.manager, inner)

    def steps(self, backward: Callable[[], None]) -> Iterator[Step]:
        """Train for ever; yield after every step that was committed."""
        manager, parameters = self.manager, list(self.model.parameters())
        sizes = [parameter.numel() for parameter in parameters]
        while True:
            self.optimizer.zero_grad()
            backward()
            # Not by its DistributedDataParallel: in version 0.2.0 survivors end there (AssertionError in ddp.py, line
            # 76).
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            vector = torch.cat([gradient.flatten() for gradient in gradients])
            manager.allreduce(vector).wait()
            for gradient, mean in zip(gradients, vector.split(sizes), strict=True):
                gradient.copy_(mean.view_as(gradient))
            contributes, before = manager.is_participating(), manager.current_step()
            self.optimizer.step()
            if manager.current_step() != before:
                participants = manager.num_participants()
                yield Step(participants, contributes and participants > 1)
