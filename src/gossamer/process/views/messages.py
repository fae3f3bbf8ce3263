"""What workers tell each other when they agree on a view, and how it travels: a fixed binary form, read strictly."""

from __future__ import annotations

import struct
import zlib
from enum import IntEnum
from typing import NamedTuple

from gossamer.process.state.lineage import ViewId
from gossamer.process.store.parsing import MAX_PROCESS

PURPOSES = TRAIN, AVERAGED, FINISH = "train", "averaged", "finish"
"""What views are for: training, the average that a user asks for, the final average."""

NO_VIEW = ViewId(0, 0, 0)
"""Lower than every view."""


class Member(NamedTuple):
    rank: int
    process: int
    """A worker that is started again is another process: no member of the views of the one before."""


class View(NamedTuple):
    """Who takes part in collectives until the next view."""

    id: ViewId
    members: tuple[Member, ...]
    """Sorted by rank."""

    @property
    def ranks(self) -> list[int]:
        return [member.rank for member in self.members]

    @property
    def mark(self) -> int:
        """A short number that tells this view from others; never 0."""
        return zlib.crc32(_ID.pack(*self.id)) or 1


class ViewKind(IntEnum):
    """Kinds of messages. Those of heartbeats have lower numbers."""

    PRESENT = 16
    """To the coordinator: the sender waits for view ``number``. ``id``: the highest view that it has accepted."""
    PROPOSE = 17
    """To the members: these shall be the members of ``id``."""
    ACCEPT = 18
    """To the coordinator: the sender will take part in ``id``, and in no lower view from now on."""
    INSTALL = 19
    """All members have accepted ``id``: it begins. Also the answer to a worker that asks for it later."""
    ABSENT = 20
    """The sender does not wait for view ``id`` any more."""
    REQUESTED = 21
    """View ``number`` is requested: a lower one is over."""


class ViewMessage(NamedTuple):
    kind: ViewKind
    purpose: int
    """Its place in ``PURPOSES``."""
    process: int
    """That of the sender."""
    number: int
    id: ViewId = NO_VIEW
    members: tuple[Member, ...] = ()


_ID = struct.Struct("<QHQ")
_HEADER = struct.Struct("<BBQQQHQH")
_MEMBER = struct.Struct("<HQ")


def to_bytes(message: ViewMessage) -> bytes:
    kind, purpose, process, number, id, members = message
    header = _HEADER.pack(kind, purpose, process, number, *id, len(members))
    return header + b"".join(_MEMBER.pack(*member) for member in members)


def from_bytes(data: bytes, workers: int) -> ViewMessage | None:
    """Return the message; None if that is none of a run with so many workers."""
    try:
        kind, purpose, process, number, *id, count = _HEADER.unpack_from(data)
        rest = memoryview(data)[_HEADER.size :]
        if len(rest) != count * _MEMBER.size or purpose >= len(PURPOSES):
            return None
        members = tuple(Member(*fields) for fields in _MEMBER.iter_unpack(rest))
        ranks = [member.rank for member in members]
        if ranks != sorted(set(ranks)) or any(rank >= workers for rank in (*ranks, id[1])):
            return None
        if max(process, id[2], *(member.process for member in members)) > MAX_PROCESS:
            return None
        return ViewMessage(ViewKind(kind), purpose, process, number, ViewId(*id), members)
    except (struct.error, ValueError):
        return None
