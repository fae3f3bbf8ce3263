"""Gossamer in Hugging Face's Trainer, one process per worker under torchrun.

::

    with hf.alone():
        arguments = TrainingArguments(output_dir="out", max_steps=100)
    callback = hf.GossamerCallback(method="a2cid2", topology="ring")
    trainer = Trainer(model, arguments, train_dataset=hf.shard(dataset), callbacks=[callback])
    trainer.train()
    # Here all workers hold the same, averaged model; trainer.save_model() saves it, once.

To Accelerate every worker is alone: it wraps nothing in DDP, and workers do not wait for each other to count tokens or
to save. Only rank 0 logs and saves.
"""

from __future__ import annotations

from typing import Any

import networkx as nx
from torch.utils.data import Subset
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from gossamer.api import join
from gossamer.errors import InputError
from gossamer.integrations.alone import alone
from gossamer.integrations.options import check_join_options
from gossamer.methods import AnyMethod
from gossamer.process.runtime.swarm import Swarm
from gossamer.process.store.rank_info import find_rank

__all__ = ["GossamerCallback", "alone", "shard"]


def shard(dataset: Any) -> Any:
    """Return this worker's share of a dataset: every n-th example.

    Args:
        dataset: A dataset of the library ``datasets``, or any dataset with a length.
    """
    rank, workers = find_rank()
    if hasattr(dataset, "shard"):
        return dataset.shard(num_shards=workers, index=rank)
    if not hasattr(dataset, "__len__"):
        raise InputError("a dataset without a length cannot be dealt out: give each worker a stream of its own")
    return Subset(dataset, range(rank, len(dataset), workers))


class GossamerCallback(TrainerCallback):
    """A callback of the Trainer: joins the other workers when training begins, and averages all models at its end.

    Args:
        method: As for ``gossamer.join``.
        topology: As for ``gossamer.join``.
        seed: As for ``gossamer.join``.
        **settings: Options of the method, as for ``gossamer.join``.
    """

    def __init__(
        self, *, method: AnyMethod = "a2cid2", topology: str | nx.Graph = "", seed: int = 0, **settings: Any
    ) -> None:
        self._joining = check_join_options({"method": method, "topology": topology, "seed": seed, **settings})
        self.swarm: Swarm | None = None
        """The handle of this worker, from the start of training on."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        if args.world_size > 1 or args.n_gpu > 1:
            raise InputError(
                "the Trainer has wrapped the model for several devices itself: "
                "make its TrainingArguments inside 'with gossamer.integrations.hf.alone():'"
            )
        if args.load_best_model_at_end:
            raise InputError("load_best_model_at_end would put one worker's model in place of the mean: leave it off")
        # Accelerate's wrapper passes steps on to the optimizer inside.
        optimizer = getattr(given["optimizer"], "optimizer", given["optimizer"])
        self.swarm = join(given["model"], optimizer, **self._joining)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.swarm is not None:
            self.swarm.finish()
