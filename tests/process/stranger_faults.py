"""Strangers that knock at workers' ports.

A part of the fault suite (``repeat_faults``).
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
import time
from pathlib import Path

import pytest
from fault_checks import good
from real_workers import RealWorkers


class Unpickled:
    """Leaves a trace where somebody unpickles it."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.trace),)


def listening(pid: int) -> set[int]:
    """The ports that a process listens on."""
    return {port for _, port in listening_at(pid)}


def listening_at(pid: int) -> set[tuple[str, int]]:
    """The addresses that a process listens at."""
    owned = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            owned.add(os.readlink(entry))
        except OSError:
            continue
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in owned:
                address, _, port = fields[1].partition(":")
                # Words of 32 bits, each in the byte order of this machine.
                words = [int(address[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(address), 8)]
                found.add((socket.inet_ntop(family, b"".join(words)), int(port, 16)))
    return found


def send(port: int, payload: bytes) -> None:
    try:
        with socket.create_connection(("127.0.0.1", port), 1) as line:
            line.settimeout(0.3)
            line.sendall(payload)
    except OSError:
        # It hung up, or did not want to hear more.
        return


@pytest.mark.parametrize("method", ["gossip", "lasgd", "allreduce"])
def test_strangers_knock_at_every_port(method: str, tmp_path: Path) -> None:
    noise = bytes((17 * at * at + 5) % 251 for at in range(4096))
    payloads = [
        b"",
        b"\x00" * 64,
        b"\xff" * 64,
        noise,
        noise * 1024,
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        pickle.dumps(Unpickled(tmp_path / "unpickled")),
        # The query types of torch's store, each with a length that nobody has memory for.
        *(bytes([kind]) + b"\xff" * 7 + b"\x7f" + noise for kind in range(20)),
    ]
    with RealWorkers(3, method=method, steps=100_000, until=tmp_path / "enough") as workers:
        idle: list[socket.socket] = []
        for worker in workers:
            worker.step(50)
        for worker in workers:
            assert worker.process.pid is not None
            ports = listening(worker.process.pid)
            assert ports
            for port in ports:
                for payload in payloads:
                    send(port, payload)
                idle += [socket.create_connection(("127.0.0.1", port), 1) for _ in range(20)]
        made = [worker.step(0)["step"] for worker in workers]
        for worker, before in zip(workers, made, strict=True):
            worker.step(before + 100)
        (tmp_path / "enough").touch()
        ends = workers.finished()
        for line in idle:
            line.close()
    assert not (tmp_path / "unpickled").exists()
    good(ends)


@pytest.mark.parametrize("method", ["a2cid2", "allreduce"])
def test_who_connects_and_hangs_up_leaves_nothing_behind(method: str, tmp_path: Path) -> None:
    with RealWorkers(2, method=method, steps=100_000, until=tmp_path / "enough") as workers:
        for worker in workers:
            worker.step(50)
        pids = [worker.process.pid for worker in workers]
        before = [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids]
        for pid in pids:
            assert pid is not None
            for port in listening(pid):
                for _ in range(1000):
                    socket.create_connection(("127.0.0.1", port), 5).close()
        made = [worker.step(0)["step"] for worker in workers]
        for worker, step in zip(workers, made, strict=True):
            worker.step(step + 100)
        # A request to the store, or an edge that is replaced, may be on its way.
        until = time.monotonic() + 60
        while any(len(os.listdir(f"/proc/{pid}/fd")) > had + 4 for pid, had in zip(pids, before, strict=True)):
            assert time.monotonic() < until
            time.sleep(0.05)
        (tmp_path / "enough").touch()
        ends = workers.finished()
    good(ends)
