"""The secret that the workers of a run share. Whoever knows it gets in."""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
from pathlib import Path

from gossamer.errors import InputError

VALUE, FILE = "GOSSAMER_SECRET", "GOSSAMER_SECRET_FILE"

MIN_BYTES = 16
"""Who can listen to a greeting can try secrets without end: short ones are found."""

MAX_BYTES = 4096
_HINT = "make one with: openssl rand -hex 32"

NO_SECRET = (
    f"connections are not authenticated: {VALUE} is not set, so whoever reaches this address can join the run. "
    f"Give all workers the same secret ({_HINT}), or keep strangers out of this network"
)


def make_secret() -> bytes:
    return secrets.token_hex(32).encode()


def find_secret() -> bytes:
    """Return the secret that the environment gives, as a value or in a file; empty if it gives none."""
    value, path = os.environ.get(VALUE), os.environ.get(FILE)
    if value is not None and path is not None:
        raise InputError(f"{VALUE} and {FILE} are both set: expected one of them, unset the other")
    if path is not None:
        try:
            with Path(path).open("rb") as file:
                secret = file.read(MAX_BYTES + 1).strip()
        except OSError as error:
            raise InputError(f"{FILE} {path!r} cannot be read ({error.strerror}): {_HINT} > {path!r}") from None
        return _checked(secret, f"the secret in {path!r}")
    return b"" if value is None else _checked(value.strip().encode(), VALUE)


def _checked(secret: bytes, name: str) -> bytes:
    if not MIN_BYTES <= len(secret) <= MAX_BYTES:
        raise InputError(f"{name} has {len(secret)} bytes: expected {MIN_BYTES} to {MAX_BYTES}, {_HINT}")
    return secret


def is_loopback(host: str) -> bool:
    """Return whether ``host`` can be reached from this machine only."""
    try:
        found = socket.getaddrinfo(host, None)
    except OSError:
        return False
    return all(ipaddress.ip_address(str(entry[4][0]).partition("%")[0]).is_loopback for entry in found)
