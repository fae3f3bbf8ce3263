"""One live process per rank, also where the second one cannot reach the first."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import partition_script
import pytest
import torch
from real_workers import RealWorker, RealWorkers

from gossamer.api import join
from gossamer.errors import InputError
from gossamer.process import local_process
from gossamer.process.liveness.actions import Namesake
from gossamer.process.liveness.liveness import Liveness
from gossamer.process.liveness.peer import RAISE_S
from gossamer.process.liveness.records import Kind, Message, first_record
from gossamer.process.net.identity import Identity
from gossamer.process.roster.roster_store import KEY
from gossamer.process.store import claim_watch, rank_claim
from gossamer.process.store.claim_watch import ClaimWatch
from gossamer.process.store.failover_store import FailoverStore
from gossamer.process.store.home_store import Home, Host, HostedStore
from gossamer.process.store.rank_claim import Claim, RankClaim, read_claim, read_question
from hosts import Hosts, Unavailable

HOST = "127.0.0.1"
RANK = 3
WITHIN_S = 120.0
NAME_OWN_PROCESS = "from gossamer.process import local_process; print(local_process.own_name())"


class CutsOff:
    """An address where connections are accepted and cut off at once, as if too many were open."""

    def __init__(self) -> None:
        self._socket = socket.create_server((HOST, 0))
        self.address = self._socket.getsockname()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                self._socket.accept()[0].close()
            except OSError:
                return

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class Claimant:
    """A process of rank 3, which looks into the store now and then."""

    def __init__(self, home: HostedStore, address: tuple[str, int]) -> None:
        identity = Identity(RANK, incarnation=os.urandom(16))
        self.store = FailoverStore(Home(*home.address, Host.LAUNCHER, ""), identity, "run/", 20.0)
        self.address, self.counter, self.errors = address, 0, [InputError("")][:0]
        self.claim = RankClaim(self.store, address)
        self.watch = ClaimWatch(self.claim, self._heartbeats, self.errors.append)
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def _heartbeats(self, rank: int, address: tuple[str, int]) -> int | None:
        return self.counter if (rank, address) == (RANK, self.address) and not self.errors else None

    def beats(self) -> None:
        self._thread.start()

    def _beat(self) -> None:
        while not self._ends.wait(0.02):
            self.counter += 1
            self.watch.poll()

    def close(self) -> None:
        self._ends.set()
        if self._thread.is_alive():
            self._thread.join()
        self.store.close()


@pytest.fixture
def place() -> Iterator[CutsOff]:
    place = CutsOff()
    yield place
    place.close()


@pytest.fixture
def two(place: CutsOff) -> Iterator[list[Claimant]]:
    """Two processes of a rank. None of them lets anybody in: the link between them is cut."""
    home = HostedStore(HOST, 0, Identity(0), lambda text: None)
    other = CutsOff()
    two = [Claimant(home, place.address), Claimant(home, other.address)]
    yield two
    for claimant in two:
        claimant.close()
    other.close()
    home.listener.close()


def test_a_process_that_cannot_be_reached_keeps_its_rank_if_it_is_heard_of(
    two: list[Claimant], monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine an answer may take long.
    monkeypatch.setattr(rank_claim, "ANSWER_INTERVALS", 60.0)
    first, second = two
    first.claim.make()
    first.beats()
    with pytest.raises(InputError, match=r"rank 3 is taken: .* cannot be reached from here, but others hear it"):
        second.claim.make()
    assert read_claim(first.store.get("claim/3")) == first.claim.own
    assert not first.errors


def test_the_rank_of_a_process_that_nobody_hears_is_taken(two: list[Claimant], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_claim, "ANSWER_INTERVALS", 1.0)
    first, second = two
    first.claim.make()
    second.claim.make()
    assert read_claim(first.store.get("claim/3")) == second.claim.own


def test_the_rank_of_a_process_that_has_ended_is_taken_whatever_listens_at_its_port(two: list[Claimant]) -> None:
    with socket.create_server((HOST, 0)) as silent:
        # Another program, which lets anybody in and says nothing.
        ended = subprocess.run([sys.executable, "-c", NAME_OWN_PROCESS], stdout=subprocess.PIPE, check=True, text=True)
        earlier = Claim(silent.getsockname(), "0" * 32, ended.stdout.strip())
        assert earlier.process != local_process.UNKNOWN
        claimant = two[0]
        claimant.store.set("claim/3", earlier.to_text())
        claimant.claim.make()
        assert read_claim(claimant.store.get("claim/3")) == claimant.claim.own
        # Of a process of another machine it is not known whether it has ended.
        claimant.store.set("claim/3", earlier._replace(process=earlier.process.replace(":", "0:", 1)).to_text())
        with pytest.raises(InputError, match=r"rank 3 is taken: .* is there, but does not answer"):
            claimant.claim.make()


def test_a_process_that_runs_has_not_ended_and_another_one_with_its_number_is_another() -> None:
    name = local_process.own_name()
    machine, pid, started = name.rsplit(":", 2)
    assert not local_process.has_ended(name)
    assert local_process.has_ended(f"{machine}:{pid}:{int(started) - 1}")
    for unknown in (local_process.UNKNOWN, f"{machine}:{pid}", f"{machine}:{'9' * 10}:1x", "no name"):
        assert not local_process.has_ended(unknown)


def test_a_process_whose_parent_has_not_asked_how_it_ended_has_ended() -> None:
    # The name of the program is no text, and looks like the end of one.
    rename = "import ctypes; ctypes.CDLL(None).prctl(15, b') Z \\xc3', 0, 0, 0); "
    script = f"{rename}{NAME_OWN_PROCESS}; import sys; sys.stdout.flush(); input()"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stdin=subprocess.PIPE) as child:
        assert child.stdout is not None
        name = child.stdout.readline().decode().strip()
        assert not local_process.has_ended(name)
        child.kill()
        # Waits, and leaves the zombie.
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert local_process.has_ended(name)
    assert local_process.has_ended(name)


def test_of_two_processes_with_one_store_the_one_without_a_claim_ends(two: list[Claimant]) -> None:
    first, second = two
    first.claim.make()
    # As if it had taken the rank in another store, which is given up now.
    first.store.set("claim/3", second.claim.own.to_text())
    first.beats()
    second.beats()
    until = threading.Event()
    for _ in range(int(WITHIN_S / 0.1)):
        if first.errors or until.wait(0.1):
            break
    (error,) = first.errors
    assert "rank 3 was given to two processes while the network was cut, and the one at" in str(error)
    assert not second.errors


def test_of_two_processes_with_a_store_each_one_ends(two: list[Claimant], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim_watch, "NAMESAKE_S", 0.5)
    monkeypatch.setattr(rank_claim, "LOOK_INTERVAL_S", 0.1)
    for claimant, other in (two, two[::-1]):
        # Each has a claim in its own store.
        monkeypatch.setattr(claimant.store, "prefix", f"{claimant.address[1]}/")
        claimant.claim.make()
        claimant.beats()
        claimant.watch.hear_of_namesake(other.address)
    pause = threading.Event()
    for _ in range(int(WITHIN_S / 0.1)):
        for claimant, other in (two, two[::-1]):
            if not other.errors:
                claimant.watch.hear_of_namesake(other.address)
        if any(claimant.errors for claimant in two):
            break
        pause.wait(0.1)
    assert [len(claimant.errors) for claimant in sorted(two, key=lambda one: one.address)] == [0, 1]


@pytest.mark.parametrize(
    "value", [b"", b"3 127.0.0.1 80", b"x 127.0.0.1 80 " + b"0" * 32, b"3 127.0.0.1 0 " + b"0" * 32, b"\xff" * 50]
)
def test_a_question_that_cannot_be_read_is_none(value: bytes) -> None:
    assert read_question(value) is None


def test_two_live_processes_of_a_rank_hear_of_each_other_and_raise_their_numbers_seldom() -> None:
    """All that each of them says comes to the other, through others."""
    one, other = (Liveness(first_record(RANK, number, (HOST, number)), 4, 0.0) for number in (1, 2))
    said: list[Namesake] = []
    for turn in range(100):
        now = 0.1 * turn
        for speaks, hears in ((one, other), (other, one)):
            speaks.beat(0, 0.0)
            hears.receive(0, Message(Kind.GOSSIP, (first_record(0, 1, (HOST, 9)), speaks.own)), now)
            said += [action for action in hears.actions if isinstance(action, Namesake)]
            hears.actions.clear()
    assert {action.address[1] for action in said} == {1, 2}
    assert max(one.own.process, other.own.process) <= 3 + 2 * 10 / RAISE_S


def test_an_earlier_process_of_a_rank_is_no_live_one() -> None:
    machine = Liveness(first_record(RANK, 1, (HOST, 1)), 4, 0.0)
    earlier = first_record(RANK, 100, (HOST, 2))
    for turn in range(100):
        machine.receive(0, Message(Kind.GOSSIP, (first_record(0, 1, (HOST, 9)), earlier)), 0.1 * turn)
    assert machine.own.process == 101
    assert not any(isinstance(action, Namesake) for action in machine.actions)


def test_a_worker_whose_rank_is_another_ones_does_not_give_it_up() -> None:
    model = torch.nn.Linear(1, 1)
    swarm = join(model, torch.optim.SGD(model.parameters(), lr=0.1), method="allreduce")
    runtime = swarm._runtime
    try:
        model(torch.ones(1)).sum().backward()
        swarm._runtime.driver.flat_model.optimizer.step()
        before = runtime.store.get_all([KEY, "done/0"])
        runtime._end_as_second(InputError("rank 0 was given to two processes"))
        with pytest.raises(InputError, match="given to two"):
            swarm.leave()
        runtime.heartbeats.publish_retired()
        assert runtime.store.get_all([KEY, "done/0"]) == before
        assert 0 in runtime.everybody
    finally:
        swarm.close()


def test_a_worker_ends_once_another_live_process_has_claimed_its_rank() -> None:
    """Its store never moves. The other one is stopped: the kernel accepts connections for it."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    swarm = join(model, optimizer, method="allreduce")
    runtime = swarm._runtime
    try:
        with socket.create_server((HOST, 0)) as other:
            runtime.store.set("claim/0", f"{HOST} {other.getsockname()[1]} {'0' * 32} -")
            with pytest.raises(InputError, match=r"rank 0 was given to two .* does not answer: this one ends"):
                trains(model, optimizer)
        assert runtime.heartbeats.muted
    finally:
        swarm.close()


