"""Strangers at every port of real workers: bad handshakes, and more connections than a worker has descriptors for.

A part of the fault suite (``repeat_faults``).
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_checks import good
from real_workers import RealWorker, RealWorkers, Report
from stranger_faults import listening

from certificates import make_certificates
from gossamer.process.net import greeting
from gossamer.process.net.connection import Connection, connect, wrap
from gossamer.process.net.identity import Identity
from gossamer.process.net.tls import Tls, make_tls

SECRET = "a secret that two workers share"
RUN = "run/0"
BAD_PER_KIND = 60
TIMEOUT_S = 20.0
GROWTH_S = 0.2
"""What strangers may add to the longest step."""

SPARE_DESCRIPTORS = 30
IDLE = 200
HANG_UPS = 1000


def num_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def pids_of(workers: RealWorkers) -> list[int]:
    pids = [worker.process.pid for worker in workers]
    return [pid for pid in pids if pid is not None]


def greets(port: int, member: Identity) -> bool:
    try:
        connect(("127.0.0.1", port), "store", b"", identity=member, timeout_s=TIMEOUT_S).close()
    except OSError:
        return False
    return True


def longest_step(workers: RealWorkers, steps: int) -> float:
    """The longest of so many next steps of any worker."""
    longest = 0.0
    for worker in workers:
        while worker.waiting():
            worker.next()
        first = worker.at("step")["step"]
        while worker.at("step")["step"] < first + steps:
            longest = max(longest, worker.reports[-1]["longest"])
    return longest


# Bad handshakes


def answered(steps: greeting.Steps, connection: Connection) -> Iterator[None]:
    """Answer a side of a greeting what it waits for, piece by piece."""
    deadline = time.monotonic() + TIMEOUT_S
    with contextlib.suppress(StopIteration):
        wanted = next(steps)
        while True:
            yield
            wanted = steps.send(bytes(connection.receive(wanted, deadline)))


def opened(port: int, tls: Tls | None) -> Connection:
    """A connection that nobody has greeted on; the TLS handshake is over, if there is TLS."""
    sock = socket.create_connection(("127.0.0.1", port), TIMEOUT_S)
    sock.setblocking(False)
    return Connection(wrap(sock, Identity(None, tls=tls), server_side=False))


def recorded(port: int, member: Identity) -> bytes:
    """All that a member sends to get in."""
    sent: list[bytes] = []
    connection = opened(port, member.tls)
    told = 0
    try:
        for _ in answered(greeting.ask(member, sent.append, "store", b""), connection):
            connection.send(*sent[told:], deadline=time.monotonic() + TIMEOUT_S)
            told = len(sent)
    finally:
        connection.close()
    return b"".join(sent)


def say(port: int, tls: Tls | None, words: bytes, wait: bool) -> None:
    """Say this to who listens, and hang up, after the answer if ``wait``."""
    with contextlib.suppress(OSError):
        connection = opened(port, tls)
        try:
            connection.send(words, deadline=time.monotonic() + TIMEOUT_S)
            while wait:
                connection.receive(1, time.monotonic() + TIMEOUT_S)
        finally:
            connection.close()


@pytest.mark.parametrize("with_tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("method", ["a2cid2", "allreduce"])
def test_bad_handshakes_hold_up_nobody(method: str, with_tls: bool, tmp_path: Path) -> None:
    """Replayed, truncated, with a wrong secret and without one, and garbage."""
    environment, tls = {"GOSSAMER_SECRET": SECRET}, None
    if with_tls:
        files = make_certificates(tmp_path / "tls")
        tls = make_tls(files)
        named = {"GOSSAMER_TLS_CERT": files.cert, "GOSSAMER_TLS_KEY": files.key, "GOSSAMER_TLS_CA": files.ca}
        environment |= named
    member = Identity(None, RUN, SECRET.encode(), tls=tls)
    order = {"method": method, "until": tmp_path / "enough", "compute_s": 0.02, "recent": True, "watch": True}
    with RealWorkers(2, steps=100_000, environment=environment, **order) as workers:
        for worker in workers:
            worker.step(50)
        pids = pids_of(workers)
        ports = [port for pid in pids for port in listening(pid) if greets(port, member)]
        assert len(ports) == 3, "the home store, and a port for each worker"
        words = {port: recorded(port, member) for port in ports}
        alone = longest_step(workers, 150)
        before = [num_descriptors(pid) for pid in pids]
        beside = 0.0
        for number in range(BAD_PER_KIND):
            beside = max([beside, *(report.get("longest", 0.0) for worker in workers for report in unread(worker))])
            for port, said in words.items():
                say(port, tls, said, wait=True)
                # A part of it: the end may come in any place.
                say(port, tls, said[: 1 + (7 * number) % (len(said) - 1)], wait=False)
                say(port, None, bytes(range(256)) * 8, wait=False)
                for secret in (b"", b"another secret, of the right length"):
                    assert not greets(port, Identity(None, RUN, secret, tls=tls))
                assert not greets(port, Identity(1, "run/1", SECRET.encode(), tls=tls))
        until = time.monotonic() + 60
        while any(num_descriptors(pid) > had for pid, had in zip(pids, before, strict=True)):
            assert time.monotonic() < until
            time.sleep(0.05)
        (tmp_path / "enough").touch()
        ends = workers.finished()
    print(f"{method}: longest step {alone:.3f} s, with strangers {beside:.3f} s")
    assert beside < alone + GROWTH_S
    for end in ends:
        refused = [event for event in end["events"] if "refused a connection from 127.0.0.1" in event]
        # Each reason once, at each of at most two ports.
        assert max(Counter(refused).values()) <= 2
        assert any("it does not know the secret" in event for event in refused)
    good(ends)


def unread(worker: RealWorker) -> list[Report]:
    """The reports that nobody has read yet."""
    reports = []
    while worker.waiting():
        reports.append(worker.next())
    return reports


# No descriptor left


@pytest.mark.parametrize("method", ["a2cid2", "allreduce"])
def test_a_crowd_that_takes_every_descriptor_does_not_end_a_worker(method: str, tmp_path: Path) -> None:
    """A worker at its limit lets nobody in, trains on, and is as before when the crowd has gone."""
    order = {"method": method, "until": tmp_path / "enough", "spare_descriptors": SPARE_DESCRIPTORS}
    with RealWorkers(3, steps=100_000, **order) as workers, contextlib.ExitStack() as crowd:
        for worker in workers:
            worker.step(50)
        pids = pids_of(workers)
        before = [num_descriptors(pid) for pid in pids]
        ports = [port for pid in pids for port in listening(pid)]
        # The backlog lets them all in; whoever is there is asked to speak.
        for port in [port for port in ports for _ in range(IDLE)]:
            crowd.enter_context(socket.create_connection(("127.0.0.1", port), TIMEOUT_S))
        limited = [num_descriptors(pid) for pid in pids]
        for port in ports:
            for _ in range(HANG_UPS):
                socket.create_connection(("127.0.0.1", port), TIMEOUT_S).close()
        made = [worker.at("step")["step"] for worker in workers]
        for worker, step in zip(workers, made, strict=True):
            worker.step(step + 100)
        crowd.close()
        print(f"{method}: descriptors {before}, in the crowd {limited}")
        assert any(many > had + SPARE_DESCRIPTORS // 2 for many, had in zip(limited, before, strict=True))
        # A request to the store, or an edge that is replaced, may be on its way.
        until = time.monotonic() + 60
        while any(num_descriptors(pid) > had + 4 for pid, had in zip(pids, before, strict=True)):
            assert time.monotonic() < until
            time.sleep(0.05)
        # Workers are let in again.
        workers.kill(2)
        workers[0].said("worker 2 died")
        workers.restart(2).exchanged()
        (tmp_path / "enough").touch()
        ends = workers.finished()
    assert all(end["missing"] == [] for end in ends)
    good(ends)
