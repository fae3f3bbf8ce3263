"""Series of collectives that the user's thread asks for: means, gathers and broadcasts outside of the method's steps.

All workers alive run the same series in the same order. If one is lost in the middle of a series, the others agree on
the survivors and start the series again. That needs care: one of them may have completed it and gone on. So series are
numbered, each worker publishes the number of its last one, and a worker that finds the others past its own goes on
with its own values.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from gossamer.errors import InputError
from gossamer.process.collectives.call import Call
from gossamer.process.collectives.membership import FOREGROUND
from gossamer.process.events import EventKind
from gossamer.process.lifecycle import StepRetry, TrainingEnded
from gossamer.process.replica.agreement import Ended
from gossamer.process.runtime.worker_runtime import WorkerRuntime
from gossamer.process.store.parsing import read_number
from gossamer.process.watches import waits

T = TypeVar("T")


NAMES = ("averaged", "mean", "gather")
"""Methods of ``Swarm`` that run a series."""


class _Missed(Ended):
    """The others have completed this series, or the training needs this worker before it can be completed."""


class UserSeries:
    """The series of one worker."""

    def __init__(self, runtime: WorkerRuntime) -> None:
        self._runtime, self._of = runtime, runtime.groups.averaged
        self._number = -1
        """That of the last series; −1 before the first one."""
        self._said_alone = False
        runtime.store.on_move.append(self._publish)

    def check_open(self, name: str) -> None:
        """InputError if this worker has left the job."""
        if self._runtime.state.forked or self._runtime.lifecycle.done:
            raise InputError(
                f"this worker has left the job with finish() or close(): call swarm.{name} before that; "
                "after finish() all workers hold the averaged model"
            )

    def run(self, series: Callable[[], T], name: str, size: int = 0) -> T | None:
        """Return what ``series`` returns among the workers alive; None if they went on without this worker.

        ``name``: of the method of ``Swarm``; ``size``: what has to be equal on all workers. InputError if these differ.
        """
        self.check_open(name)
        # A worker that came back takes part from the next series of the others on.
        self._number = self._number + 1 if self._number >= 0 else self._last_of_others() + 1
        self._runtime.store.set(f"series-at/{self._runtime.rank}", str(self._number))
        self._of.cancelled = self._is_futile
        saying = threading.Timer(waits.SAY_AFTER_S, self._say_who_is_missing, (name,))
        saying.daemon = True
        saying.start()
        try:
            while True:
                with contextlib.suppress(StepRetry):
                    if self._together(lambda: self._begin(name, size)):
                        result = self._together(series)
                        self._say_if_alone(name)
                        return result
        except (_Missed, TrainingEnded):
            if self._runtime.lifecycle.closed:
                raise
            text = (
                f"swarm.{name} has only this worker's own values: the others went on without it, since a worker was "
                "lost or not all of them called it"
            )
            self._runtime.state.events.add(EventKind.NOT_AVERAGED, text)
            return None
        finally:
            saying.cancel()
            self._of.cancelled = lambda: False
            self._publish()

    def _together(self, act: Callable[[], T]) -> T:
        """Return what ``act`` returns; in a replica, if it completes on all its ranks."""
        replica = self._runtime.state.replica
        return act() if replica is None else replica.whole(self._of, act)

    def _begin(self, name: str, size: int) -> bool:
        self._of.begin()
        return self._all_are_here(name, size)

    def _say_if_alone(self, name: str) -> None:
        others_alive = len(self._runtime.everybody) - 1 - len(self._runtime.heartbeats.lost)
        if self._of.members == [self._runtime.rank] and others_alive and not self._said_alone:
            self._said_alone = True
            text = f"swarm.{name} has only this worker's own values: the others have finished"
            self._runtime.state.events.add(EventKind.NOT_AVERAGED, text)

    def _say_who_is_missing(self, name: str) -> None:
        """Runs in a thread of its own, while the series waits."""
        runtime = self._runtime
        missing = [
            rank
            for rank in runtime.everybody
            if rank != runtime.rank
            and rank not in runtime.heartbeats.lost
            and not runtime.heartbeats.done(rank)
            and not self._has_come(rank)
        ]
        if missing:
            runtime.state.events.add(EventKind.WAITING, waits.series_line(name, missing))

    def _has_come(self, rank: int) -> bool:
        number = self._number_of("series-at", rank)
        return number is not None and number >= self._number

    def _all_are_here(self, name: str, size: int) -> bool:
        """Return whether all members are in this series; False if one has to catch up first."""
        own = torch.tensor([self._number, NAMES.index(name), size])
        gathered = self._runtime.groups.gather(self._of, FOREGROUND, (own,), Call("Gather", "series", 0))
        numbers = {int(number) for ((number, _, _),) in gathered}
        if self._number < max(numbers):
            raise _Missed
        if len(numbers) > 1:
            return False
        calls = [(NAMES[int(at)], int(length)) for ((_, at, length),) in gathered]
        if len(set(calls)) > 1:
            other = next(index for index, call in enumerate(calls) if call != calls[0])
            shown = (f"worker {self._of.members[index]} called {_shown(*calls[index])}" for index in (0, other))
            raise InputError(f"{', '.join(shown)}: all workers must make the same calls in the same order")
        return True

    def _is_futile(self) -> bool:
        """Return whether to agree on new members is in vain: some of them will not come to this series."""
        train = self._runtime.groups.train
        # In lockstep the others may need this worker in a step that is repeated, before they come here.
        wanted = self._runtime.method.lockstep and train.requested > train.generation
        return wanted or self._last_of_others() >= self._number or train.waited_for_by(self._runtime.everybody)

    def _last_of_others(self) -> int:
        runtime = self._runtime
        others = (rank for rank in runtime.everybody if rank != runtime.rank and not runtime.heartbeats.dead(rank))
        published = (self._number_of("series", rank) for rank in others)
        return max((number for number in published if number is not None), default=-1)

    def _number_of(self, what: str, rank: int) -> int | None:
        key = f"{what}/{rank}"
        published = self._runtime.store.get(key)
        return self._runtime.refusals.checked(key, published, read_number(published))

    def _publish(self) -> None:
        if self._number >= 0:
            self._runtime.store.set(f"series/{self._runtime.rank}", str(self._number))


def _shown(name: str, size: int) -> str:
    return f"swarm.{name} of {size} numbers" if size else f"swarm.{name}"
