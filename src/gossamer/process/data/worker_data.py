"""The data side of a ``Swarm``: loaders that were dealt, the work that is counted, and the schedules that follow it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from gossamer.errors import InputError
from gossamer.process.data.epochs import Epochs
from gossamer.process.data.loaders import Source, is_plain
from gossamer.process.data.schedule import ProgressLR, make_factor
from gossamer.process.data.sharded_loader import ShardedLoader
from gossamer.process.data.shared_batches import BatchCount, dealt_batches, num_batches_per_epoch, own_batches
from gossamer.process.events import EventKind
from gossamer.process.runtime.worker_runtime import WorkerRuntime
from gossamer.schedules import Shape


class Work:
    """What the progress of this worker is measured by."""

    def __init__(self) -> None:
        self.measured: Epochs | BatchCount | None = None

    def progress(self) -> float:
        if self.measured is None:
            raise InputError(
                "progress is not known before the work is: loop over 'for epoch in swarm.epochs(E)' and a loader from "
                "swarm.shard, or over swarm.batches(loader, total_steps=N)"
            )
        return self.measured.progress


class WorkerData:
    """The data of this worker."""

    def __init__(self, runtime: WorkerRuntime) -> None:
        self._runtime = runtime
        self._epochs, self._count = Epochs(runtime), BatchCount(runtime)
        self._loaders: dict[tuple[Any, ...], ShardedLoader] = {}
        """By what they were made from: a second call with the same loader goes on with the first one's epochs."""
        self._originals: list[Any] = []
        """What the loaders were made from. Identities are keys, so it must live on."""
        self._schedules: list[ProgressLR] = []
        self._work = Work()
        # First: a worker that comes back and sees that the run has started must find the epoch too. Nothing here may
        # be part of a cycle with a loader: the processes of a loader that the garbage collector finds end slowly.
        runtime.store.on_move[:0] = [self._count.republish, self._epochs.republish]

    @property
    def progress(self) -> float:
        return self._work.progress()

    def shard(self, data: Any, batch_size: int | None, shuffle: bool, drop_last: bool) -> DataLoader[Any]:
        if isinstance(data, ShardedLoader):
            return data
        key = (id(data), batch_size, shuffle, drop_last)
        if key not in self._loaders:
            loader = as_loader(data, batch_size, shuffle, drop_last)
            self._loaders[key] = ShardedLoader(loader, len(self._loaders), self._epochs)
            self._originals.append(data)
        return self._loaders[key]

    def epochs(self, total: int) -> Iterator[int]:
        self._work.measured = self._epochs
        return self._until_end(self._epochs.loop(total))

    def batches(self, loader: Iterable[Any], total_steps: int | None, epochs: int | None) -> Iterator[Any]:
        if (total_steps is None) == (epochs is None):
            raise InputError("swarm.batches needs an end: give either total_steps, of all workers together, or epochs")
        per_epoch = self._num_dealt_batches(loader)
        if per_epoch is None and epochs is not None:
            raise InputError("epochs are those of a DataLoader that swarm.batches can deal: give total_steps instead")
        count = self._count
        count.begin((per_epoch or 0) * (epochs or 0) if total_steps is None else total_steps)
        self._work.measured = count
        if per_epoch is not None and isinstance(loader, DataLoader):
            return self._until_end(dealt_batches(count, loader, count.total))
        return self._until_end(own_batches(count, loader, count.total))

    def _num_dealt_batches(self, loader: Iterable[Any]) -> int | None:
        """Return how many batches an epoch of this loader has; None if its batches are this worker's own."""
        if not isinstance(loader, DataLoader) or isinstance(loader, ShardedLoader):
            return None
        source = Source(loader)
        if source.stream or not is_plain(loader):
            if len(self._runtime.everybody) > 1:
                text = (
                    "batches of this loader are taken as they come: divide its data yourself, or give swarm.shard of it"
                )
                self._runtime.state.events.add(EventKind.NOT_DEALT, text)
            return None
        if source.replicas > 1:
            return None
        if num_batches_per_epoch(source) == 0:
            raise InputError("the loader gives no batches: give it at least one batch of examples")
        return num_batches_per_epoch(source)

    def _until_end(self, work: Iterator[Any]) -> Iterator[Any]:
        """Yield all of ``work``, with schedules at its start when it begins and at its end when it is done.

        It may begin in the middle, after a checkpoint, and another worker may make the last step.
        """
        self._update_schedules()
        yield from work
        self._update_schedules()

    def _update_schedules(self) -> None:
        for schedule in self._schedules:
            schedule.update()

    def schedule(self, shape: str | Shape, warmup: float, min_factor: float) -> ProgressLR:
        factor = make_factor(shape, warmup, min_factor)
        start = 0.0 if self._work.measured is None else self.progress
        schedule = ProgressLR(self._runtime.flat_model.optimizer, factor, self._work.progress, start)
        self._schedules.append(schedule)
        return schedule

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        loaders = self._loaders.values()
        epochs = {
            "epoch": self._epochs.next_epoch(bool(loaders)),
            "loaders": [list(loader.resume_at) for loader in loaders],
        }
        return {"batches": self._count.taken, "epochs": epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._count.load(state["batches"])
        # States of version 0.1 have none.
        if "epochs" in state:
            self._epochs.load(state["epochs"])


def as_loader(data: Any, batch_size: int | None, shuffle: bool, drop_last: bool) -> DataLoader[Any]:
    """Return the loader that a user gave, or make one of a data set."""
    if isinstance(data, DataLoader):
        if batch_size is not None:
            raise InputError("batch_size is for a data set, this is a loader: set it in the DataLoader")
        return data
    if not isinstance(data, IterableDataset) and not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise InputError(
            f"swarm.shard deals a DataLoader or a data set, not a {type(data).__name__}: give one of these"
        )
    if batch_size is None:
        raise InputError("a data set has no batches: give swarm.shard a batch_size too, or a DataLoader")
    shuffle = shuffle and not isinstance(data, IterableDataset)
    return DataLoader(data, batch_size=batch_size, shuffle=shuffle, drop_last=drop_last)
