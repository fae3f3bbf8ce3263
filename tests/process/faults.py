"""Workers that are killed, stopped, poisoned and restarted while the others train. Run by ``make faults``.

Each of these ends the same way: every survivor's process ends by itself and well, with no thread of ours left; all hold
the same weights; and the model is good.
"""

from __future__ import annotations

import os
import pickle
import random
import signal
import socket
import time
from pathlib import Path
from typing import Any

import join_script
import pytest
from partitions import (  # noqa: F401
    hosts,
    test_both_sides_of_a_partition_are_averaged,
    test_the_end_in_a_partition_is_said,
    test_the_smaller_side_waits,
)
from real_workers import FORKS, RealWorkers, Report
from replica_faults import test_a_replica_that_lost_a_rank_delays_nobody_and_exchanges_again  # noqa: F401
from training_script import train

from gossamer.methods import METHODS
from hosts import Hosts, Unavailable, enter

PAIRWISE = tuple(name for name, method in METHODS.items() if method.pairwise)
NOT_WAITING = tuple(name for name, method in METHODS.items() if not method.lockstep)
WAITING = tuple(name for name, method in METHODS.items() if method.lockstep)
EVERY = NOT_WAITING + WAITING
LONG = {"width": 50_000, "lr": 0.001}
"""A model whose exchange takes a while: 4 MB."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each test as often as is asked for."""
    runs = int(os.environ.get("FAULT_RUNS", "1"))
    if runs > 1:
        metafunc.fixturenames.append("run")
        metafunc.parametrize("run", range(1, runs + 1))


@pytest.fixture(scope="session", autouse=True)
def all_loaded() -> None:
    """Where several processes share these tests, all begin when the last has loaded torch: it takes every core."""
    if "FAULT_READY" in os.environ:
        first = FORKS.Process(target=int)
        first.start()
        first.join(120)
        ready = Path(os.environ["FAULT_READY"])
        (ready / str(os.getpid())).touch()
        until = time.monotonic() + 300
        while len(list(ready.iterdir())) < int(os.environ["FAULT_AT_ONCE"]) and time.monotonic() < until:
            time.sleep(0.1)


def good(ends: list[Report]) -> None:
    assert all(end["weights"] == ends[0]["weights"] for end in ends)
    assert ends[0]["accuracy"] > 0.95
    assert [end["threads"] for end in ends] == [[]] * len(ends)


def newest_steps(workers: RealWorkers, ranks: list[int]) -> list[int]:
    """How far these workers are."""
    for rank in ranks:
        while workers[rank].waiting():
            workers[rank].next()
    return [workers[rank].reports[-1]["step"] for rank in ranks]


# Killed


@pytest.mark.parametrize("method", NOT_WAITING)
def test_killed_in_the_middle_of_an_exchange(method: str) -> None:
    with RealWorkers(4, method=method, steps=100, dies=(2, 50), **LONG) as workers:
        workers[2].died()
        ends = workers.finished([0, 1, 3])
        trained = [workers[rank].reports[-2] for rank in (0, 1, 3)]
    assert all(report["at"] == "trained" and report["steps"] == 100 for report in trained)
    # The deadline of the first exchanges is a minute. Nobody's steps wait for it.
    assert max(report["longest"] for report in trained) < 30
    good(ends)


@pytest.mark.parametrize("method", WAITING)
def test_killed_in_the_middle_of_an_average(method: str) -> None:
    with RealWorkers(4, method=method, steps=60, dies=(2, 30), **LONG) as workers:
        workers[2].died()
        ends = workers.finished([0, 1, 3])
        trained = [workers[rank].reports[-2] for rank in (0, 1, 3)]
    assert all(report["at"] == "trained" and report["steps"] >= 58 for report in trained)
    # That of a collective is a minute or more, unless somebody is found dead.
    assert max(report["longest"] for report in trained) < 30
    good(ends)


@pytest.mark.parametrize("method", EVERY)
def test_the_host_of_the_store_is_killed(method: str) -> None:
    with RealWorkers(4, method=method, steps=200) as workers:
        for worker in workers:
            worker.step(50)
        workers.kill(0)
        good(workers.finished([1, 2, 3]))


