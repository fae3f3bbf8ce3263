"""Ends of connections, without TLS and with it."""

from __future__ import annotations

import pytest
from net_server import SECRET

from certificates import make_certificates
from gossamer.process.net.identity import Identity
from gossamer.process.net.tls import Tls, make_tls


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return make_tls(make_certificates(tmp_path_factory.mktemp("tls")))


@pytest.fixture(params=["plain", "tls"])
def member(request: pytest.FixtureRequest, tls: Tls) -> Identity:
    """A worker, once without TLS and once with it."""
    return Identity(1, secret=SECRET, tls=tls if request.param == "tls" else None)
