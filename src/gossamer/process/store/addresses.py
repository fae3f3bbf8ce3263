"""The addresses under which processes listen and are reached."""

from __future__ import annotations

import ipaddress
import socket


def local_address(store_host: str) -> str:
    """Return the address under which other workers reach this process: that of the route to the store."""
    # IPv4 if the store has such an address, which more machines have.
    found = socket.getaddrinfo(store_host, 9, type=socket.SOCK_DGRAM)
    family, _, _, _, address = next((entry for entry in found if entry[0] == socket.AF_INET), found[0])
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket sends nothing; it only looks up the route.
        probe.connect(address)
        return str(probe.getsockname()[0])


def listening_addresses(host: str) -> list[str]:
    """Return the addresses to listen on, the first that can be: ``host`` itself, if it is one, before all.

    Others may know a name by another address than this machine does.
    """
    if host == "localhost":
        return ["127.0.0.1"]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return ["0.0.0.0"]
    everywhere = "::" if address.version == 6 else "0.0.0.0"
    return [host] if address.is_loopback else [host, everywhere]