@pytest.mark.parametrize(("method", "victims"), [("a2cid2", (0, 3)), ("gossip", (1, 2)), ("allreduce", (0, 2))])
def test_two_killed_at_once(method: str, victims: tuple[int, int]) -> None:
    with RealWorkers(4, method=method, steps=200) as workers:
        for worker in workers:
            worker.step(50)
        workers.kill(*victims)
        good(workers.finished([rank for rank in range(4) if rank not in victims]))


@pytest.mark.parametrize("pause_s", [0.15, 0.25, 0.4])
@pytest.mark.parametrize("method", [name for name in EVERY if name not in PAIRWISE])
def test_a_worker_dies_after_it_said_that_it_is_there(method: str, pause_s: float) -> None:
    """The members of a new generation are agreed on while one that would be its lowest rank dies, and one is done."""
    with RealWorkers(4, method=method, steps=(40, 120, 120, 120)) as workers:
        workers[0].at("trained")
        workers[2].step(60)
        workers.kill(3)
        time.sleep(pause_s)
        workers.kill(1)
        good(workers.finished([0, 2]))


def test_killed_one_after_the_other() -> None:
    with RealWorkers(4, method="allreduce", steps=250) as workers:
        for worker in workers:
            worker.step(50)
        workers.kill(1)
        time.sleep(0.3)
        workers.kill(2)
        time.sleep(0.3)
        workers.kill(0)
        good(workers.finished([3]))


@pytest.mark.parametrize("method", ["gossip", "allreduce"])
def test_killed_while_they_meet(method: str) -> None:
    with RealWorkers(4, method=method, steps=150) as workers:
        workers[2].at("start")
        time.sleep(0.15)
        workers.kill(2)
        workers.restart(2)
        good(workers.finished())


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("method", ["gossip", "overlap", "divisible"])
def test_killed_while_they_take_the_last_mean(method: str, victim: int) -> None:
    with RealWorkers(4, method=method, steps=40, dies=(victim, 40), **LONG) as workers:
        workers[victim].died()
        good(workers.finished([rank for rank in range(4) if rank != victim]))


# Restarted


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("method", EVERY)
def test_a_restarted_worker_is_back_in_the_exchange(method: str, victim: int, tmp_path: Path) -> None:
    with RealWorkers(4, method=method, steps=100_000, until=tmp_path / "enough") as workers:
        for worker in workers:
            worker.step(50)
        workers.kill(victim)
        survivors = [rank for rank in range(4) if rank != victim]
        died = [workers[rank].step(100) for rank in survivors]
        workers.restart(victim).exchanged()
        steps = newest_steps(workers, survivors)
        came_back = [workers[rank].step(step + 20) for rank, step in zip(survivors, steps, strict=True)]
        (tmp_path / "enough").touch()
        ends = workers.finished()
    assert any("came back" in item for item in ends[victim]["events"])
    if method in ("allreduce", "overlap"):
        # One step for the death, and one for the return.
        assert max(report["repeated"] for report in died) <= 1
        assert max(now["repeated"] - then["repeated"] for now, then in zip(came_back, died, strict=True)) <= 1
    if method == "allreduce":
        # Made again with the same gradients. In overlap a worker that is a step behind takes over another's state.
        assert [report["dropped"] for report in came_back] == [0, 0, 0]
    good(ends)


@pytest.mark.parametrize("method", ["gossip", "allreduce", "lasgd"])
def test_restarted_at_once_before_anybody_takes_it_for_dead(method: str, tmp_path: Path) -> None:
    with RealWorkers(4, method=method, steps=100_000, until=tmp_path / "enough") as workers:
        for worker in workers:
            worker.step(50)
        workers.kill(2)
        workers.restart(2).exchanged()
        (tmp_path / "enough").touch()
        good(workers.finished())


@pytest.mark.parametrize("method", ["a2cid2", "allreduce"])
def test_every_worker_is_restarted_in_turn(method: str, tmp_path: Path) -> None:
    with RealWorkers(3, method=method, steps=100_000, until=tmp_path / "enough") as workers:
        for worker in workers:
            worker.step(50)
        for victim in (1, 0, 2, 0):
            workers.kill(victim)
            workers.restart(victim).exchanged(2)
        (tmp_path / "enough").touch()
        good(workers.finished())


# More workers, and fewer


