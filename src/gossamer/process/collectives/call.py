"""Collectives as their members name them, and how members that wait for each other in different ones find out.

Workers take part in the same collective if kind, topic, round and group are equal. Topics and groups have process
groups of their own, so members that disagree about them would wait for ever. A worker that waits for long tells the
others what its threads wait for. If two workers need each other in different collectives, both raise the same error.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from gossamer.errors import MethodError
from gossamer.process.collectives.member_entries import MAX_ENTRY_BYTES, MemberEntries
from gossamer.process.store.parsing import MAX_NUMBER, read_json, read_text

NUM_REMEMBERED = 64
"""Completed collectives that a worker remembers, to tell a member that is late from one that is elsewhere."""

DIGEST_CHARS = 16

COMPARE_INTERVAL_S, COMPARED_WORKERS = 1.0, 16
"""How often a worker that waits compares with the others; among more workers less often."""

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
        """A short text that is the same for all members of this collective only."""
        group = "all" if self.group is None else ",".join(map(str, self.group))
        return hashlib.sha1(f"{self.kind}/{self.topic}/{self.round}/{group}".encode()).hexdigest()[:DIGEST_CHARS]

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

    def __init__(self, rank: int, entries: MemberEntries) -> None:
        self.rank, self._entries = rank, entries
        self._compared_at = float("-inf")
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

    def is_due(self, now: float, members: int) -> bool:
        """Return whether it is time to compare with the others."""
        if now - self._compared_at < COMPARE_INTERVAL_S * max(1.0, members / COMPARED_WORKERS):
            return False
        self._compared_at = now
        return True

    def compare(self, view: str, members: Sequence[int]) -> MethodError | None:
        """Tell the members of ``view`` what this worker waits for; return the error if two wait for each other."""
        waits, conflict = f"{view}/waits", f"{view}/conflict"
        published = self._publication()
        # It names all members of each group. Of very many that is too much: then nobody compares.
        self._entries.republish(waits, published if len(published) <= MAX_ENTRY_BYTES else None, members)
        found = self.find_conflict(self._entries.read(waits, read_publication))
        if found is not None:
            self._entries.broadcast(conflict, str(found), members)
        text = next(iter(self._entries.read(conflict, read_text).values()), None)
        return None if text is None else MethodError(text)

    def any_waits(self, view: str, members: Sequence[int], ranks: Iterable[int], thread: str) -> bool:
        """Return whether that thread of one of ``ranks`` in the view of ``members`` goes on waiting for this worker."""
        others = [rank for rank in ranks if rank in members and rank != self.rank]
        if not others:
            return False
        self._entries.republish(f"{view}/waits", None, members)
        published = self._entries.read(f"{view}/waits", read_publication)
        return any(self._waits_for_us(rank, thread, published.get(rank)) for rank in others)

    def _publication(self) -> str:
        """Return what to publish, as JSON."""
        self._num_published += 1
        waiting = {
            thread: {"key": call.key, "text": str(call), "members": members, "completed": list(self._done(thread))}
            for thread, (call, members) in list(self._waiting.items())
        }
        return json.dumps({"number": self._num_published, "waiting": waiting})

    def _waits_for_us(self, rank: int, thread: str, published: Publication | None) -> bool:
        other = None if published is None else published.waiting.get(thread)
        if published is None or other is None or self.rank not in other.members:
            return False
        return self._seen(f"worker {rank}", other.key, published.number)

    def find_conflict(self, published: Mapping[int, Publication]) -> MethodError | None:
        """Return the error if a member waits for this worker elsewhere. ``published``: by the other workers."""
        for thread, (call, members) in list(self._waiting.items()):
            for rank in members:
                theirs = None if rank == self.rank else published.get(rank)
                other = None if theirs is None else theirs.waiting.get(thread)
                if theirs is None or other is None:
                    continue
                elsewhere = other.key != call.key and self.rank in other.members
                # One of the two may only be late with what the other has behind it.
                late = other.key in self._done(thread) or call.key in other.completed
                if elsewhere and not late and self._seen(thread, f"{call.key} {other.key}", theirs.number):
                    return mismatch(self.rank, str(call), rank, other.text)
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


class Wait(NamedTuple):
    """What one thread of another worker waits for."""

    key: str
    text: str
    members: list[int]
    completed: list[str]


class Publication(NamedTuple):
    """What another worker waits for."""

    number: int
    waiting: dict[str, Wait]
    """By thread."""


def read_publication(value: bytes | None) -> Publication | None:
    """Return what another worker has published; None if it cannot be read."""
    entries = read_json(value)
    try:
        number = entries["number"]
        waiting = {thread: Wait(**fields) for thread, fields in entries["waiting"].items()}
    except (KeyError, TypeError, AttributeError):
        return None
    valid = type(number) is int and 0 <= number < MAX_NUMBER and all(map(_is_valid, waiting.values()))
    return Publication(number, waiting) if valid else None


def _is_valid(wait: Any) -> bool:
    if not isinstance(wait.members, list) or not isinstance(wait.completed, list):
        return False
    texts = [wait.key, wait.text, *wait.completed]
    return all(isinstance(text, str) and read_text(text.encode(errors="replace")) for text in texts)
