"""What the members of a view tell each other besides their vectors: who is ready, what each waits for, who is done.

Each member has an *entry* of its own under a key, and needs those of the others. They travel as messages, through the
*hub*: the member with the lowest rank. All members of a view reach each other, so this works whatever store each of
them uses, if any. A member says its entry to the hub, again and again, with the list of those that it misses; the hub
answers once it has them all, and to who says it again with what there is. So it does no harm if a message is lost or
comes twice, nor if the hub has left and the next member takes its place.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from enum import IntEnum
from typing import NamedTuple, TypeVar

from gossamer.process.collectives.group_connections import HOPELESS_CHECK_S
from gossamer.process.liveness.heartbeats import Heartbeats
from gossamer.process.roster.roster import MAX_RANKS
from gossamer.process.store.parsing import Refusals

T = TypeVar("T")

RETRY_S = 0.2
"""After how long a member says again what it has not had an answer to."""

WAIT_S = 0.1
"""How long a worker waits for entries before it looks whether they can still come."""

MAX_KEYS = 512
"""Keys that a worker remembers; one more forgets the one that was used longest ago."""

MAX_KEY_BYTES = 255
MAX_ENTRY_BYTES = 24 * 1024
MAX_ANSWER_BYTES = 48 * 1024
"""Of one message; an answer may take several."""

NO_ENTRY = 0xFFFF

_HEADER = struct.Struct("<BBHHH")
"""Kind, whether it is said again, lengths of the key and of the sender's entry, number of ranks or of entries."""

_ENTRY = struct.Struct("<HH")
_RANK = struct.Struct("<H")


class EntryKind(IntEnum):
    """Kinds of messages. Those of heartbeats and views have lower numbers."""

    PUBLISH = 32
    """To the hub: the entry of the sender, and whose entries it misses."""
    ENTRIES = 33
    """Entries of some members."""


class EntryMessage(NamedTuple):
    kind: EntryKind
    key: str
    entry: bytes | None = None
    """PUBLISH: that of the sender, if it has one."""
    again: bool = False
    """PUBLISH: answer at once, with what there is."""
    missing: tuple[int, ...] = ()
    entries: tuple[tuple[int, bytes], ...] = ()
    """ENTRIES: by rank."""


def to_bytes(message: EntryMessage) -> bytes:
    key = message.key.encode()
    own, number = message.entry, len(message.missing) or len(message.entries)
    parts = [_HEADER.pack(message.kind, message.again, len(key), NO_ENTRY if own is None else len(own), number), key]
    parts += [own or b"", *map(_RANK.pack, message.missing)]
    for rank, entry in message.entries:
        parts += [_ENTRY.pack(rank, len(entry)), entry]
    return b"".join(parts)


def from_bytes(data: bytes) -> EntryMessage | None:
    """Return the message; None if it is none."""
    try:
        number_of_kind, again, key_bytes, entry_bytes, number = _HEADER.unpack_from(data)
        kind, at = EntryKind(number_of_kind), _HEADER.size + key_bytes
        key = data[_HEADER.size : at].decode()
        if again > 1 or not 0 < key_bytes <= MAX_KEY_BYTES or not key.isascii() or not key.isprintable():
            return None
        if kind == EntryKind.PUBLISH:
            end = at if entry_bytes == NO_ENTRY else at + entry_bytes
            entry = None if entry_bytes == NO_ENTRY else data[at:end]
            missing = tuple(rank for (rank,) in _RANK.iter_unpack(data[end:]))
            bad = end > len(data) or len(missing) != number or list(missing) != sorted(set(missing))
            too_long = entry is not None and len(entry) > MAX_ENTRY_BYTES
            return None if bad or too_long else EntryMessage(kind, key, entry, bool(again), missing)
        entries = []
        for _ in range(number):
            rank, length = _ENTRY.unpack_from(data, at)
            at += _ENTRY.size + length
            entries.append((rank, data[at - length : at]))
            if length > MAX_ENTRY_BYTES:
                return None
        whole = at == len(data) and entry_bytes == NO_ENTRY and not again
        return EntryMessage(kind, key, entries=tuple(entries)) if whole else None
    except (struct.error, ValueError):
        return None


class _Key:
    """What a worker knows under one key."""

    def __init__(self) -> None:
        self.entries: dict[int, bytes] = {}
        self.waiting: dict[int, tuple[int, ...]] = {}
        """Here at the hub: who waits for whose entries."""
        self.said_at = float("-inf")
        self.again = False


