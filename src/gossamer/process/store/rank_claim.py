"""One live process per rank: a second one is refused, one in the place of a dead one is let in.

A process publishes in the store that it has its rank. One that comes later and finds such a claim looks for the process
that made it. If it cannot reach that one, this need not be dead, the link may be cut: it asks the run, in the store,
whether somebody hears of it. That one answers too, if it reaches the store. All processes look there now and then, also
for a claim of another process to their own rank.
"""

from __future__ import annotations

import re
import secrets
import socket
import time
from collections.abc import Callable
from typing import NamedTuple

from gossamer.errors import InputError
from gossamer.process import local_process
from gossamer.process.net.connection import Address, connect
from gossamer.process.store.failover_store import CONNECT_TIMEOUT_S, FailoverStore
from gossamer.process.store.parsing import read_address
from gossamer.process.store.store_messages import PURPOSE

ALIVE_TIMEOUT_S = 3.0
"""A process that does not greet within this time is stopped, or its machine is."""

GREETINGS, GREETING_PAUSE_S = 3, 0.2
"""How often to greet a process that cuts the greeting off: it may be ending, and nothing listens there soon."""

MAX_ATTEMPTS = 8
"""Others may claim the same rank at the same time."""

LOOK_INTERVAL_S = 1.0
"""How often a process looks for questions of others, and whether its rank is still its own."""

LOOK_WORKERS = 64
"""Among more workers each of them looks less often."""

ANSWER_INTERVALS = 5.0
"""How long a claimant waits for an answer to its question, in intervals at which the others look."""

POLL_S = 0.2
QUESTION = "claim/question"
"""Where the newest question is: about which process, and its name."""


class Claim(NamedTuple):
    """What a process publishes about itself."""

    address: Address
    incarnation: str
    process: str
    """Its name on its machine."""

    def to_text(self) -> str:
        return f"{self.address[0]} {self.address[1]} {self.incarnation} {self.process}"


def read_claim(value: bytes | None) -> Claim | None:
    """Return a claim; None if there is none that can be read."""
    match = re.fullmatch(rb"(.*) ([0-9a-f]{32}) ([0-9a-f:-]{1,128})", value or b"")
    address = None if match is None else read_address(match[1])
    if match is None or address is None:
        return None
    return Claim(address, match[2].decode(), match[3].decode())


class Question(NamedTuple):
    """Whether somebody hears of the process of a rank that listens at an address."""

    rank: int
    address: Address
    name: str

    def to_text(self) -> str:
        return f"{self.rank} {self.address[0]} {self.address[1]} {self.name}"

    @property
    def answer_key(self) -> str:
        return f"claim/heard/{self.name}"


def read_question(value: bytes | None) -> Question | None:
    """Return a question; None if there is none that can be read."""
    match = re.fullmatch(rb"([0-9]{1,5}) (.*) ([0-9a-f]{32})", value or b"")
    address = None if match is None else read_address(match[2])
    if match is None or address is None:
        return None
    return Question(int(match[1]), address, match[3].decode())


def look_interval_s(workers: int) -> float:
    return LOOK_INTERVAL_S * max(1.0, workers / LOOK_WORKERS)


class RankClaim:
    """The claim of one process to its rank."""

    def __init__(self, store: FailoverStore, address: Address, workers: Callable[[], int] = lambda: 1) -> None:
        """``address``: where this process listens. ``workers()``: how many the run has."""
        assert store.identity.rank is not None
        self.store, self.rank, self.workers = store, store.identity.rank, workers
        self.own = Claim(address, store.identity.incarnation.hex(), local_process.own_name())
        self.key = f"claim/{self.rank}"

    def make(self) -> None:
        """Claim the rank. InputError if a process of this rank is alive."""
        other = self._claim_rank()
        if other:
            raise InputError(
                f"rank {self.rank} is taken: the process of this rank at {other}: "
                "give each process a rank of its own, or end that one first"
            )

    def republish(self) -> None:
        """Publish the claim in a store that may be new. InputError if another process has claimed the rank there."""
        other = self._claim_rank()
        if other:
            raise given_twice(self.rank, other)

    def _claim_rank(self) -> str:
        """Publish the claim, unless another live process has claimed the rank; return where that is, and its state."""
        expected = ""
        for _ in range(MAX_ATTEMPTS):
            stored = self.store.compare_set(self.key, self.own.to_text(), expected)
            if stored is None or stored == self.own.to_text().encode():
                return ""
            earlier = read_claim(stored)
            alive = "" if earlier is None else self._find(earlier)
            if alive:
                return alive
            expected = stored.decode(errors="replace")
        self.store.set(self.key, self.own.to_text())
        return ""

    def _find(self, earlier: Claim) -> str:
        """Return where the process is that made an earlier claim, and its state; empty if it is dead."""
        host, port = earlier.address
        if local_process.has_ended(earlier.process):
            # Whatever listens at its port now.
            return ""
        for attempt in range(GREETINGS):
            time.sleep(GREETING_PAUSE_S if attempt else 0.0)
            try:
                # The kernel of a stopped process accepts connections for it; that of a lost machine does not.
                socket.create_connection(earlier.address, CONNECT_TIMEOUT_S).close()
            except ConnectionRefusedError:
                return ""
            except OSError:
                break
            try:
                there = connect(earlier.address, PURPOSE, b"", identity=self.store.identity, timeout_s=ALIVE_TIMEOUT_S)
            except TimeoutError:
                return f"{host}:{port} is there, but does not answer"
            except OSError:
                continue
            there.close()
            if (there.peer_rank, there.peer_incarnation.hex()) != (self.rank, earlier.incarnation):
                # Its port has been given to another process since.
                return ""
            return f"{host}:{port} is alive"
        heard = self._is_heard(Question(self.rank, earlier.address, secrets.token_hex(16)))
        return f"{host}:{port} cannot be reached from here, but others hear it" if heard else ""

    def _is_heard(self, question: Question) -> bool:
        """Ask the run whether somebody hears of a process."""
        text = question.to_text()
        until = time.monotonic() + ANSWER_INTERVALS * look_interval_s(self.workers())
        while time.monotonic() < until:
            asked, heard = self.store.get_all([QUESTION, question.answer_key])
            if heard is not None:
                return True
            if asked != text.encode():
                # Another process may ask something at the same time: whoever has seen a question remembers it.
                self.store.set(QUESTION, text)
            time.sleep(POLL_S)
        return False


def given_twice(rank: int, other: str) -> InputError:
    return InputError(
        f"rank {rank} was given to two processes while the network was cut, and the one at {other}: "
        "this one ends; start it again as a new worker, and it is given another rank"
    )
