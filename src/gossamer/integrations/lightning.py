"""Gossamer in Lightning: a strategy for the ``Trainer``, one process per worker under torchrun.

::

    trainer = Trainer(max_epochs=3, strategy=GossamerStrategy(method="a2cid2", topology="ring"))
    trainer.fit(model, loader)      # every worker takes its share of the training data
    # Here all workers hold the same, averaged model.

Each worker trains its own replica on its device: Lightning wraps nothing in DDP. Its barriers, broadcasts, gathers and
reductions are real, among the workers that are alive and not done.
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
from gossamer.integrations.collectives import WorkerCollectives, stack
from gossamer.integrations.options import check_join_options
from gossamer.methods import AnyMethod
from gossamer.process.runtime.swarm import Swarm
from gossamer.process.store.rank_info import find_local_rank

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
        self._joining = check_join_options(
            {"method": method, "topology": topology, "seed": seed, **settings}, others=("validate_mean",)
        )
        self._validate_mean = validate_mean
        self._looking = contextlib.ExitStack()
        self._trainer: Trainer | None = None
        self._collectives = WorkerCollectives()
        self.swarm: Swarm | None = None
        """The handle of this worker, from the start of training on."""

    @property
    def global_rank(self) -> int:
        return self._collectives.rank

    @property
    def local_rank(self) -> int:
        return find_local_rank()

    @property
    def world_size(self) -> int:
        return self._collectives.workers

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
        self.swarm = self._collectives.swarm = join(self.lightning_module, self.optimizers[0], **self._joining)

    def on_validation_start(self) -> None:
        if self._validate_mean and self._collectives.swarm is not None:
            self._looking.enter_context(self._collectives.swarm.averaged())

    def on_validation_end(self) -> None:
        self._looking.close()

    def barrier(self, name: str | None = None) -> None:
        """Wait for the workers that are alive and not done."""
        self._collectives.barrier(name or "")

    def broadcast(self, obj: Anything, src: int = 0) -> Anything:
        """Return the object of worker ``src``, or of the first worker alive if that one is gone; JSON data."""
        value: Anything = self._collectives.broadcast(obj, src)
        return value

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Return the tensors of the workers alive, with a leading dimension for the workers."""
        if sync_grads:
            raise InputError("all_gather with sync_grads=True would need gradients of other workers: leave it out")
        _check_no_group(group)
        return tensor if self.world_size == 1 else stack(self._collectives.gather(tensor))

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the mean, sum, maximum or minimum over the workers alive."""
        _check_no_group(group)
        if not isinstance(tensor, torch.Tensor):
            return tensor
        return self._collectives.reduce(tensor, str(reduce_op or "mean").rpartition(".")[2].lower())

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all workers alive decide so, or whether any of them does."""
        decisions = self._collectives.gather_values(bool(decision))
        return False not in decisions if all else True in decisions

    def on_train_end(self) -> None:
        assert self.swarm is not None
        self.swarm.finish()
        self._collectives.end()

    def on_exception(self, exception: BaseException) -> None:
        self._looking.close()
        if self._collectives.swarm is not None:
            self._collectives.swarm.close()
        self._collectives.end()


def _check_no_group(group: Any) -> None:
    if group is not None:
        raise InputError("a process group was given, Gossamer has its own: leave group out")
