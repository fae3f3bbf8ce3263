"""Gossamer in Lightning: a strategy for the ``Trainer``, one process per worker under torchrun.

::

    trainer = Trainer(max_epochs=3, strategy=GossamerStrategy(method="a2cid2", topology="ring"))
    trainer.fit(model, loader)      # every worker takes its share of the training data
    # Here all workers hold the same, averaged model.

To Lightning every worker is alone with its device: Lightning wraps nothing in DDP, and none of its barriers, broadcasts
and reductions makes workers wait for each other.
"""

from __future__ import annotations

import contextlib
from typing import Any, TypeVar

import networkx as nx
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn

from gossamer.api import join
from gossamer.errors import InputError
from gossamer.methods import AnyMethod, find
from gossamer.process.runtime.swarm import Swarm
from gossamer.process.store.rank_info import find_local_rank, find_rank

Anything = TypeVar("Anything")

CPU = torch.device("cpu")


class GossamerStrategy(ParallelStrategy):
    """A Lightning strategy: each worker trains its own replica, and Gossamer averages the replicas.

    Each worker gets its own share of the training data, and all of the validation and test data.
    ``self.log(…, sync_dist=True)`` logs the mean over the workers, which wait for each other there.

    Args:
        method: As for ``gossamer.join``.
        topology: As for ``gossamer.join``.
        seed: As for ``gossamer.join``.
        validate_mean: Validate the mean of all workers' models instead of each worker's own. Workers wait for each
            other there.
        **settings: Options of the method, as for ``gossamer.join``.
    """

    strategy_name = "gossamer"

    def __init__(
        self,
        *,
        method: AnyMethod = "a2cid2",
        topology: str | nx.Graph = "",
        seed: int = 0,
        validate_mean: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__()
        find(method)
        self._joining = {"method": method, "topology": topology, "seed": seed, **settings}
        self._validate_mean = validate_mean
        self._looking = contextlib.ExitStack()
        self._trainer: Trainer | None = None
        self._joined = False
        self.swarm: Swarm | None = None
        """The handle of this worker, from the start of training on."""
        self._rank, self._workers = find_rank()

    @property
    def global_rank(self) -> int:
        return self._rank

    @property
    def local_rank(self) -> int:
        return find_local_rank()

    @property
    def world_size(self) -> int:
        return self._workers

    @property
    def root_device(self) -> torch.device:
        # Workers of one machine take its devices in turn.
        return self.parallel_devices[self.local_rank % len(self.parallel_devices)] if self.parallel_devices else CPU

    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning's samplers and logs see several workers."""
        return self._trainer is not None and self._trainer.state.fn == TrainerFn.FITTING

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        if self._trainer is not None and self._trainer.training:
            return {"num_replicas": self.world_size, "rank": self.global_rank}
        return {"num_replicas": 1, "rank": 0}

    def setup(self, trainer: Trainer) -> None:
        self._trainer = trainer
        super().setup(trainer)

    def on_train_start(self) -> None:
        if len(self.optimizers) != 1:
            raise InputError(f"the module has {len(self.optimizers)} optimizers: Gossamer expects one")
        assert self.lightning_module is not None
        self.swarm = join(self.lightning_module, self.optimizers[0], **self._joining)
        self._joined = True

    def on_validation_start(self) -> None:
        if self._validate_mean and self._joined:
            assert self.swarm is not None
            self._looking.enter_context(self.swarm.averaged())

    def on_validation_end(self) -> None:
        self._looking.close()

    def barrier(self, name: str | None = None) -> None:
        """Do nothing: workers do not wait for each other."""

    def broadcast(self, obj: Anything, src: int = 0) -> Anything:
        return obj

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Every worker decides for itself when to stop or to save."""
        return decision

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, torch.Tensor) or not self._joined:
            return tensor
        kind = str(reduce_op).rpartition(".")[2].lower()
        if kind not in ("mean", "avg", "sum"):
            raise InputError(f"cannot reduce with {kind} over the workers: expected mean or sum")
        assert self.swarm is not None
        mean = self.swarm.mean(tensor)
        return mean * self.world_size if kind == "sum" else mean

    def on_train_end(self) -> None:
        assert self.swarm is not None
        self.swarm.finish()
        self._joined = False

    def on_exception(self, exception: BaseException) -> None:
        if self._joined:
            assert self.swarm is not None
            self._looking.close()
            self.swarm.close()
            self._joined = False
