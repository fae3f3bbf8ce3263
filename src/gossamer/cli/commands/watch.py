"""``gossamer watch``: serve the report of a run in progress."""

from __future__ import annotations

import argparse
import ipaddress
import sys
from collections.abc import Sequence
from pathlib import Path

from gossamer.cli.options import parse_number
from gossamer.cli.output import print_json
from gossamer.errors import InputError
from gossamer.report.server import LiveReport, ReportServer


def run(parsed: argparse.Namespace, arguments: Sequence[str]) -> int:
    port = parse_number(parsed.port, "--port", int, 0, 65535)
    with ReportServer(LiveReport(Path(parsed.run)), _address(parsed.host), port) as server:
        if parsed.json:
            print_json({"url": server.url, "run": parsed.run})
        else:
            print(f"{parsed.run} is shown at {server.url} (Ctrl-C stops the server, not the run)")
        sys.stdout.flush()
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            if not parsed.json:
                print()
    return 0


def _address(host: str) -> str:
    try:
        address = ipaddress.IPv4Address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        raise InputError(
            f"--host is {host!r}: expected an IPv4 address of this machine, such as 127.0.0.1, or 0.0.0.0 for all"
        ) from None
    return str(address)