@pytest.mark.parametrize("method", EVERY)
def test_four_grow_to_eight_and_shrink_to_three(method: str, tmp_path: Path) -> None:
    """The first to leave hosts the store."""
    order = {"method": method, "until": tmp_path / "enough", "leave": tmp_path, "recent": True, "compute_s": 0.02}
    with RealWorkers(4, steps=100_000, **order) as workers:
        for worker in workers:
            worker.step(50)
        for worker in workers.grow(4):
            worker.exchanged(2)
        for worker in workers:
            worker.until(lambda report: any("has 8 workers" in event for event in report.get("events", ())))
        for leaving in (0, 2, 3, 5, 6):
            (tmp_path / f"leave {leaving}").touch()
            workers[leaving].at("left")
            workers[leaving].process.join(60)
            assert workers[leaving].process.exitcode == 0
        stay = [1, 4, 7]
        for rank in stay:
            workers[rank].said("has 3 workers")
            workers[rank].step(workers[rank].reports[-1]["step"] + 50)
        longest = {rank: max(report.get("longest", 0.0) for report in workers[rank].reports[6:]) for rank in stay}
        print(f"{method}: longest steps {longest}")
        (tmp_path / "enough").touch()
        ends = workers.finished(stay)
    assert all(end["missing"] == [] for end in ends)
    good(ends)


@pytest.mark.parametrize("method", ["a2cid2", "allreduce", "lasgd"])
def test_the_place_of_a_dead_worker_is_given_up(method: str, tmp_path: Path) -> None:
    order = {"method": method, "until": tmp_path / "enough", "give_up": tmp_path}
    with RealWorkers(4, steps=100_000, **order) as workers:
        for worker in workers:
            worker.step(50)
        workers.kill(1)
        workers[0].said("worker 1 died")
        (tmp_path / "give up 0 1").touch()
        for rank in (0, 2, 3):
            workers[rank].said("worker 1 has left for good")
            workers[rank].step(workers[rank].reports[-1]["step"] + 50)
        assert "has left this run for good" in workers.restart(1).at("refused")["why"]
        (tmp_path / "enough").touch()
        ends = workers.finished([0, 2, 3])
    assert all(end["missing"] == [] for end in ends)
    good(ends)


@pytest.mark.parametrize("method", ["a2cid2", "allreduce", "lasgd"])
def test_newcomers_die_while_they_come(method: str, tmp_path: Path) -> None:
    """The others go on; one that comes through any worker's address while the store's host is dead is taken in."""
    # The places of the dead are kept: on a ring they would part the others.
    order = {"method": method, "topology": "complete", "until": tmp_path / "enough", "compute_s": 0.02}
    with RealWorkers(3, steps=100_000, **order) as workers:
        for worker in workers:
            worker.step(50)
        for pause_s in (0.2, 0.5, 1.0):
            (newcomer,) = workers.grow(1)
            newcomer.at("start")
            time.sleep(pause_s)
            newcomer.process.kill()
            newcomer.end()
        address = next(report["address"] for report in workers[2].reports if "address" in report)
        workers.kill(0)
        workers[1].said("worker 0 died")
        (newcomer,) = workers.grow(1, at=address)
        newcomer.exchanged(2)
        (tmp_path / "enough").touch()
        ends = [worker.at("finished") for worker in (workers[1], workers[2], newcomer)]
    good(ends)


# In the handshake of join, before anything is connected


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("dies", ["_publish_facts", "_look"])
@pytest.mark.parametrize("method", ["gossip", "allreduce", "lasgd"])
def test_killed_in_the_handshake(method: str, dies: str, victim: int) -> None:
    # The last worker comes late, so that the others are in the handshake meanwhile.
    order = {"method": method, "ranks": {victim: {"dies": dies}, 2: {"late_s": 3.0}}, "steps": 100, "compute_s": 0.01}
    with RealWorkers(3, script=join_script.run, **order) as workers:
        workers[victim].died()
        workers.restart(victim)
        ends = [worker.at("finished") for worker in workers]
    assert all(end["weights"] == ends[0]["weights"] for end in ends)


