"""Barriers, broadcasts, gathers and reductions for the hooks of other libraries, at any time of a worker's life.

Before ``join`` they go through the key-value store and wait for all workers to start. Once joined they go through the
swarm and wait for the workers that are alive and not done. After the end a worker is alone.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.errors import InputError
from gossamer.process.averages.gathering import decode_tensor, decode_value, encode_tensor, encode_value
from gossamer.process.runtime.swarm import Swarm
from gossamer.process.store.failover_store import FailoverStore
from gossamer.process.store.rank_info import START_TIMEOUT_S, find_rank, find_rank_info

POLL_S = 0.02
READ_TIMEOUT_S = 30.0
"""How long the host of the store stays until the others have read what they gather."""

REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda stacked: stacked.mean(0),
    "avg": lambda stacked: stacked.mean(0),
    "sum": lambda stacked: stacked.sum(0),
    "max": lambda stacked: stacked.amax(0),
    "min": lambda stacked: stacked.amin(0),
}


class _Part(NamedTuple):
    rank: int
    message: bytes


class WorkerCollectives:
    """The collectives of one worker. Set ``swarm`` after ``join``, and call ``end`` after ``finish`` or ``close``."""

    def __init__(self) -> None:
        self.rank, self.workers = find_rank()
        self._swarm: Swarm | None = None
        self._store: FailoverStore | None = None
        self._num_calls = itertools.count()
        self._ended = False

    @property
    def swarm(self) -> Swarm | None:
        return self._swarm

    @swarm.setter
    def swarm(self, swarm: Swarm) -> None:
        # All workers have joined, so none of them needs the keys of before any more.
        self._swarm, self._ended = swarm, False
        self._close_store()

    def end(self) -> None:
        """From now on this worker is alone."""
        self._swarm, self._ended = None, True
        self._close_store()

    def barrier(self, name: str = "") -> None:
        """Wait for the other workers."""
        self._gather(f"barrier {name}", b"")

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Return the value of worker ``source``, or of the first worker alive if that one is gone; JSON data."""
        if self.workers == 1 or self._ended:
            return value
        message = encode_value(value) if self.rank == source else b""
        parts = [part for part in self._gather(f"broadcast {source}", message) if part.message]
        return decode_value(parts[0].message, parts[0].rank) if parts else value

    def gather_values(self, value: Any) -> list[Any]:
        """Return the values of all workers, in rank order; JSON data."""
        return [decode_value(message, rank) for rank, message in self._gather("values", encode_value(value))]

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all workers, in rank order. Their shapes may differ."""
        parts = self._gather("tensor", encode_tensor(tensor))
        return [decode_tensor(message, rank).to(tensor.device) for rank, message in parts]

    def reduce(self, tensor: Tensor, kind: str) -> Tensor:
        """Return the mean, sum, maximum or minimum over the workers, in the tensor's dtype."""
        if kind not in REDUCTIONS:
            raise InputError(f"cannot reduce with {kind!r} over the workers: expected mean, sum, max or min")
        wide = tensor.detach().double() if kind in ("mean", "avg") or tensor.dtype == torch.bool else tensor
        return REDUCTIONS[kind](stack(self.gather(wide))).to(tensor.dtype)

    def _gather(self, tag: str, message: bytes) -> list[_Part]:
        """Return what all workers gave to the same call, in rank order.

        A worker that came back may be in another call than the rest: each then sees only what was given to its own.
        """
        if self.workers == 1 or self._ended:
            return [_Part(self.rank, message)]
        tagged = f"{tag}\n".encode() + message
        parts = self._gather_in_store(tagged) if self._swarm is None else self._swarm.gather_bytes(tagged)
        split = {rank: part.partition(b"\n") for rank, part in parts.items()}
        return [_Part(rank, content) for rank, (theirs, _, content) in split.items() if theirs.decode() == tag]

    def _gather_in_store(self, message: bytes) -> dict[int, bytes]:
        if self._store is None:
            self._store = find_rank_info().connect_store()
        key = f"before join/{next(self._num_calls)}"
        self._store.set(f"{key}/{self.rank}", message)
        until = time.monotonic() + START_TIMEOUT_S
        parts: dict[int, bytes] = {}
        for rank in range(self.workers):
            while (part := self._store.get(f"{key}/{rank}")) is None:
                if time.monotonic() > until:
                    raise InputError(f"worker {rank} did not start within {START_TIMEOUT_S:.0f} s: see its own output")
                time.sleep(POLL_S)
            parts[rank] = part
        self._store.set(f"{key}/read/{self.rank}", "1")
        if self._store.hosted_here:
            # This process may end now, and its store with it.
            self._store.has_all([f"{key}/read/{rank}" for rank in range(self.workers)], READ_TIMEOUT_S)
        return parts

    def _close_store(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None


def stack(tensors: list[Tensor]) -> Tensor:
    """Return the workers' tensors as one, with a leading dimension for the workers."""
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if len(set(shapes)) > 1:
        raise InputError(f"workers gave tensors of different shapes, {shapes}: expected the same shape on all")
    return torch.stack(tensors)
