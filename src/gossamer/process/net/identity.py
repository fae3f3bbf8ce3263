"""Who a process is to the others of its run, and what it has to prove that with."""

from __future__ import annotations

import hashlib
import hmac
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gossamer.process.net.tls import Tls

INCARNATION_BYTES = 16


@dataclass(frozen=True)
class Identity:
    """One process of a run. Both ends of a connection show theirs to each other."""

    rank: int | None = None
    """None: a process that is no worker, such as a launcher."""
    run: str = "run"
    """The name of the run: processes of another one are refused."""
    secret: bytes = field(default=b"", repr=False)
    """Empty: whoever knows the name of the run gets in."""
    incarnation: bytes = field(default_factory=lambda: os.urandom(INCARNATION_BYTES))
    """Tells a process from an earlier one of the same rank."""
    tls: Tls | None = None
    """None: connections are not encrypted."""

    def prove(self, *parts: bytes) -> bytes:
        """Return the proof that whoever knows ``parts`` also knows the secret and the name of this run."""
        key = hmac.digest(self.secret, b"gossamer run\0" + self.run.encode(), hashlib.sha256)
        return hmac.digest(key, b"".join(parts), hashlib.sha256)
