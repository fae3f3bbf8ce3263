"""Processes that come to a run in which they have no place."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import join_script
import pytest
import torch
from real_workers import RealWorkers
from stranger_faults import listening
from test_process_join import WITHIN_S, stranger, undisturbed

from certificates import make_certificates
from gossamer.api import join
from gossamer.process.events import EventKind
from gossamer.process.net.connection import connect
from gossamer.process.net.identity import Identity
from gossamer.process.net.tls import make_tls
from gossamer.process.runtime import worker_runtime
from gossamer.process.runtime.swarm import Swarm


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("method", ["gossip", "allreduce"])
def test_a_second_process_of_a_rank_is_refused(method: str, stopped: bool, tmp_path: Path) -> None:
    order = {"method": method, "steps": 100_000, "compute_s": 0.01, "until": tmp_path / "enough"}
    with RealWorkers(2, script=join_script.run, **order) as workers:
        for worker in workers:
            worker.at("joined", WITHIN_S)
        if stopped:
            workers[1].signal(signal.SIGSTOP)
        second = stranger(workers, 1)
        try:
            why = second.at("refused", WITHIN_S)["why"]
        finally:
            second.end()
        workers[1].signal(signal.SIGCONT)
        (tmp_path / "enough").touch()
        ends = [worker.at("finished", WITHIN_S) for worker in workers]
    assert why.startswith("rank 1 is taken: the process of this rank at 127.0.0.1:")
    assert ("is there, but does not answer" if stopped else "is alive") in why
    assert "give each process a rank of its own, or end that one first" in why
    # The other one may have ended without the one that was stopped.
    assert stopped or ends[0]["weights"] == ends[1]["weights"]
    assert stopped or undisturbed(ends)


@pytest.mark.parametrize("method", ["gossip", "allreduce"])
def test_a_second_rank_0_is_refused(method: str, tmp_path: Path) -> None:
    order = {"method": method, "steps": 100_000, "compute_s": 0.01, "until": tmp_path / "enough"}
    with RealWorkers(2, script=join_script.run, **order) as workers:
        for worker in workers:
            worker.at("joined", WITHIN_S)
        second = stranger(workers, 0)
        try:
            why = second.at("refused", WITHIN_S)["why"]
        finally:
            second.end()
        (tmp_path / "enough").touch()
        ends = [worker.at("finished", WITHIN_S) for worker in workers]
    assert "worker 0 of this run is alive already" in why
    assert undisturbed(ends), [end["events"] for end in ends]


@pytest.mark.parametrize("given", [{}, {"GOSSAMER_SECRET": "another secret, of the right length"}])
def test_who_does_not_know_the_secret_does_not_get_in(given: dict[str, str], tmp_path: Path) -> None:
    order = {"method": "gossip", "steps": 100_000, "compute_s": 0.01, "until": tmp_path / "enough"}
    environment = {"GOSSAMER_SECRET": "a secret that two workers share"}
    with RealWorkers(2, script=join_script.run, environment=environment, **order) as workers:
        for worker in workers:
            worker.at("joined", WITHIN_S)
        del workers.environment["GOSSAMER_SECRET"]
        workers.environment.update(given)
        comer = stranger(workers, 1)
        try:
            why = comer.at("refused", WITHIN_S)["why"]
        finally:
            comer.end()
        (tmp_path / "enough").touch()
        ends = [worker.at("finished", WITHIN_S) for worker in workers]
    assert "this worker does not know the secret of this run" in why
    assert ends[0]["weights"] == ends[1]["weights"]
    assert undisturbed(ends), [end["events"] for end in ends]
    refused = [text for kind, text in ends[0]["events"] if kind == "refused"]
    # Said once for each reason: where the machine is busy, one may also be cut off, or too late.
    assert len(set(refused)) == len(refused)
    assert sum("refused a connection from 127.0.0.1: it does not know the secret" in text for text in refused) == 1


def test_a_crowd_at_every_port_of_workers_with_tls(tmp_path: Path) -> None:
    """Connections that are closed at once, that stay idle, that bring garbage: no effect, no descriptor left."""
    files = make_certificates(tmp_path / "tls")
    environment = {
        "GOSSAMER_SECRET": "a secret that two workers share",
        "GOSSAMER_TLS_CERT": files.cert,
        "GOSSAMER_TLS_KEY": files.key,
        "GOSSAMER_TLS_CA": files.ca,
    }
    order = {"method": "gossip", "steps": 100_000, "compute_s": 0.01, "until": tmp_path / "enough"}
    with RealWorkers(2, script=join_script.run, environment=environment, **order) as workers:
        for worker in workers:
            worker.at("joined", WITHIN_S)
        processes = [worker.process.pid for worker in workers]
        member = Identity(None, "run/0", environment["GOSSAMER_SECRET"].encode(), tls=make_tls(files))
        ports = [port for pid in processes for port in listening(pid or 0) if greets(port, member)]
        assert len(ports) == 3, "the home store, and a port for each worker"
        before = [num_descriptors(pid) for pid in processes]
        idle = [socket.create_connection(("127.0.0.1", port), 20) for port in ports for _ in range(200)]
        for number in range(1000):
            with socket.create_connection(("127.0.0.1", ports[number % len(ports)]), 20) as sock:
                if number % 2:
                    sock.sendall(bytes(range(256)))
        for sock in idle:
            sock.close()
        until = time.monotonic() + WITHIN_S
        while any(num_descriptors(pid) > had for pid, had in zip(processes, before, strict=True)):
            assert time.monotonic() < until
            time.sleep(0.05)
        (tmp_path / "enough").touch()
        ends = [worker.at("finished", WITHIN_S) for worker in workers]
    assert ends[0]["weights"] == ends[1]["weights"]
    assert undisturbed(ends), [end["events"] for end in ends]
    refused = [text for kind, text in ends[1]["events"] if kind == "refused"]
    assert 1 <= len(refused) <= 4


def greets(port: int, member: Identity) -> bool:
    try:
        connect(("127.0.0.1", port), "store", b"", identity=member, timeout_s=20).close()
    except OSError:
        return False
    return True


def num_descriptors(pid: int | None) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def lone_worker() -> Swarm:
    model = torch.nn.Linear(1, 1)
    return join(model, torch.optim.SGD(model.parameters(), lr=0.1), method="allreduce")


def test_refused_connections_are_counted_and_each_reason_is_said_once() -> None:
    swarm = lone_worker()
    try:
        address = swarm._runtime.store.home
        for number in range(1, 4):
            with socket.create_connection(address, 20) as sock:
                sock.sendall(b"GET / HTTP/1.1\r\n" * 10)
                sock.recv(1000)
            until = time.monotonic() + WITHIN_S
            while swarm.metrics().refused_connections < number and time.monotonic() < until:
                time.sleep(0.01)
        assert swarm.metrics().refused_connections == 3
        (event,) = swarm.events
    finally:
        swarm.close()
    assert event.kind == EventKind.REFUSED
    assert str(event) == "refused a connection from 127.0.0.1: it does not speak gossamer's protocol"


@pytest.mark.parametrize("secret", ["", "a secret of enough bytes"])
@pytest.mark.parametrize("loopback", [True, False])
def test_one_worker_says_that_it_is_unprotected_where_others_may_come(
    loopback: bool, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_runtime, "is_loopback", lambda host: loopback)
    if secret:
        monkeypatch.setenv("GOSSAMER_SECRET", secret)
    swarm = lone_worker()
    swarm.close()
    said = [str(event) for event in swarm.events if event.kind == EventKind.UNPROTECTED]
    assert len(said) == (not loopback and not secret)
    assert all("connections are not authenticated: GOSSAMER_SECRET is not set" in line for line in said)
