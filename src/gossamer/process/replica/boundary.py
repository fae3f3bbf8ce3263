"""Boundaries: the ends of optimizer steps, at which all ranks of a replica do the same in the background part.

The first rank decides alone. When its gradient of a step is there, it sends a *line*: which calls of the background
part run at the end of this step, and to whom the replica gives its state. The other ranks need the line only when their
own optimizer has made its update, so nobody waits for it in practice, and it is no collective: a rank that is there
before the line waits for it.

Calls are numbered as the background part makes them, which is the same order on all ranks. Outside of steps, while the
replica joins or finishes, the first rank sends lines whenever there is something to do.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from gossamer.errors import InputError
from gossamer.process.lifecycle import Lifecycle, TrainingEnded
from gossamer.process.replica.background import Decision
from gossamer.process.replica.watch import ReplicaWatch

BETWEEN_STEPS = -1
POLL_S = 0.1
PUMP_S = 0.02

OVERDUE_STEPS, OVERDUE_S = 4.0, 2.0
"""A replica without a boundary for so many of its steps and seconds makes no exchanges: its user evaluates, say."""


class Line(NamedTuple):
    """What happens at one boundary."""

    step: int
    """The step at whose end it is, or BETWEEN_STEPS."""
    num_calls: int
    """All calls up to this number run, if they have not yet."""
    gives: tuple[tuple[int, int], ...] = ()
    """To which replicas this one gives its state: their numbers, and those of the exchanges."""
    goes_on: bool = False
    """What the replica waits for between steps has come."""


class BoundaryLog:
    """The lines of a replica as one rank knows them. No threads."""

    def __init__(self) -> None:
        self.num_submitted = self.num_run = 0
        self._gives: list[tuple[int, int]] = []
        self._lines: deque[Line] = deque()

    def submit(self) -> int:
        """Return the number of a new call."""
        self.num_submitted += 1
        return self.num_submitted

    def give(self, peer: int, number: int) -> None:
        """On the first rank: give the state to a replica at the next boundary."""
        self._gives.append((peer, number))

    def close(self, step: int, goes_on: bool = False) -> Line | None:
        """On the first rank: decide what happens at a boundary. None if there is nothing to do between steps."""
        if step == BETWEEN_STEPS and not (goes_on or self.has_more):
            return None
        line = Line(step, self.num_submitted, tuple(self._gives), goes_on)
        self._gives.clear()
        self._lines.append(line)
        return line

    @property
    def has_more(self) -> bool:
        """On the first rank: whether there is something to do of which no line tells yet."""
        return bool(self._gives) or self.num_submitted > (self._lines[-1].num_calls if self._lines else self.num_run)

    def hear(self, line: Line) -> None:
        self._lines.append(line)

    def next(self) -> Line | None:
        """Return the next line, if this rank knows it and has submitted all its calls."""
        ready = self._lines and self._lines[0].num_calls <= self.num_submitted
        return self._lines[0] if ready else None

    def pass_line(self) -> Line:
        """The next line is done."""
        line = self._lines.popleft()
        self.num_run = line.num_calls
        return line


class Boundary:
    """The boundaries of one rank: its background thread waits for them, its training thread passes them."""

    def __init__(self, watch: ReplicaWatch, lifecycle: Lifecycle, give: Callable[[int, int], None]) -> None:
        """``give(peer, number)``: begin to give this part of the state, as it is now, to a replica."""
        self.is_first = watch.inner.shard == 0
        self._watch, self._lifecycle, self._give = watch, lifecycle, give
        self._log = BoundaryLog()
        self._changed = threading.Condition()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._decisions: deque[Decision] = deque()
        self._passed_at = time.monotonic()
        self.step_s = 0.0
        watch.on_message |= {"decision": self._hear_decision, "line": self._hear_line}

    # The background thread

    def run_at(self, act: Callable[[], Any]) -> Any:
        """Return what ``act()`` returns at a boundary, in the training thread."""
        future: Future[Any] = Future()
        with self._changed:
            self._calls.append((act, future))
            self._log.submit()
            self._changed.notify_all()
            while not future.done():
                if self._lifecycle.closed:
                    raise TrainingEnded
                self._changed.wait(POLL_S)
        return future.result()

    def tell(self, decision: Decision) -> None:
        """On the first rank: tell the others what it has decided."""
        self._watch.send(f"decision {json.dumps(decision)}")

    def hear_decision(self) -> Decision:
        """On the others: return the next decision of the first rank."""
        with self._changed:
            while not self._decisions:
                if self._lifecycle.closed:
                    raise TrainingEnded
                self._changed.wait(POLL_S)
            return self._decisions.popleft()

    def give(self, peer: int, number: int) -> None:
        """On the first rank, in any thread: give the state to a replica at the next boundary."""
        with self._changed:
            self._log.give(peer, number)

    def overdue(self) -> bool:
        """Return whether the training thread is busy with something else than steps."""
        return time.monotonic() - self._passed_at > max(OVERDUE_S, OVERDUE_STEPS * self.step_s)

    # The watch's thread

    def _hear_decision(self, text: str) -> None:
        with self._changed:
            self._decisions.append(Decision(*json.loads(text)))
            self._changed.notify_all()

    def _hear_line(self, text: str) -> None:
        step, num_calls, gives, goes_on = json.loads(text)
        with self._changed:
            self._log.hear(Line(step, num_calls, tuple((peer, number) for peer, number in gives), goes_on))
            self._changed.notify_all()

    # The training thread

    def close(self, step: int) -> None:
        """The gradient of a step is there: the first rank decides what happens at its end."""
        if self.is_first:
            self._close(step)

    def _close(self, step: int, goes_on: bool = False) -> None:
        with self._changed:
            line = self._log.close(step, goes_on)
        if line is not None:
            self._watch.send(f"line {json.dumps(line)}")

    def cross(self, step: int) -> None:
        """Do what happens at the end of this step."""
        passed = BETWEEN_STEPS
        while passed == BETWEEN_STEPS:
            with self._changed:
                while self._log.next() is None:
                    if self._watch.gone:
                        raise InputError(self._watch.gone)
                    if self._lifecycle.closed:
                        return
                    self._changed.wait(POLL_S)
            passed = self._pass().step
        if passed != step:
            raise InputError(
                f"rank {self._watch.inner.shard} of this replica is at step {step} and its first rank at step "
                f"{passed}: all ranks of a replica must call optimizer.step() equally often"
            )

    def serve(self, until: Callable[[], bool], agreed: bool = True) -> None:
        """Pass boundaries between steps, until the first rank finds that ``until()``, and tells the others.

        Not ``agreed``: each rank finds it by itself.
        """
        while not self._lifecycle.closed:
            over, self._passed_at = until(), time.monotonic()
            if self.is_first:
                self._close(BETWEEN_STEPS, goes_on=over and agreed)
            goes_on = self._pass_all()
            if goes_on or (over and not agreed):
                return
            with self._changed:
                if self._log.next() is None:
                    self._changed.wait(PUMP_S)

    def _pass_all(self) -> bool:
        """Pass all lines that are known; return whether one of them ends the wait."""
        while True:
            with self._changed:
                line = self._log.next()
            if line is None:
                return False
            if line.step != BETWEEN_STEPS:
                raise InputError(
                    f"rank {self._watch.inner.shard} of this replica waits, and its first rank is at step {line.step}: "
                    "all ranks of a replica must call optimizer.step() equally often"
                )
            if self._pass().goes_on:
                return True

    def _pass(self) -> Line:
        with self._changed:
            line = self._log.next()
            assert line is not None, "it was there"
            calls = [self._calls.popleft() for _ in range(line.num_calls - self._log.num_run)]
            self._log.pass_line()
        for peer, number in line.gives:
            self._give(peer, number)
        for act, future in calls:
            try:
                future.set_result(act())
            except BaseException as error:
                future.set_exception(error)
        self._passed_at = time.monotonic()
        with self._changed:
            self._changed.notify_all()
        return line
