"""How a rank of a replica joins: it finds its place, compares itself with all other ranks, and watches its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from gossamer.methods import Method
from gossamer.process.events import logger
from gossamer.process.joining.join_checks import check
from gossamer.process.replica import checks
from gossamer.process.replica.agreement import Agreement
from gossamer.process.replica.inner_group import InnerGroup
from gossamer.process.replica.place import find_place
from gossamer.process.replica.watch import ReplicaWatch
from gossamer.process.store.addresses import local_address
from gossamer.process.store.rank_info import RankInfo

INNER_TIMEOUT_S = 1800.0
"""How long a rank waits for the others of its replica: as long as torch does. A rank that died is noticed at once."""

T = TypeVar("T")


def torchrun_keeps_store() -> bool:
    """Whether torchrun started this process, may start it again, and does so with one store for all starts.

    Process groups then find the addresses that the ranks had before (pytorch issue 135712; seen with torch 2.13).
    """
    env = os.environ
    return env.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and env.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


class ReplicaGroup:
    """The ranks that join together with this one: those of its replica, and of others if they are one job."""

    def __init__(self, mesh: Any, between: Any, timeout_s: float) -> None:
        """InputError if the mesh cannot be used, the same on all ranks."""
        self.place = find_place(mesh, between)
        self._in_ddp = False
        if self.place.shard == 0 and self.place.between is not None and torchrun_keeps_store():
            logger.warning(
                "torchrun keeps its store when it restarts this replica, and torch then looks for ranks that are dead: "
                "start it with --standalone or --rdzv-backend c10d, and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
            )
        self._job = InnerGroup(range(dist.get_world_size()), dist.get_rank(), timeout_s)
        self.inner = InnerGroup(self.place.ranks, self.place.shard, INNER_TIMEOUT_S)

    def check_model(self, model: Any, optimizer: Any) -> tuple[nn.Module, Optimizer]:
        """Return the model and the optimizer to join. InputError if they cannot be."""
        model, self._in_ddp = checks.unwrap_ddp(model, self.place)
        model, optimizer = check(model, optimizer, in_replica=True)
        checks.check_model(model, self._in_ddp, self.place)
        return model, optimizer

    def agree(self, prepare: Callable[[], T], about: Callable[[T], tuple[nn.Module, Method, str, int]]) -> T:
        """Return what ``prepare()`` returns, if all ranks prepare the same: ``about(…)`` says what to compare.

        InputError on every rank, with the same line, if they differ or one of them raised it.
        """

        def find() -> tuple[T, dict[str, str]]:
            prepared = prepare()
            model, method, topology, seed = about(prepared)
            return prepared, checks.find_inner_facts(model, method, topology, seed, self._in_ddp)

        prepared: T = checks.agree(self._job, find)
        model, method, _, _ = about(prepared)
        checks.agree(self._job, lambda: (None, checks.check_fragments(method, model, self.inner)))
        return prepared

    def connect(self, rank_info: RankInfo) -> Agreement:
        """Connect the ranks of this replica for the training."""
        background = InnerGroup(self.place.ranks, self.place.shard, INNER_TIMEOUT_S)
        return Agreement(self.inner, background, ReplicaWatch(self.inner, local_address(rank_info.host)))