def trains(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(int(WITHIN_S / 0.05)):
        model(torch.ones(1)).sum().backward()
        optimizer.step()
        pause()


def pause() -> None:
    threading.Event().wait(0.05)


def test_a_worker_notes_that_another_process_of_its_rank_is_heard_of() -> None:
    model = torch.nn.Linear(1, 1)
    swarm = join(model, torch.optim.SGD(model.parameters(), lr=0.1), method="allreduce")
    runtime = swarm._runtime
    try:
        own = runtime.heartbeats._liveness.own
        for number in (10, 20):
            record = own._replace(process=own.process + number, address=(HOST, 1))
            message = Message(Kind.GOSSIP, (first_record(1, 1, (HOST, 2)), record))
            runtime.heartbeats._do(lambda liveness, message=message: liveness.receive(1, message, 0.0))  # type: ignore[misc]
        for _ in range(int(WITHIN_S / 0.05)):
            if runtime._claim_watch._namesake is not None:
                break
            pause()
        assert runtime._claim_watch._namesake is not None
        assert runtime._claim_watch._namesake.address == (HOST, 1)
    finally:
        swarm.close()


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    try:
        with Hosts(3) as made:
            yield made
    except Unavailable as why:
        pytest.skip(str(why))


def test_a_second_process_that_cannot_reach_the_first_is_refused(hosts: Hosts, tmp_path: Path) -> None:
    """Both reach worker 0, who has the store."""
    environment = {"MASTER_ADDR": hosts.address(0)}
    order = {"method": "a2cid2", "steps": 1_000_000, "until": tmp_path / "enough"}
    spaces = [hosts.name(host) for host in (0, 1)]
    with RealWorkers(2, script=partition_script.train, environment=environment, spaces=spaces, **order) as workers:
        for worker in workers:
            worker.at("joined", WITHIN_S)
            worker.step(5)
        hosts.cut(1, 2)
        elsewhere = {**workers.order, "spaces": [hosts.name(0), hosts.name(2)]}
        second = RealWorker(1, workers.environment, workers.script, elsewhere)
        try:
            why = second.until(lambda report: report["at"] in ("ended", "refused", "joined"), WITHIN_S)
        finally:
            second.end()
        (tmp_path / "enough").touch()
        ends = [worker.at("finished", WITHIN_S) for worker in workers]
    assert "rank 1 is taken" in why.get("why", ""), why
    assert "cannot be reached from here, but others hear it" in why["why"]
    assert ends[0]["weights"] == ends[1]["weights"]
    assert not any("is back" in event or "died" in event for event in ends[0]["events"])
    # Each says once that it listens where strangers may come.
    assert [sum("not authenticated" in event for event in end["events"]) for end in ends] == [1, 1]
