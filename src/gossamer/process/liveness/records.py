"""What workers tell each other about themselves, and how it travels: a fixed binary form, read strictly."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable, Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple

from gossamer.process.net.connection import Address
from gossamer.process.store.parsing import MAX_PROCESS

NUM_MEMBERSHIPS = 3
"""Memberships of a worker: for training, for averages that a user asks for, for the final average."""


MAX_UNREACHABLE = 64
"""Workers that a worker says it cannot reach, at most."""


class Stage(IntEnum):
    """How far a process is; it never goes back."""

    TRAINING = 0
    DONE = 1
    """It trains no more."""
    LEFT = 2
    """It has the final average and closes."""
    RETIRED = 3
    """It has left the run for good, and others share its place."""


class Record(NamedTuple):
    """What a worker says about itself. Only the worker itself changes it; others pass it on."""

    rank: int
    process: int
    """A process that is started again in the place of another has a higher number."""
    heartbeats: int
    changes: int
    """How many there were so far: of two records of a process the one with the higher counts is newer."""
    stage: Stage
    steps: int
    busy_s: float
    """Time of these steps without waits for other workers."""
    requests: tuple[int, ...]
    """The newest view of each membership that this worker knows to be requested."""
    views: tuple[int, ...]
    """Marks of the views that it is in, of each membership; 0: in none."""
    address: Address
    """Where it listens."""
    unreachable: tuple[int, ...] = ()
    """Workers that it cannot reach itself, ascending, though their heartbeats come to it through others."""

    def is_newer_than(self, other: Record | None) -> bool:
        # Field by field: this is the most frequent thing that a worker does with a message.
        if other is None or self.process != other.process:
            return other is None or self.process > other.process
        if self.changes != other.changes:
            return self.changes > other.changes
        return self.heartbeats > other.heartbeats

    def is_same_process(self, other: Record) -> bool:
        """Two processes of a rank can come to have the same number, but do not listen at the same address."""
        return self.process == other.process and self.address == other.address


class Kind(IntEnum):
    GOSSIP = 0
    PING = 1
    """Asks for an answer at once."""
    PONG = 2


class Message(NamedTuple):
    kind: Kind
    records: tuple[Record, ...]
    """The sender's own comes first."""
    found_dead: tuple[tuple[int, int], ...] = ()
    """Workers that somebody has just found dead, and their processes: the receiver looks for itself."""
    counters: tuple[tuple[int, int, int], ...] = ()
    """Workers whose records are not in it, their processes, and their heartbeats so far."""


_HEADER = struct.Struct("<BHHH")
_FOUND_DEAD = struct.Struct("<HQ")
_COUNTER = struct.Struct("<HQI")
_RECORD = struct.Struct(f"<HQIIBQd{NUM_MEMBERSHIPS}Q{NUM_MEMBERSHIPS}IHBB")
_RANK = struct.Struct("<H")
_STAGES = tuple(Stage)


def to_bytes(
    kind: Kind,
    records: Iterable[Record],
    found_dead: Sequence[tuple[int, int]] = (),
    counters: Sequence[tuple[int, int, int]] = (),
) -> bytes:
    parts, number = [b""], 0
    for record in records:
        host = record.address[0].encode("ascii")
        numbers = (*record[:4], record.stage, record.steps, record.busy_s)
        sizes = len(host), len(record.unreachable)
        parts += [_RECORD.pack(*numbers, *record.requests, *record.views, record.address[1], *sizes), host]
        parts += map(_RANK.pack, record.unreachable)
        number += 1
    parts[0] = _HEADER.pack(kind, number, len(found_dead), len(counters))
    parts += [_FOUND_DEAD.pack(*dead) for dead in found_dead]
    parts += [_COUNTER.pack(*counter) for counter in counters]
    return b"".join(parts)


def from_bytes(data: bytes, workers: int) -> Message | None:
    """Return the message; None if that is none of a run with so many workers."""
    try:
        kind, number, num_dead, num_counters = _HEADER.unpack_from(data)
        at = _HEADER.size
        records: list[Record] = []
        for _ in range(number):
            fields = _RECORD.unpack_from(data, at)
            at += _RECORD.size
            end_of_host = at + fields[-2]
            host = data[at:end_of_host]
            at = end_of_host + fields[-1] * _RANK.size
            unreachable = tuple(rank for (rank,) in _RANK.iter_unpack(data[end_of_host:at])) if fields[-1] else ()
            records.append(_checked(fields, host, unreachable, workers))
        end_of_dead = at + num_dead * _FOUND_DEAD.size
        if len(data) - end_of_dead != num_counters * _COUNTER.size or not records:
            return None
        found_dead = tuple((int(rank), int(process)) for rank, process in _FOUND_DEAD.iter_unpack(data[at:end_of_dead]))
        counters = tuple(_COUNTER.iter_unpack(data[end_of_dead:]))
        if any(rank >= workers for rank, *_ in (*found_dead, *counters)):
            return None
        return Message(Kind(kind), tuple(records), found_dead, counters)
    except (struct.error, ValueError):
        return None


def _checked(fields: tuple[Any, ...], host: bytes, unreachable: tuple[int, ...], workers: int) -> Record:
    """Return a record. ValueError if a field is none that a worker sends.

    Workers spend most of the time that heartbeats cost here: each reads some hundred records a second.
    """
    rank, process, heartbeats, changes, stage, steps, busy_s = fields[:7]
    requests, views = fields[7 : 7 + NUM_MEMBERSHIPS], fields[7 + NUM_MEMBERSHIPS : 7 + 2 * NUM_MEMBERSHIPS]
    port = fields[-3]
    if unreachable and (list(unreachable) != sorted(set(unreachable)) or unreachable[-1] >= workers):
        raise ValueError("no list of workers")
    if rank >= workers or port == 0 or stage >= len(_STAGES) or not math.isfinite(busy_s) or process > MAX_PROCESS:
        raise ValueError("no record of a worker")
    address = _host(host), port
    return Record(
        rank, process, heartbeats, changes, _STAGES[stage], steps, busy_s, requests, views, address, unreachable
    )


@lru_cache(maxsize=1024)
def _host(host: bytes) -> str:
    if not re.fullmatch(rb"[0-9A-Za-z.:%_-]{1,255}", host):
        raise ValueError("no host")
    return host.decode()


def first_record(rank: int, process: int, address: Address) -> Record:
    """Return what a process says about itself when it starts."""
    return Record(rank, process, 0, 0, Stage.TRAINING, 0, 0.0, (0,) * NUM_MEMBERSHIPS, (0,) * NUM_MEMBERSHIPS, address)
