"""Gossamer in Ray Train: a configuration for the ``TorchTrainer``.

::

    def train_func():
        ...                                                          # model, optimizer, data of this worker
        swarm = gossamer.join(model, optimizer, method="a2cid2")     # instead of ray.train.torch.prepare_model
        ...                                                          # the loop as it is
        swarm.finish()

    TorchTrainer(train_func, torch_config=GossamerConfig(), scaling_config=ScalingConfig(num_workers=4)).fit()

Ray starts the workers and tells them their ranks. It makes no process group. A worker that fails is replaced alone and
comes back to the others, which train on meanwhile; Ray versions that cannot replace one worker restart all of them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import ray
import ray.train
from ray.train.backend import Backend
from ray.train.torch import TorchConfig, get_device

from gossamer.errors import InputError
from gossamer.process.store.rank_info import free_port


@dataclass
class GossamerConfig(TorchConfig):
    """The ``torch_config`` of a ``TorchTrainer`` whose workers call ``gossamer.join``.

    It leaves out the process group of torch, which would fail with the first worker.
    """

    @property
    def backend_cls(self) -> type[Backend]:
        return GossamerBackend

    def __post_init__(self) -> None:
        if self.backend is not None:
            raise InputError(
                f"backend is {self.backend!r}, but GossamerConfig makes no process group: leave it out, "
                "or give gossamer.join the transport"
            )


class GossamerBackend(Backend):
    """Tells the workers their ranks and where the store is. It lives in Ray's controller."""

    share_cuda_visible_devices = True
    has_replica_groups = True
    """Ray replaces one worker that failed instead of restarting all of them."""

    def __init__(self) -> None:
        super().__init__()
        self._address: tuple[str, int] | None = None

    def on_start(self, worker_group: Any, backend_config: GossamerConfig) -> None:
        if self._address is None or len(worker_group) == worker_group.execute_single(0, _world_size):
            self._address = worker_group.execute_single(0, _find_address)
        # Otherwise this worker replaces another, and finds the rest where they met.
        host, port = self._address
        worker_group.execute(_set_environment, host, port)


def _world_size() -> int:
    return int(ray.train.get_context().get_world_size())


def _find_address() -> tuple[str, int]:
    return ray.util.get_node_ip_address(), free_port()


def _set_environment(host: str, port: int) -> None:
    """Tell this worker what torchrun would."""
    context = ray.train.get_context()
    os.environ.update(
        RANK=str(context.get_world_rank()),
        WORLD_SIZE=str(context.get_world_size()),
        LOCAL_RANK=str(context.get_local_rank()),
        LOCAL_WORLD_SIZE=str(context.get_local_world_size()),
        NODE_RANK=str(context.get_node_rank()),
        MASTER_ADDR=host,
        MASTER_PORT=str(port),
        # Hugging Face's Accelerate looks here.
        ACCELERATE_TORCH_DEVICE=str(get_device()),
    )
