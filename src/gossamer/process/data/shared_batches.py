"""Workers share a total number of steps: fast workers make more of them.

A counter in the store numbers the mini-batches. A worker reserves the next numbers while it works on the last ones: as
many as cover the longest of the newest answers, since on a link full of messages an answer may take several steps. But
never more than half of its share of what is left: at the end no worker shall have many while the others have none.

If the loader is a ``DataLoader`` of a data set with a length, the number also says which batch it is: all workers draw
the same order of every epoch, so no two workers get the same batch.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch.utils.data import DataLoader

from gossamer.errors import InputError
from gossamer.process.data.dealing import common_order, cut
from gossamer.process.data.loaders import ReplacedSampler, Source, settings
from gossamer.process.data.sharded_loader import check_same_order, set_epoch
from gossamer.process.runtime.worker_runtime import WorkerRuntime
from gossamer.process.store.parsing import read_number

MAX_RESERVED = 64

FIRST_POOL = 2**31
"""The number of the first loader that is shared in this way; those of ``shard`` begin at 0."""


class BatchCount:
    """How many mini-batches all workers together have taken, as far as this one knows."""

    def __init__(self, runtime: WorkerRuntime) -> None:
        self.runtime = runtime
        self.total = 0
        self.num_loaders = 0
        self.taken = 0
        """The number of the batch that the loop works on."""
        self.drawn = 0
        """The newest number of this worker: its loader may fetch batches ahead."""
        self.ended = False
        """A loop of this process has come to its end."""

    @property
    def progress(self) -> float:
        return min(1.0, self.taken / self.total) if self.total > 0 else 1.0

    def begin(self, total: int) -> None:
        """All workers together are about to take ``total`` batches; a worker that comes back finds some taken."""
        if self.ended and total <= self.taken:
            raise InputError(
                f"swarm.batches counts the steps of the whole run, and {self.total} are done: make one loop of all "
                "epochs, or give a larger total_steps"
            )
        self.total = total
        others = self.runtime.store.get("batches") if self.runtime.came_back else None
        taken = self.runtime.refusals.checked("batches", others, read_number(others))
        self.taken = max(self.taken, taken or 0)

    def republish(self) -> None:
        """Publish the count in a store that may be new."""
        if self.drawn:
            self.runtime.store.compare_set("batches", str(self.drawn))

    def load(self, taken: int) -> None:
        self.taken = self.drawn = taken
        self.runtime.store.compare_set("batches", str(taken))

    def numbers(self, total: int) -> Iterator[int]:
        """Yield the numbers of this worker's batches, from 1; none beyond ``total``."""
        for number in batch_numbers(self.runtime, total, lambda: self.drawn):
            # A store that replaced another counts from what its first user knew; one out of reach does not count.
            self.drawn = max(self.drawn + 1, number)
            if self.drawn > total:
                self.ended = True
                return
            yield self.drawn


def own_batches(count: BatchCount, loader: Iterable[Any], total: int) -> Iterator[Any]:
    """Yield the loader's batches as they come, until all workers together have taken ``total``."""
    numbers = count.numbers(total)
    while True:
        empty = True
        for batch in loader:
            empty = False
            number = next(numbers, None)
            if number is None:
                count.taken = count.drawn
                return
            count.taken = number
            yield batch
        if empty:
            raise InputError("the loader gives no batches (any more): give one that can be iterated again")


def dealt_batches(count: BatchCount, loader: DataLoader[Any], total: int) -> Iterator[Any]:
    """Yield those batches of the loader whose numbers this worker draws, until all have taken ``total``."""
    source, sampler, pending = Source(loader), ReplacedSampler(), deque[int]()
    sampler.length = total
    number_of_loader = FIRST_POOL + count.num_loaders
    count.num_loaders += 1

    def draw() -> Iterator[Any]:
        epoch, batches = -1, []
        for number in count.numbers(total):
            if (number - 1) // num_batches_per_epoch(source) != epoch:
                epoch = (number - 1) // num_batches_per_epoch(source)
                batches = epoch_batches(count.runtime, source, number_of_loader, epoch)
            pending.append(number)
            yield batches[(number - 1) % len(batches)]

    check_same_order(count.runtime, source, number_of_loader)
    check_same_numbers(count.runtime, source, number_of_loader, total)
    sampler.items = draw()
    dataset: Any = loader.dataset
    for batch in DataLoader(dataset, **settings(loader, source, sampler)):
        count.taken = pending.popleft()
        yield batch
    count.taken = count.drawn


def check_same_numbers(runtime: WorkerRuntime, source: Source, number_of_loader: int, total: int) -> None:
    """Raise ``InputError`` if the same numbers mean other batches on another worker."""
    mine = f"batches of {source.batch_size}, {num_batches_per_epoch(source)} per epoch, {total} in all"
    others = runtime.refusals.agreed(runtime.store, f"numbers/{number_of_loader}", mine, _read_numbers)
    if others is not None and others != mine.encode():
        theirs = others.decode(errors="replace")[:120]
        raise InputError(
            f"workers differ in what swarm.batches deals: {mine} here; {theirs} elsewhere: "
            "give all workers the same loader and the same number of steps, or swarm.shard loaders of other batch sizes"
        )


def num_batches_per_epoch(source: Source) -> int:
    whole, rest = divmod(source.size, source.batch_size)
    return whole + int(rest > 0 and not source.drop_last)


def epoch_batches(runtime: WorkerRuntime, source: Source, number_of_loader: int, epoch: int) -> list[Any]:
    """Return all batches of an epoch, the same on all workers."""
    set_epoch(source.sampler, epoch)
    order = common_order(source.sampler, runtime.worker.seed, number_of_loader, epoch)
    return cut(order, source.batch_size, source.drop_last) if source.divisible else order


def _read_numbers(value: bytes | None) -> bytes | None:
    text = rb"batches of [0-9]{1,15}, [0-9]{1,15} per epoch, [0-9]{1,15} in all"
    return value if re.fullmatch(text, value or b"") else None


def batch_numbers(runtime: WorkerRuntime, total: int, drawn: Callable[[], int] = lambda: 0) -> Iterator[int]:
    """Yield the numbers of this worker's mini-batches among those of all workers, from 1. ``drawn()``: the newest one
    so far, from which a count that cannot be read goes on."""

    def reserve(count: int) -> tuple[int, float]:
        began = time.monotonic()
        return runtime.refusals.add(runtime.store, "batches", count, drawn()) or 0, time.monotonic() - began

    with ThreadPoolExecutor(1, thread_name_prefix="gossamer-batches") as executor:
        durations: deque[float] = deque(maxlen=16)
        count = 1
        reserved = executor.submit(reserve, count)
        while True:
            (last, duration_s), num_reserved = reserved.result(), count
            durations.append(duration_s)
            step_s = runtime.worker.step_s
            needed = int(2 * max(durations) / step_s) if step_s else 0
            share = (total - last) // (2 * len(runtime.everybody))
            count = 1 + max(0, min(MAX_RESERVED, needed, share))
            reserved = executor.submit(reserve, count)
            for remaining in reversed(range(num_reserved)):
                yield last - remaining
