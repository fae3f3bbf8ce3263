"""Epochs of a user's own loop, and among which workers each one is dealt.

Workers do not wait for each other, so each is in an epoch of its own. The first worker that begins an epoch writes into
the store who is there; all others follow it. So shares of one epoch never overlap, whoever dies meanwhile, and the next
epoch is dealt among those who are left or came back.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from gossamer.errors import InputError
from gossamer.process.events import EventKind
from gossamer.process.roster.roster import MAX_RANKS
from gossamer.process.runtime.worker_runtime import WorkerRuntime
from gossamer.process.store.parsing import read_number, read_ranks


@dataclass
class Pass:
    """One pass of a loader over this worker's share of an epoch."""

    epoch: int
    length: int | None
    """Batches of the whole share; None: nobody knows."""
    position: int = 0
    """Batches taken so far, including those of a run that this one resumes."""
    exhausted: bool = False

    @property
    def done(self) -> bool:
        return self.exhausted or (self.length is not None and self.position >= self.length)

    @property
    def fraction(self) -> float:
        if self.done:
            return 1.0
        return self.position / self.length if self.length else 0.0

    @property
    def resume_at(self) -> tuple[int, int]:
        """Epoch and position to go on with after a checkpoint."""
        return (self.epoch + 1, 0) if self.done else (self.epoch, self.position)


class Epochs:
    """The epochs of this worker."""

    def __init__(self, runtime: WorkerRuntime) -> None:
        self.runtime = runtime
        self._members: dict[int, tuple[int, ...]] = {}
        """The ranks among whom each epoch is dealt."""
        self._begun = self._ended = False
        self.total = 0
        self.current = 0
        """The epoch that ``loop`` is in, or that it begins with."""
        self.inside = False
        """The body of ``loop`` runs."""
        self.counted: Pass | None = None
        """The first pass over a loader in this epoch: progress counts its batches."""
        self._loaded: list[tuple[int, int]] | None = None
        """Epoch and position of each loader in the checkpoint that was loaded."""

    # Who takes part

    def members(self, epoch: int) -> tuple[int, ...]:
        """Return among whom ``epoch`` is dealt. The first worker that asks decides."""
        if epoch in self._members:
            return self._members[epoch]
        runtime = self.runtime
        absent = runtime.heartbeats.lost
        others = (rank for rank in runtime.everybody if rank != runtime.rank and rank not in absent)
        present = [runtime.rank, *(rank for rank in others if not runtime.heartbeats.done(rank))]
        read = partial(read_ranks, everybody=range(MAX_RANKS))
        agreed = runtime.refusals.agreed(runtime.store, f"epoch/{epoch}", json.dumps(sorted(present)), read)
        members = tuple(agreed or sorted(present))
        if self._newest() < epoch:
            runtime.store.set("epoch", str(epoch))
        before = self._members[max(self._members)] if self._members else tuple(runtime.everybody)
        if members != before:
            text = f"the data of epoch {epoch} is dealt among workers {', '.join(map(str, members))}"
            runtime.state.events.add(EventKind.DEALT, text)
        self._members[epoch] = members
        return members

    def _newest(self) -> int:
        """Return the newest epoch that anybody has begun; −1 if none is known."""
        published = self.runtime.store.get("epoch")
        newest = self.runtime.refusals.checked("epoch", published, read_number(published))
        return -1 if newest is None else newest

    def takes_part(self, epoch: int) -> bool:
        """Return whether this worker trains in ``epoch``.

        One that came back has no share of the epochs that were dealt without it. In lockstep it takes part all the
        same, with examples that others have too: they wait for its steps.
        """
        return self.runtime.method.lockstep or self.runtime.rank in self.members(epoch)

    def republish(self) -> None:
        """Publish the newest deals in a store that may be new."""
        for epoch in sorted(self._members)[-2:]:
            self.runtime.store.compare_set(f"epoch/{epoch}", json.dumps(self._members[epoch]))
            self.runtime.store.set("epoch", str(epoch))

    # Where this worker begins

    def begin(self, number: int) -> tuple[int, int]:
        """Return epoch and position at which loader ``number`` begins: 0, that of a checkpoint, or the others'."""
        if self._loaded is not None:
            return self._loaded[number] if number < len(self._loaded) else (self.current, 0)
        if not self.runtime.came_back:
            return 0, 0
        # Workers in lockstep are at the same batch. Others need only be in the same epoch.
        position = self.runtime.state.data_position
        if position is not None:
            return position if number == 0 else (position[0], 0)
        return max(self._newest(), 0), 0

    def loop(self, total: int) -> Iterator[int]:
        """Yield the epochs that are left of ``total``."""
        if total < 1:
            raise InputError(f"epochs is {total}: expected 1 or more")
        if self._ended and total <= self.current:
            raise InputError(f"the {self.current} epochs of this run are done: give swarm.epochs a larger number")
        self.total = total
        if not self._begun:
            self._begun = True
            if self._loaded is None:
                self.current = self.begin(0)[0]
        return self._loop()

    def _loop(self) -> Iterator[int]:
        self.inside = True
        try:
            while self.current < self.total:
                self.counted = None
                if self.takes_part(self.current):
                    yield self.current
                self.counted = None
                self.current += 1
            self._ended = True
        finally:
            self.inside = False

    @property
    def progress(self) -> float:
        done = self.current + (0.0 if self.counted is None else self.counted.fraction)
        return min(1.0, done / self.total)

    # Checkpoints

    def next_epoch(self, has_loaders: bool) -> int:
        """Return the epoch with which to go on after a checkpoint at this moment."""
        if not self.inside:
            return self.current
        # Without loaders of ours nobody knows whether the epoch is over: checkpoints are written at its end.
        done = not has_loaders if self.counted is None else self.counted.done
        return self.current + int(done)

    def load(self, state: dict[str, Any]) -> None:
        self.current = state["epoch"]
        self._loaded = [(epoch, position) for epoch, position in state["loaders"]]