@pytest.mark.parametrize("own", [{"version": "9.9"}, {"width": 9}, {"method": "lasgd"}, {"world": 4}])
@pytest.mark.parametrize("method", ["gossip", "allreduce"])
def test_a_worker_that_comes_back_otherwise_is_refused(method: str, own: dict[str, object], tmp_path: Path) -> None:
    order = {"method": method, "steps": 100_000, "compute_s": 0.01, "until": tmp_path / "enough"}
    with RealWorkers(3, script=join_script.run, **order) as workers:
        for worker in workers:
            worker.at("joined")
        workers.kill(2)
        workers.order = {**order, "ranks": {2: own}}
        assert "comes to a run that has begun" in workers.restart(2).at("refused")["why"]
        workers.order = order
        workers.restart(2).at("joined")
        (tmp_path / "enough").touch()
        ends = [worker.at("finished") for worker in workers]
    assert all(end["weights"] == ends[0]["weights"] for end in ends)


# Stopped, slow, out of data early


@pytest.mark.parametrize(
    ("method", "victim"),
    # Rank 0 hosts the store.
    [(method, at % 3) for at, method in enumerate(EVERY)],
)
def test_stopped_for_ten_seconds(method: str, victim: int) -> None:
    others = [rank for rank in range(4) if rank != victim]
    steps = [400 if rank == victim else 700 for rank in range(4)]
    with RealWorkers(4, method=method, steps=steps, compute_s=0.02) as workers:
        for worker in workers:
            worker.step(50)
        workers[victim].signal(signal.SIGSTOP)
        before = newest_steps(workers, others)
        time.sleep(10)
        after = newest_steps(workers, others)
        workers[victim].signal(signal.SIGCONT)
        ends = workers.finished()
        trained = [worker.reports[-2] for worker in workers]
    # Nobody has waited for it to wake up: reports are ten steps apart.
    assert all(now - then >= 20 for then, now in zip(before, after, strict=True))
    if method in NOT_WAITING:
        assert [report["steps"] for report in trained] == steps
    good(ends)


@pytest.mark.parametrize("method", NOT_WAITING)
def test_a_slow_worker_holds_up_nobody(method: str) -> None:
    with RealWorkers(4, method=method, steps=[250, 50, 250, 250], compute_s=[0.02, 0.1, 0.02, 0.02]) as workers:
        ends = workers.finished()
        trained = [worker.reports[-2] for worker in workers]
    assert [report["steps"] for report in trained] == [250, 50, 250, 250]
    assert max(trained[rank]["longest"] for rank in (0, 2, 3)) < 1.0
    good(ends)


@pytest.mark.parametrize("method", EVERY)
def test_a_worker_leaves_after_half_its_batches(method: str) -> None:
    with RealWorkers(4, method=method, steps=[200, 200, 100, 200]) as workers:
        good(workers.finished())


# Poisoned


@pytest.mark.parametrize("method", EVERY)
def test_what_is_not_finite_does_not_spread(method: str, tmp_path: Path) -> None:
    order = {"method": method, "topology": "complete", "momentum": 0.5, "poison": (1, 60, float("nan"))}
    with RealWorkers(4, steps=100_000, until=tmp_path / "enough", **order) as workers:
        told = workers[1].said("our weights were not finite")
        workers[1].step(told["step"] + 50)
        (tmp_path / "enough").touch()
        ends = workers.finished()
        trained = [worker.reports[-2] for worker in workers]
    assert sum(report["refused"] for report in trained) > 0
    good(ends)


@pytest.mark.parametrize("method", PAIRWISE)
def test_what_is_absurdly_large_does_not_spread(method: str, tmp_path: Path) -> None:
    order = {"method": method, "topology": "complete", "poison": (1, 60, 1e12)}
    with RealWorkers(4, steps=100_000, until=tmp_path / "enough", **order) as workers:
        told = workers[1].said("absurdly large: took over")
        workers[1].step(told["step"] + 50)
        (tmp_path / "enough").touch()
        ends = workers.finished()
        trained = [worker.reports[-2] for worker in workers]
    assert sum(report["refused"] for report in trained) > 0
    good(ends)


def test_an_absurd_worker_does_not_count_in_the_end() -> None:
    # It has one neighbour only, who cannot outvote it, and makes its absurd step shortly before the end.
    order = {"method": "gossip", "topology": "path", "momentum": 0.5, "poison": (0, 195, 1e12)}
    with RealWorkers(3, steps=200, **order) as workers:
        good(workers.finished())


