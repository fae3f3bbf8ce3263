"""Workers share a total number of steps: fast workers make more of them.

A counter in the store numbers the mini-batches. A worker reserves the next numbers while it works on the last ones: as
many as cover the longest of the newest answers, since on a link full of messages an answer may take several steps. But
never more than half of its share of what is left: at the end no worker shall have many while the others have none.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from gossamer.errors import InputError
from gossamer.process.runtime.worker_runtime import WorkerRuntime

MAX_RESERVED = 64

Batch = TypeVar("Batch")


def shared_batches(runtime: WorkerRuntime, loader: Iterable[Batch], total_steps: int) -> Iterator[Batch]:
    """Yield mini-batches until all workers together have taken ``total_steps``."""
    numbers = batch_numbers(runtime, total_steps)
    while True:
        empty = True
        for batch in loader:
            empty = False
            # A store that replaced another counts from what its first user knew; one out of reach does not count.
            runtime.num_batches_taken = max(runtime.num_batches_taken + 1, next(numbers))
            if runtime.num_batches_taken > total_steps:
                return
            yield batch
        if empty:
            raise InputError("the loader gives no batches (any more): give one that can be iterated again")


def batch_numbers(runtime: WorkerRuntime, total: int) -> Iterator[int]:
    """Yield the numbers of this worker's mini-batches among those of all workers, from 1."""

    def reserve(count: int) -> tuple[int, float]:
        began = time.monotonic()
        return runtime.store.add("batches", count) or 0, time.monotonic() - began

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
