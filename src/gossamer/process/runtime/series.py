"""Series of collectives that the user's thread asks for: means, gathers and broadcasts outside of the method's steps.

All workers alive run the same series in the same order. If one is lost in the middle of a series, the others agree on
the survivors and start the series again. That needs care: one of them may have completed it and gone on. So series are
numbered, each worker publishes the number of its last one, and a worker that finds the others past its own goes on
with its own values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeVar

import torch

from gossamer.process.collectives.call import Call
from gossamer.process.collectives.membership import FOREGROUND, StepRetry
from gossamer.process.events import EventKind
from gossamer.process.lifecycle import TrainingEnded
from gossamer.process.replica.agreement import Ended
from gossamer.process.runtime.worker_runtime import WorkerRuntime
from gossamer.process.store.parsing import read_number

T = TypeVar("T")


class _Missed(Ended):
    """The others have completed this series, or the training needs this worker before it can be completed."""


class UserSeries:
    """The series of one worker."""

    def __init__(self, runtime: WorkerRuntime) -> None:
        self._runtime, self._of = runtime, runtime.groups.averaged
        self._number = -1
        """That of the last series; −1 before the first one."""
        runtime.store.on_move.append(self._publish)

    def run(self, series: Callable[[], T], what: str) -> T | None:
        """Return what ``series`` returns among the workers alive; None if they went on without this worker.

        ``what``: for the event that tells so.
        """
        # A worker that came back takes part from the next series of the others on.
        self._number = self._number + 1 if self._number >= 0 else self._last_of_others() + 1
        self._of.cancelled = self._is_futile
        try:
            while True:
                with contextlib.suppress(StepRetry):
                    if self._together(self._begin):
                        return self._together(series)
        except (_Missed, TrainingEnded):
            if self._runtime.lifecycle.closed:
                raise
            text = f"{what}: a worker was lost, and the others went on: using only our own"
            self._runtime.state.events.add(EventKind.NOT_AVERAGED, text)
            return None
        finally:
            self._of.cancelled = lambda: False
            self._publish()

    def _together(self, act: Callable[[], T]) -> T:
        """Return what ``act`` returns; in a replica, if it completes on all its ranks."""
        replica = self._runtime.state.replica
        return act() if replica is None else replica.whole(self._of, act)

    def _begin(self) -> bool:
        self._of.begin()
        return self._all_are_here()

    def _all_are_here(self) -> bool:
        """Return whether all members are in this series; False if one has to catch up first."""
        own = torch.tensor([self._number])
        gathered = self._runtime.groups.gather(self._of, FOREGROUND, (own,), Call("Gather", "series", 0))
        numbers = {int(number) for (number,) in gathered}
        if self._number < max(numbers):
            raise _Missed
        return len(numbers) == 1

    def _is_futile(self) -> bool:
        """Return whether to agree on new members is in vain: some of them will not come to this series."""
        train = self._runtime.groups.train
        # In lockstep the others may need this worker in a step that is repeated, before they come here.
        wanted = self._runtime.method.lockstep and train.requested > train.generation
        return wanted or self._last_of_others() >= self._number or train.waited_for_by(self._runtime.everybody)

    def _last_of_others(self) -> int:
        runtime = self._runtime
        others = (rank for rank in runtime.everybody if rank != runtime.rank and not runtime.heartbeats.dead(rank))
        published = (read_number(runtime.store.get(f"series/{rank}")) for rank in others)
        return max((number for number in published if number is not None), default=-1)

    def _publish(self) -> None:
        if self._number >= 0:
            self._runtime.store.set(f"series/{self._runtime.rank}", str(self._number))