# Churn


@pytest.mark.parametrize("method", ["allreduce", "overlap", "lasgd", "a2cid2"])
def test_workers_die_and_come_back_all_the_time(method: str, tmp_path: Path) -> None:
    """The worker that stays never waits for long, whoever dies when: the host of the store most often of all."""
    rng = random.Random(method)
    with RealWorkers(4, method=method, steps=1_000_000, until=tmp_path / "enough", compute_s=0.02) as workers:
        for worker in workers:
            worker.step(20)
        for victim in (0, 1, 0, 2, 0, 1, 2, 0):
            workers.kill(victim)
            time.sleep(rng.uniform(0.0, 2.0))
            workers.restart(victim)
            if rng.random() < 0.5:
                workers[victim].until(lambda report: report.get("exchanges", 0) > 2)
            else:
                # It dies, or another does, while it joins.
                time.sleep(rng.uniform(0.0, 1.0))
        for victim in (0, 1, 2):
            workers[victim].until(lambda report: report.get("exchanges", 0) > 2)
        (tmp_path / "enough").touch()
        ends = workers.finished()
        trained = workers[3].reports[-2]
    # A wait for what never comes lasts for a minute, and one for a store that has died for half of that.
    assert trained["at"] == "trained"
    assert trained["longest"] < 10
    good(ends)


# Networks


def train_on_host(rank: int, environment: dict[str, str], order: dict[str, Any], out: Any) -> None:
    enter(order["hosts"][rank])
    train(rank, environment, order, out)


@pytest.mark.parametrize("seconds", [8, 20])
@pytest.mark.parametrize("method", ["a2cid2", "gossip"])
def test_two_cannot_reach_each_other_for_a_while(method: str, seconds: float, tmp_path: Path) -> None:
    """Both reach rank 0, which hosts the store. Nobody waits, and nobody ends before its time."""
    try:
        hosts = Hosts(3)
    except Unavailable as why:
        pytest.skip(str(why))
    with hosts:
        environment = {"MASTER_ADDR": hosts.address(0)}
        order = {"hosts": [hosts.name(rank) for rank in range(3)], "steps": 100_000, "until": tmp_path / "enough"}
        order |= {"method": method, "topology": "complete", "compute_s": 0.02}
        with RealWorkers(3, script=train_on_host, environment=environment, **order) as workers:
            for worker in workers:
                worker.step(50)
            hosts.cut(1, 2)
            before = newest_steps(workers, [0, 1, 2])
            time.sleep(seconds)
            after = newest_steps(workers, [0, 1, 2])
            hosts.heal(1, 2)
            time.sleep(4)
            (tmp_path / "enough").touch()
            ends = workers.finished()
            trained = [worker.reports[-2] for worker in workers]
    # Reports are ten steps apart, and the machine may be busy.
    assert all(now - then >= 10 * seconds for then, now in zip(before, after, strict=True))
    assert max(report["longest"] for report in trained) < 2.0
    good(ends)


# Strangers


class Unpickled:
    """Leaves a trace where somebody unpickles it."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.trace),)


def listening(pid: int) -> set[int]:
    """The ports that a process listens on."""
    owned = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            owned.add(os.readlink(entry))
        except OSError:
            continue
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in owned:
                ports.add(int(fields[1].rsplit(":", 1)[1], 16))
    return ports


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


# Ctrl-C


@pytest.mark.parametrize("method", EVERY)
def test_ctrl_c(method: str) -> None:
    with RealWorkers(4, method=method, steps=10_000) as workers:
        for worker in workers:
            worker.step(50)
        for worker in workers:
            worker.signal(signal.SIGINT)
        for worker in workers:
            worker.process.join(60)
        codes = [worker.process.exitcode for worker in workers]
    assert codes == [1, 1, 1, 1]


@pytest.mark.parametrize("method", ["gossip", "overlap"])
def test_ctrl_c_for_one_of_them(method: str) -> None:
    with RealWorkers(4, method=method, steps=200) as workers:
        for worker in workers:
            worker.step(50)
        workers[2].signal(signal.SIGINT)
        workers[2].process.join(60)
        assert workers[2].process.exitcode == 1
        good(workers.finished([0, 1, 3]))