class MemberEntries:
    """The entries that one worker knows."""

    def __init__(self, heartbeats: Heartbeats, refusals: Refusals) -> None:
        self.rank, self._heartbeats, self._refusals = heartbeats.rank, heartbeats, refusals
        self._keys: OrderedDict[str, _Key] = OrderedDict()
        self._changed = threading.Condition()
        heartbeats.handlers |= dict.fromkeys(EntryKind, self._on_message)

    # From any thread but that of the loop

    def await_all(
        self, key: str, entry: str, members: Sequence[int], hopeless: Callable[[tuple[int, ...]], bool]
    ) -> dict[int, bytes]:
        """Say our entry and wait for those of all ``members``, however long they take.

        RuntimeError once ``hopeless(awaited members)``.
        """
        checked = time.monotonic()
        while True:
            entries = self.exchange(key, entry, members, WAIT_S)
            awaited = tuple(rank for rank in members if rank not in entries)
            if not awaited:
                return entries
            if time.monotonic() - checked > HOPELESS_CHECK_S:
                checked = time.monotonic()
                if hopeless(awaited):
                    raise RuntimeError(f"workers {list(awaited)} will not come")

    def exchange(self, key: str, entry: str, members: Sequence[int], wait_s: float) -> dict[int, bytes]:
        """Say our entry; return those of ``members`` that are known within ``wait_s``."""
        with self._changed:
            known = self._note(key, {self.rank: entry.encode()})
            # Others may wait for what this one says, even if it misses nothing.
            if known.again and all(rank in known.entries for rank in members):
                return dict(known.entries)
            now = time.monotonic()
            if now - known.said_at >= RETRY_S:
                known.said_at, again, known.again = now, known.again, True
                missing = tuple(rank for rank in members if rank not in known.entries)
                self._say(EntryMessage(EntryKind.PUBLISH, key, entry.encode(), again, missing), members)
            self._changed.wait_for(lambda: all(rank in known.entries for rank in members), wait_s)
            return dict(known.entries)

    def republish(self, key: str, entry: str | None, members: Sequence[int]) -> None:
        """Say our entry, which may be a new one, and ask for those of the others. Waits for nobody."""
        own = None if entry is None else entry.encode()
        with self._changed:
            known = self._note(key, {} if own is None else {self.rank: own})
            now = time.monotonic()
            if now - known.said_at >= RETRY_S:
                known.said_at = now
                others = tuple(rank for rank in members if rank != self.rank)
                # All threads share RETRY_S: one that only asks sends the entry that another has noted.
                self._say(EntryMessage(EntryKind.PUBLISH, key, known.entries.get(self.rank), True, others), members)

    def read(self, key: str, parse: Callable[[bytes], T | None]) -> dict[int, T]:
        """Return what the members have said until now, as far as it has come to this worker and can be read."""
        with self._changed:
            known = self._keys.get(key)
            entries = {} if known is None else dict(known.entries)
        parsed = {rank: parse(entry) for rank, entry in entries.items()}
        for rank in (rank for rank, value in parsed.items() if value is None):
            what = key.rpartition("/")[2]
            self._refusals.refuse(f"{what} of worker {rank}", f"refused what worker {rank} says about its {what}")
        return {rank: value for rank, value in parsed.items() if value is not None}

    def broadcast(self, key: str, entry: str, members: Sequence[int]) -> None:
        """Tell our entry to all at once, and directly: this worker may not be there for much longer."""
        with self._changed:
            self._note(key, {self.rank: entry.encode()})
        message = to_bytes(EntryMessage(EntryKind.ENTRIES, key, entries=((self.rank, entry.encode()),)))
        self._send([rank for rank in members if rank != self.rank], message)

    def _say(self, message: EntryMessage, members: Collection[int]) -> None:
        if len(message.entry or b"") > MAX_ENTRY_BYTES:
            raise ValueError(f"an entry has {len(message.entry or b'')} bytes: expected at most {MAX_ENTRY_BYTES}")
        gone = (rank for rank in members if rank in self._heartbeats.lost or self._heartbeats.has_left(rank))
        hub = min({*members} - {*gone} | {self.rank})
        if hub != self.rank:
            self._send([hub], to_bytes(message))
        elif message.entry is not None:
            self._heartbeats.loop.call_soon(lambda: self._answer_waiting(message.key))

    def _send(self, ranks: Sequence[int], data: bytes) -> None:
        def send() -> None:
            for rank in ranks:
                self._heartbeats.send(rank, data)

        self._heartbeats.loop.call_soon(send)

    def _note(self, key: str, entries: dict[int, bytes]) -> _Key:
        """Take over entries. Holds the lock."""
        known = self._keys.setdefault(key, _Key())
        known.entries |= entries
        self._keys.move_to_end(key)
        if len(self._keys) > MAX_KEYS:
            self._keys.popitem(last=False)
        return known

    # In the thread of the loop

    def _on_message(self, sender: int, data: bytes) -> None:
        message = from_bytes(data)
        if message is None or sender >= MAX_RANKS:
            self._refusals.refuse(f"a message of worker {sender}", f"refused a message of worker {sender}")
            return
        with self._changed:
            if message.kind == EntryKind.ENTRIES:
                self._note(message.key, dict(message.entries))
            else:
                known = self._note(message.key, {} if message.entry is None else {sender: message.entry})
                known.waiting[sender] = message.missing
            self._changed.notify_all()
        if message.kind == EntryKind.PUBLISH:
            if message.again:
                self._answer(sender, message.key, message.missing)
            self._answer_waiting(message.key)

    def _answer_waiting(self, key: str) -> None:
        """Answer those who have waited for what has come by now."""
        with self._changed:
            known = self._keys.get(key)
            if known is None:
                return
            ready = [
                (rank, missing)
                for rank, missing in known.waiting.items()
                if all(other in known.entries for other in missing)
            ]
        for rank, missing in ready:
            self._answer(rank, key, missing)

    def _answer(self, rank: int, key: str, missing: Sequence[int]) -> None:
        with self._changed:
            known = self._keys.get(key, _Key())
            entries = [(other, known.entries[other]) for other in missing if other in known.entries]
            if len(entries) == len(missing):
                known.waiting.pop(rank, None)
        while entries:
            part: list[tuple[int, bytes]] = []
            num_bytes = 0
            while entries and (not part or num_bytes + len(entries[-1][1]) <= MAX_ANSWER_BYTES):
                part.append(entries.pop())
                num_bytes += _ENTRY.size + len(part[-1][1])
            self._heartbeats.send(rank, to_bytes(EntryMessage(EntryKind.ENTRIES, key, entries=tuple(part))))
