"""The greeting: both ends of a new connection prove to each other that they belong to the run.

    asks                                                answers
    MAGIC, nonce          ──────────────────────────▶
                          ◀──────────────────────────   MAGIC, nonce
    length, proof, claim  ──────────────────────────▶
                          ◀──────────────────────────   status, rank, incarnation, proof

A proof is an HMAC-SHA256, keyed with the secret and the name of the run, over a label of its direction, both nonces and
the claim: purpose, rank, incarnation and the first words (``hello``) of who asks. Nonces are fresh, so a recorded
greeting proves nothing; labels differ, so a proof sent back to its maker proves nothing either. Who asks proves first,
so a stranger gets no proof to try secrets on. Before its proof is checked, nothing of a claim is read but its length.

A process that is not in a run yet, and does not know its name, proves with the secret alone (``ANY_RUN``). It gets an
introduction to the run and nothing else.

The two sides are generators: they yield the number of bytes that they need next and are sent exactly so many.
"""

from __future__ import annotations

import hmac
import os
import struct
from collections.abc import Callable, Generator
from dataclasses import replace
from enum import IntEnum, StrEnum
from typing import NamedTuple

from gossamer.process.net.identity import INCARNATION_BYTES, Identity

MAGIC = b"gossamer\0\1"
NONCE_BYTES = 32
PROOF_BYTES = 32
OPENING_BYTES = len(MAGIC) + NONCE_BYTES
MAX_HELLO_BYTES = 4096
MAX_PURPOSE_BYTES = 64

ANY_RUN = ""
"""In place of the name of a run: of a process that wants to come to it."""

INTRODUCTION = "introduction"
"""The one purpose that is served without the name of the run."""

_HEAD = struct.Struct(f"<H{PROOF_BYTES}s")
_CLAIM = struct.Struct(f"<i{INCARNATION_BYTES}sB")
_REPLY = struct.Struct(f"<Bi{INCARNATION_BYTES}s")
_MAX_CLAIM_BYTES = _CLAIM.size + MAX_PURPOSE_BYTES + MAX_HELLO_BYTES
_NO_RANK = -1
_ASKS, _ANSWERS = b"gossamer asks\0", b"gossamer answers\0"


class Status(IntEnum):
    WELCOME = 1
    WRONG_PROOF = 2
    UNKNOWN_PURPOSE = 3


class Reason(StrEnum):
    """Why a connection was refused. The value completes "refused a connection from …:"."""

    NOT_OURS = "it does not speak gossamer's protocol"
    WRONG_PROOF = (
        "it does not know the secret of this run, or is of another run: give all workers the same GOSSAMER_SECRET"
    )
    UNKNOWN_PURPOSE = "it wants something that is unknown here: install the same version of gossamer on all machines"
    TOO_LATE = "it did not complete its greeting in time"
    CUT_OFF = "it ended in the middle of its greeting"
    TOO_MANY = "more connections than can be greeted at once"
    TLS = "its TLS handshake failed: give all workers certificates of the same authority, or give none of them any"


class Refused(ConnectionError):
    """One end of a new connection does not accept the other."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(str(reason))
        self.reason = reason


class Greeted(NamedTuple):
    """What is known of the other end after a greeting."""

    rank: int | None
    incarnation: bytes
    purpose: str
    hello: bytes


Steps = Generator[int, bytes, Greeted]


def ask(identity: Identity, send: Callable[[bytes], None], purpose: str, hello: bytes) -> Steps:
    """Greet as the end that connects. Raises Refused if either end does not accept the other."""
    name = purpose.encode()
    if len(name) > MAX_PURPOSE_BYTES or len(hello) > MAX_HELLO_BYTES:
        raise ValueError(f"purpose and hello have at most {MAX_PURPOSE_BYTES} and {MAX_HELLO_BYTES} bytes")
    ours = os.urandom(NONCE_BYTES)
    send(MAGIC + ours)
    theirs = _nonce((yield OPENING_BYTES))
    rank = _NO_RANK if identity.rank is None else identity.rank
    claim = _CLAIM.pack(rank, identity.incarnation, len(name)) + name + hello
    send(_HEAD.pack(len(claim), identity.prove(_ASKS, ours, theirs, claim)) + claim)
    reply = yield _REPLY.size
    proof = yield PROOF_BYTES
    status, rank, incarnation = _REPLY.unpack(reply)
    if status == Status.WRONG_PROOF:
        raise Refused(Reason.WRONG_PROOF)
    if not hmac.compare_digest(proof, identity.prove(_ANSWERS, ours, theirs, claim, reply)):
        raise Refused(Reason.WRONG_PROOF)
    if status != Status.WELCOME:
        raise Refused(Reason.UNKNOWN_PURPOSE)
    return Greeted(_rank(rank), incarnation, purpose, hello)


def answer(identity: Identity, send: Callable[[bytes], None], knows: Callable[[str], bool]) -> Steps:
    """Greet as the end that listens; ``knows(purpose)``: whether somebody here serves it. Raises Refused."""
    theirs = _nonce((yield OPENING_BYTES))
    ours = os.urandom(NONCE_BYTES)
    send(MAGIC + ours)
    length, proof = _HEAD.unpack((yield _HEAD.size))
    if not _CLAIM.size <= length <= _MAX_CLAIM_BYTES:
        raise Refused(Reason.NOT_OURS)
    claim = yield length
    own_rank = _NO_RANK if identity.rank is None else identity.rank
    is_guest = False
    if not hmac.compare_digest(proof, identity.prove(_ASKS, theirs, ours, claim)):
        identity, is_guest = replace(identity, run=ANY_RUN), True
    if is_guest and not hmac.compare_digest(proof, identity.prove(_ASKS, theirs, ours, claim)):
        # Without a proof of ours: whoever asks has not earned one.
        send(_REPLY.pack(Status.WRONG_PROOF, _NO_RANK, bytes(INCARNATION_BYTES)) + bytes(PROOF_BYTES))
        raise Refused(Reason.WRONG_PROOF)
    rank, incarnation, name_bytes = _CLAIM.unpack_from(claim)
    name, hello = claim[_CLAIM.size :][:name_bytes], claim[_CLAIM.size + name_bytes :]
    purpose = name.decode("ascii", errors="replace")
    known = len(name) == name_bytes and rank >= _NO_RANK and len(hello) <= MAX_HELLO_BYTES and knows(purpose)
    known = known and (purpose == INTRODUCTION or not is_guest)
    status = Status.WELCOME if known else Status.UNKNOWN_PURPOSE
    reply = _REPLY.pack(status, own_rank, identity.incarnation)
    send(reply + identity.prove(_ANSWERS, theirs, ours, claim, reply))
    if not known:
        raise Refused(Reason.UNKNOWN_PURPOSE)
    return Greeted(_rank(rank), incarnation, purpose, hello)


def _nonce(opening: bytes) -> bytes:
    if not opening.startswith(MAGIC):
        raise Refused(Reason.NOT_OURS)
    return opening[len(MAGIC) :]


def _rank(rank: int) -> int | None:
    return None if rank == _NO_RANK else rank
