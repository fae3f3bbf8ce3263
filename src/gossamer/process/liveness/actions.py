"""What a worker does because of what it knows about the others (``liveness``)."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from gossamer.process.liveness.records import Message
from gossamer.process.net.connection import Address


class Send(NamedTuple):
    """Send a message to some workers. It may be lost or late."""

    ranks: Sequence[int]
    message: Message


class Change(StrEnum):
    DIED = "died"
    RETURNED = "returned"
    """It is alive again, or another process is in its place."""
    CAME = "came"
    """A worker that was not known before."""
    RETIRED = "retired"
    """It says that it has left for good."""


class Notice(NamedTuple):
    change: Change
    rank: int


class Namesake(NamedTuple):
    """Another process of this worker's own rank is alive, and listens at this address."""

    address: Address
