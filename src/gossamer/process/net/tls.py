"""Optional TLS: both ends show certificates of one authority."""

from __future__ import annotations

import ssl
from dataclasses import dataclass


@dataclass(frozen=True)
class Tls:
    """The contexts of the two ends of a connection."""

    server: ssl.SSLContext
    client: ssl.SSLContext
