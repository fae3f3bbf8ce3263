"""The introduction of a process that wants to come to a run: what it has to know before it can speak to the others.

Every port of a run gives it: that of the home store and those of the workers. Who asks knows the secret of the run, if
it has one, but not its name (``net.greeting``).
"""

from __future__ import annotations

import contextlib
import json
import struct
import time
from collections.abc import Callable
from typing import NamedTuple

from gossamer.process.net.connection import Address, Connection, connect
from gossamer.process.net.greeting import ANY_RUN, INTRODUCTION
from gossamer.process.net.identity import Identity
from gossamer.process.net.listener import Listener
from gossamer.process.net.tls import Tls
from gossamer.process.store.parsing import read_address

_LENGTH = struct.Struct("<H")


class Introduction(NamedTuple):
    run: str
    """The name of the run."""
    home: Address
    """Where its home store is, if that is alive."""
    store: Address
    """Where the store in use is."""


def introduce(listener: Listener, stores: Callable[[], tuple[Address, Address] | None]) -> None:
    """Answer who asks at this port. ``stores()``: the home store and the one in use; None: both are at this port."""

    def answer(connection: Connection, hello: bytes) -> None:
        found = stores()
        addresses = [] if found is None else ["{} {}".format(*address) for address in found]
        text = json.dumps([listener.identity.run, *addresses]).encode()
        with contextlib.suppress(OSError):
            # Fits into the empty buffer of a new connection.
            connection.send_some(_LENGTH.pack(len(text)) + text)
        connection.close()

    listener.register(INTRODUCTION, answer)


def ask(address: Address, secret: bytes, tls: Tls | None, timeout_s: float) -> Introduction:
    """Return the introduction to the run at ``address``. OSError if there is none."""
    deadline = time.monotonic() + timeout_s
    stranger = Identity(None, ANY_RUN, secret, tls=tls)
    connection = connect(address, INTRODUCTION, b"", identity=stranger, timeout_s=timeout_s)
    try:
        (length,) = _LENGTH.unpack(connection.receive(_LENGTH.size, deadline))
        run, *stores = json.loads(connection.receive(length, deadline))
        home, store = [read_address(str(text).encode()) or address for text in stores] or [address, address]
    except ValueError:
        raise ConnectionError("what came is no introduction") from None
    finally:
        connection.close()
    return Introduction(str(run), home, store)
