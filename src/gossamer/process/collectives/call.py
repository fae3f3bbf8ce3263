"""Collectives as their members name them, and how members that wait for each other in different ones find out.

Workers take part in the same collective if kind, topic, round and group are equal. Topics and groups have process
groups of their own, so members that disagree about them would wait for ever. A worker that waits for long publishes in
the store what its threads wait for. If two workers need each other in different collectives, both raise the same error.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gossamer.errors import MethodError

NUM_REMEMBERED = 64
"""Completed collectives that a worker remembers, to tell a member that is late from one that is elsewhere."""

NUM_SIGHTINGS = 3
"""A conflict counts once it was seen this often, each time with a newer publication of the other side."""


@dataclass(frozen=True)
class Call:
    """One collective, as one member requests it."""

    kind: str
    topic: str
    round: int
    group: tuple[int, ...] | None = None
    """``None``: all workers."""
    layout: str = ""
    """Lengths and dtypes of what is sent."""

    @property
    def name(self) -> str:
        """What its members must agree on before they connect."""
        return f"{self.kind}/{self.topic}"

    @property
    def first(self) -> str:
        """What its members compare when they connect, at the first collective of a topic."""
        return f"{self.kind} {self.topic!r} round {self.round}, {self.layout}"

    @property
    def key(self) -> str:
        group = "all" if self.group is None else ",".join(map(str, self.group))
        return f"{self.kind}/{self.topic}/{self.round}/{group}"

    def __str__(self) -> str:
        group = "all workers" if self.group is None else f"workers {', '.join(map(str, self.group))}"
        layout = f" ({self.layout})" if self.layout else ""
        return f"{self.kind} {self.topic!r} round {self.round} of {group}{layout}"


def mismatch(one: int, its: str, other: int, others: str) -> MethodError:
    """Return the error of two workers that are in different collectives; both sides say the same."""
    (one, its), (other, others) = sorted(((one, its), (other, others)))
    return MethodError(
        f"worker {one} is in {its}, worker {other} in {others}: expected the same collective on all of its members; "
        "topic, round, group and length must not depend on the worker"
    )


class Waits:
    """What the threads of this worker wait for, by thread, and what was completed before."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._waiting: dict[str, tuple[Call, tuple[int, ...]]] = {}
        self._completed: dict[str, deque[str]] = {}
        self._num_published = 0
        self._sightings: dict[str, tuple[str, int, int]] = {}
        """For each thread: the pair of calls in conflict, the newest publication that shows it, how many did."""

    def begin(self, thread: str, call: Call, members: tuple[int, ...]) -> None:
        self._waiting[thread] = (call, members)

    def end(self, thread: str, completed: bool) -> None:
        ended = self._waiting.pop(thread, None)
        if completed and ended is not None:
            self._completed.setdefault(thread, deque(maxlen=NUM_REMEMBERED)).append(ended[0].key)

    def publication(self) -> str:
        """Return what to publish, as JSON."""
        self._num_published += 1
        waiting = {
            thread: {"key": call.key, "text": str(call), "members": members, "completed": list(self._done(thread))}
            for thread, (call, members) in list(self._waiting.items())
        }
        return json.dumps({"number": self._num_published, "waiting": waiting})

    def waited_for_by(self, rank: int, thread: str, published: bytes | None) -> bool:
        """Return whether that thread of worker ``rank``, which ``published`` this, goes on waiting for us."""
        theirs = _parse(published)
        other = None if theirs is None else theirs["waiting"].get(thread)
        if theirs is None or other is None or self.rank not in other["members"]:
            return False
        return self._seen(f"worker {rank}", other["key"], theirs["number"])

    def find_conflict(self, read: Callable[[int], bytes | None]) -> MethodError | None:
        """Return the error if a member waits for this worker elsewhere. ``read(rank)``: what that worker published."""
        for thread, (call, members) in list(self._waiting.items()):
            for rank in members:
                theirs = None if rank == self.rank else _parse(read(rank))
                if theirs is None or thread not in theirs["waiting"]:
                    continue
                other = theirs["waiting"][thread]
                elsewhere = other["key"] != call.key and self.rank in other["members"]
                # One of the two may only be late with what the other has behind it.
                late = other["key"] in self._done(thread) or call.key in other["completed"]
                if elsewhere and not late and self._seen(thread, f"{call.key} {other['key']}", theirs["number"]):
                    return mismatch(self.rank, str(call), rank, other["text"])
        return None

    def _done(self, thread: str) -> tuple[str, ...]:
        return tuple(self._completed.get(thread, ()))

    def _seen(self, thread: str, conflict: str, number: int) -> bool:
        known, newest, times = self._sightings.get(thread, ("", 0, 0))
        if known != conflict:
            newest, times = 0, 0
        if number > newest:
            times += 1
        self._sightings[thread] = (conflict, number, times)
        return times >= NUM_SIGHTINGS


def _parse(published: bytes | None) -> dict[str, Any] | None:
    """Return what another worker published; None if there is nothing, or nothing that can be read."""
    try:
        theirs = json.loads(published or b"")
        for other in theirs["waiting"].values():
            other["key"], other["text"], other["members"], other["completed"]
        return dict(theirs) if isinstance(theirs["number"], int) else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
