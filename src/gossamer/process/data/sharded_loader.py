"""What ``swarm.shard`` returns: a ``DataLoader`` that yields this worker's share of every epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from gossamer.errors import InputError
from gossamer.process.data.dealing import check_size, common_order, deal, fingerprint, num_batches, read_fingerprint
from gossamer.process.data.epochs import Epochs, Pass
from gossamer.process.data.loaders import ReplacedSampler, Source, is_plain, settings
from gossamer.process.runtime.worker_runtime import WorkerRuntime
from gossamer.process.store.parsing import read_number


class ShardedLoader(DataLoader[Any]):
    """A ``DataLoader`` with the settings of another, that yields this worker's share of its batches.

    Each pass is an epoch: inside ``for epoch in swarm.epochs(…)`` the one of that loop, else the next one.
    """

    def __init__(self, loader: DataLoader[Any], number: int, epochs: Epochs) -> None:
        """``number``: which of this worker's loaders it is, in the order of their creation."""
        if not is_plain(loader):
            raise InputError(f"{type(loader).__name__} iterates in its own way: give swarm.shard a plain DataLoader")
        self._source = source = Source(loader)
        if source.replicas > 1:
            raise InputError(
                "the loader's DistributedSampler deals the data already: give swarm.shard a loader without it"
            )
        self._number, self._epochs = number, epochs
        self._runtime = epochs.runtime
        self._pass: Pass | None = None
        self._sampler = ReplacedSampler()
        dataset: Any = loader.dataset
        self._stream = _Stream(dataset) if source.stream else None
        if self._stream is None:
            workers = len(self._runtime.everybody)
            check_size(source.size, workers, source.batch_size, source.drop_last)
            self._sampler.length = num_batches(source.size, workers, source.batch_size, source.drop_last)
        super().__init__(dataset if self._stream is None else self._stream, **settings(loader, source, self._sampler))

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        current = self._begin_pass()
        for batch in super().__iter__():
            current.position += 1
            if current is self._epochs.counted or (self._number == 0 and not self._epochs.inside):
                self._runtime.state.data_position = current.epoch, current.position
            yield batch
        current.exhausted = True

    @property
    def resume_at(self) -> tuple[int, int]:
        """Epoch and position to go on with after a checkpoint."""
        return self._epochs.begin(self._number) if self._pass is None else self._pass.resume_at

    def _begin_pass(self) -> Pass:
        epochs, first = self._epochs, self._pass is None
        epoch, position = epochs.begin(self._number) if self._pass is None else (self._pass.epoch + 1, 0)
        if epochs.inside:
            position = position if first and epoch == epochs.current else 0
            epoch = epochs.current
        while not epochs.takes_part(epoch):
            epoch, position = epoch + 1, 0
        members = epochs.members(epoch)
        if first and not self._source.stream:
            check_same_order(self._runtime, self._source, self._number)
        self._pass = Pass(epoch, self._load_share(epoch, members, position), position)
        if epochs.inside and epochs.counted is None:
            epochs.counted = self._pass
        return self._pass

    def _load_share(self, epoch: int, members: tuple[int, ...], position: int) -> int | None:
        """Set what the next pass draws; return how many batches the whole share has."""
        rank = self._runtime.rank
        mine = members.index(rank) if rank in members else rank % len(members)
        set_epoch(self._source.sampler, epoch)
        set_epoch(self.dataset, epoch)
        if self._stream is not None:
            self._stream.stride[:] = torch.tensor([mine, len(members)])
            return None
        # A worker without a share of its own draws an order of its own.
        seed, guest = self._runtime.worker.seed, () if rank in members else (1 + rank,)
        source = self._source
        order = common_order(source.sampler, seed, self._number, epoch, *guest)
        batches: list[Any] = deal(order, mine, len(members), source.batch_size, source.drop_last)
        if not source.divisible:
            batches = [item for (item,) in batches]
        self._sampler.items, self._sampler.length = batches[position:], len(batches)
        return len(batches)


class _Stream(IterableDataset[Any]):
    """Every n-th item of an iterable data set."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        # In shared memory: the processes of a loader may outlive an epoch.
        self.stride = torch.tensor([0, 1]).share_memory_()

    def __iter__(self) -> Iterator[Any]:
        position, workers = self.stride.tolist()
        for at, item in enumerate(self.dataset):
            if at % workers == position:
                yield item

    def __len__(self) -> int:
        position, workers = self.stride.tolist()
        return len(range(position, len(self.dataset), workers))

    def set_epoch(self, epoch: int) -> None:
        set_epoch(self.dataset, epoch)


def set_epoch(each: object, epoch: int) -> None:
    """Tell the epoch to a sampler or a data set that wants to know it."""
    if callable(getattr(each, "set_epoch", None)):
        each.set_epoch(epoch)  # type: ignore[attr-defined]


def check_same_order(runtime: WorkerRuntime, source: Source, number: int) -> None:
    """Raise ``InputError`` if another worker has another order of the same data. Checks the first epoch."""
    set_epoch(source.sampler, 0)
    order = common_order(source.sampler, runtime.worker.seed, number, 0)
    mine = fingerprint(order, source.indices)
    others = runtime.refusals.agreed(runtime.store, f"order/{number}", mine, read_fingerprint)
    if others is not None and others != mine.encode():
        size = read_number(others.partition(b" ")[0])
        what = f"{len(order)} examples here, {size} elsewhere" if size != len(order) else "another order or subset"
        raise InputError(
            f"the data is not the same on all workers ({what}): give each the whole data set, split with the same "
            "seed, and a sampler that draws from torch's generator"
        )
