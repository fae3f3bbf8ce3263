"""Requests to a key-value store and their answers, as bytes. Both are lists of byte strings, read strictly."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

PURPOSE = "store"

MAX_FRAME_BYTES = 64 * 1024 * 1024
MAX_ITEMS = 65536
MAX_WAIT_S = 60.0

Items = Sequence[bytes | None]

_LENGTH = struct.Struct("<I")
_HEAD = struct.Struct("<IBdI")
_NONE = 0xFFFFFFFF


class Operation(IntEnum):
    """What a request asks for, and what its items and those of its answer are."""

    ANSWER = 0
    SET = 1
    """Keys and values in turn → none."""
    GET = 2
    """Keys → their values; None for a key without one."""
    HAS = 3
    """Keys → an empty value or None for each."""
    COMPARE_SET = 4
    """Key, expected value (empty: none), value → the value afterwards."""
    ADD = 5
    """Key, amount → the new value; None if the value was no number."""


NUM_ITEMS = {Operation.COMPARE_SET: 3, Operation.ADD: 2}


class Message(NamedTuple):
    """A request, or the answer to the request of the same number."""

    number: int
    operation: Operation
    wait_s: float
    """GET and HAS: answer once all keys have a value, or after this time."""
    items: list[bytes | None]


def encode(number: int, operation: Operation, items: Items, wait_s: float = 0.0) -> bytes:
    parts = [_HEAD.pack(number, operation, wait_s, len(items))]
    for item in items:
        parts.append(_LENGTH.pack(_NONE if item is None else len(item)))
        if item is not None:
            parts.append(item)
    body = b"".join(parts)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a message to the store has {len(body)} bytes: expected at most {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


def take(buffer: bytearray) -> Message | None:
    """Remove the first message from ``buffer`` and return it; None if it is not complete. ValueError if it is none."""
    if len(buffer) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(buffer)
    if length > MAX_FRAME_BYTES:
        raise ValueError("too long")
    if len(buffer) < _LENGTH.size + length:
        return None
    body = bytes(memoryview(buffer)[_LENGTH.size : _LENGTH.size + length])
    del buffer[: _LENGTH.size + length]
    return _decode(body)


def _decode(body: bytes) -> Message:
    try:
        number, operation, wait_s, num_items = _HEAD.unpack_from(body)
        kind, position = Operation(operation), _HEAD.size
        items: list[bytes | None] = []
        if num_items > MAX_ITEMS or not 0.0 <= wait_s <= MAX_WAIT_S or NUM_ITEMS.get(kind, num_items) != num_items:
            raise ValueError("not a request")
        for _ in range(num_items):
            (length,) = _LENGTH.unpack_from(body, position)
            position += _LENGTH.size
            item = None if length == _NONE else body[position : position + length]
            items.append(item)
            position += 0 if item is None else length
    except struct.error:
        raise ValueError("too short") from None
    if position != len(body) or (kind != Operation.ANSWER and None in items):
        raise ValueError("its items do not fit")
    return Message(number, kind, wait_s, items)
