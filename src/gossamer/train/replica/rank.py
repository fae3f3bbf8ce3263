"""One rank of a replica that ``gossamer train`` runs: its process group, and what its replica decides together.

The ranks of a replica make every step together. Its first rank decides whether there is one more step, when to evaluate
and when to write a checkpoint; the others hear of it before each step (``step_decision``).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

from gossamer.methods import Method
from gossamer.process.replica import checks
from gossamer.process.replica.agreement import Agreement
from gossamer.process.replica.joining import ReplicaGroup
from gossamer.process.replica.place import Replica, parse_address
from gossamer.process.store.rank_info import START_TIMEOUT_S, RankInfo
from gossamer.train.pacing import Pace
from gossamer.train.replica import sharded_checkpoint
from gossamer.train.replica.parallel import SpreadPace, parallelize
from gossamer.train.replica.place import ReplicaPlace
from gossamer.train.replica.step_decision import SentDecisions, StepDecisions
from gossamer.wire import Codec

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


class ReplicaRank:
    """The process group of one replica, and this process's rank in it."""

    def __init__(self, place: ReplicaPlace, rank_info: RankInfo, device: torch.device) -> None:
        """``rank_info``: that of the worker."""
        kind, timeout = device.type, timedelta(seconds=START_TIMEOUT_S)
        if kind == "cpu" and sys.platform == "linux":
            # All ranks are on this machine, whatever its name resolves to.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = _store(place, timeout)
        dist.init_process_group(BACKENDS[kind], store=store, timeout=timeout, rank=place.shard, world_size=place.size)
        self.mesh = init_device_mesh(kind, (place.size,), mesh_dim_names=("shard",))
        between = Replica(rank_info.rank, rank_info.workers, f"{rank_info.host}:{rank_info.port}")
        self.group = ReplicaGroup(self.mesh, between, START_TIMEOUT_S)
        self.rank_info = rank_info
        self.decisions: StepDecisions
        """What the ranks do next. Once they are connected."""

    @property
    def shard(self) -> int:
        return self.group.place.shard

    @property
    def leads(self) -> bool:
        return self.shard == 0

    def parallelize(self, model: nn.Module, inside: str) -> nn.Module:
        return parallelize(model, inside, self.mesh)

    def spread_pace(self, model: nn.Module, pace: Pace) -> SpreadPace | None:
        """Return what spreads gradients of a given time over the passes of ``model``; None without such a time."""
        return SpreadPace(model, pace.stop.wait) if pace.fixed else None

    def saver(self, folder: Path) -> Callable[[Mapping[str, Tensor]], None]:
        """Return a function that writes sharded tensors into ``folder``, if there are any. All ranks must call it."""

        def save(tensors: Mapping[str, Tensor]) -> None:
            if tensors:
                sharded_checkpoint.save(folder, tensors, self.mesh.get_group())

        return save

    def check(
        self, model: nn.Module, optimizer: Optimizer, method: Method, codec: Codec | None, seed: int
    ) -> nn.Module:
        """Return the module to join with. InputError, the same on all ranks, if it cannot be joined."""

        def prepare() -> nn.Module:
            joined, _ = self.group.check_model(model, optimizer)
            checks.check_method(method, joined, "tcp", codec is not None)
            return joined

        return self.group.agree(prepare, lambda joined: (joined, method, method.topology.name, seed))

    def connect(self, lockstep: bool) -> Agreement:
        """Connect the ranks of this replica for the training. ``lockstep``: that of the method."""
        agreement = self.group.connect(self.rank_info)
        self.decisions = StepDecisions(agreement) if lockstep else SentDecisions(agreement)
        return agreement

    def leaders(self, number: int) -> int:
        """Return the number that the first rank of the replica gives."""
        return int(self.group.inner.gather(torch.tensor([number]))[0])

    def close(self) -> None:
        dist.destroy_process_group()


def _store(place: ReplicaPlace, timeout: timedelta) -> dist.Store:
    # Not by ``init_method``: under torchrun nobody would host a store at an address of ours.
    if Path(place.rendezvous).is_absolute():
        return dist.FileStore(place.rendezvous, place.size)
    host, port = parse_address(place.rendezvous)
    return dist.TCPStore(host, port, place.size, is_master=place.shard == 0, timeout=timeout)
