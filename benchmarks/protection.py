"""What a secret and TLS cost, and what strangers cost: connections, bandwidth, requests to the store, steps.

    python benchmarks/protection.py                # this machine; with root also over a link of 1 Gbit/s (hosts.py)

Without a secret, with one, and with TLS besides, in turns in one run. The second table is of two workers with a secret:
the longest steps while nothing happens and while strangers connect to all of their ports.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from certificates import make_certificates
from gossamer.process.net.connection import Connection, connect
from gossamer.process.net.identity import Identity
from gossamer.process.net.listener import Listener
from gossamer.process.net.loop import Loop
from gossamer.process.net.secret import find_secret
from gossamer.process.net.tls import find_tls_files, make_tls
from gossamer.process.store.failover_store import FailoverStore
from gossamer.process.store.home_store import Home, Host
from gossamer.process.store.parsing import read_address
from gossamer.process.store.rank_info import free_port
from gossamer.process.store.store_client import StoreClient
from gossamer.process.store.store_server import StoreServer
from hosts import Hosts, Unavailable
from tables import table

SECRET = "a secret for the benchmark alone"
MEGABYTES = 20
STEP_S = 0.05
PARAMETERS = 5_000_000


def identity(rank: int) -> Identity:
    files = find_tls_files()
    return Identity(rank, "benchmark", find_secret(), tls=None if files is None else make_tls(files))


# Two processes and a connection


def listen(host: str, port: int) -> None:
    """Answer exchanges and serve a store until this process is killed."""
    listener = Listener(host, port, identity=identity(0))
    StoreServer(listener)

    def serve(connection: Connection) -> None:
        data, received = bytes(MEGABYTES * 1_000_000), bytearray(MEGABYTES * 1_000_000)
        try:
            while True:
                exchange(connection, data, received)
        except OSError:
            connection.close()

    listener.register(
        "exchange", lambda connection, hello: threading.Thread(target=serve, args=(connection,), daemon=True).start()
    )
    listener.register("nothing", lambda connection, hello: connection.close())
    print("ready", flush=True)
    threading.Event().wait()


def exchange(connection: Connection, data: bytes, received: bytearray) -> None:
    def send() -> None:
        # What breaks here breaks there too.
        with contextlib.suppress(OSError):
            connection.send(data, deadline=None)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    connection.receive_into(received, None)
    sender.join()


def ask(host: str, port: int, exchanges: int, connections: int) -> None:
    """Print milliseconds per connection, gigabytes per second both ways, and microseconds per request, as JSON."""
    address, own = (host, port), identity(1)
    connecting = []
    for _ in range(connections):
        began = time.perf_counter()
        connect(address, "nothing", b"", identity=own, timeout_s=30).close()
        connecting.append(time.perf_counter() - began)
    connection = connect(address, "exchange", b"", identity=own, timeout_s=30)
    data, received, seconds = bytes(MEGABYTES * 1_000_000), bytearray(MEGABYTES * 1_000_000), []
    for _ in range(exchanges + 1):
        began = time.perf_counter()
        exchange(connection, data, received)
        seconds.append(time.perf_counter() - began)
    loop = Loop("benchmark")
    store, requests = StoreClient(address, own, loop, 30.0), []
    store.set({"key": b"value"})
    for _ in range(500):
        began = time.perf_counter()
        store.get(["key"])
        requests.append(time.perf_counter() - began)
    found = {
        "connect ms": 1e3 * statistics.median(connecting),
        "GB/s each way": MEGABYTES / 1e3 / statistics.median(seconds[1:]),
        "store request µs": 1e6 * statistics.median(requests),
    }
    print(json.dumps(found))
    loop.close()


# Two workers that train


def work(seconds: float) -> None:
    """Train as one of two workers; print the times of the steps."""
    import torch

    import gossamer

    torch.set_num_threads(1)
    model = torch.nn.Linear(PARAMETERS // 1000, 1000, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    swarm = gossamer.join(model, optimizer, method="gossip", topology="complete")
    print("ready", flush=True)
    model.weight.grad = torch.ones_like(model.weight)
    steps, until = [], time.monotonic() + seconds
    while time.monotonic() < until:
        began = time.perf_counter()
        time.sleep(STEP_S)
        optimizer.step()
        steps.append(time.perf_counter() - began)
    exchanges = swarm.metrics().exchanges
    swarm.finish()
    print(json.dumps({"steps": steps[2:], "exchanges": exchanges}))


def train(environment: dict[str, str], seconds: float, attack: str = "") -> dict[str, float]:
    """Return the median and the longest step of two workers in milliseconds, and their exchanges per step."""
    port = free_port()
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    workers = [start(["--work", str(seconds)], {**common, **environment, "RANK": str(rank)}) for rank in range(2)]
    for worker in workers:
        until_ready(worker)
    attacks = strangers(ports_of(port), attack) if attack else 0
    reports = [json.loads(worker.communicate()[0].splitlines()[-1]) for worker in workers]
    steps = [step for report in reports for step in report["steps"]]
    done = sum(report["exchanges"] for report in reports)
    return {
        "step ms": 1e3 * statistics.median(steps),
        "longest ms": 1e3 * max(steps),
        "exchanges per step": done / len(steps),
        "connections": attacks,
    }


def ports_of(port: int) -> list[int]:
    """Return the listening ports of both workers, as they tell a member."""
    member = Identity(None, "run/0", SECRET.encode())
    store = FailoverStore(Home("127.0.0.1", port, Host.LAUNCHER, ""), member, "gossamer/run/0/0/", 30.0)
    addresses = [read_address(value) for value in store.get_all(["address/0", "address/1"])]
    store.close()
    return [port, *(address[1] for address in addresses if address is not None)]


def strangers(ports: list[int], attack: str) -> int:
    """Connect to ``ports``; return how many connections there were."""
    if attack == "idle":
        sockets = [socket.create_connection(("127.0.0.1", port), 30) for port in ports for _ in range(500)]
        threading.Timer(5.0, lambda: [sock.close() for sock in sockets]).start()
        return len(sockets)
    count = {"connect and close": 10_000, "garbage": 2_000, "wrong secret": 500}[attack]
    for number in range(count):
        address = ("127.0.0.1", ports[number % len(ports)])
        try:
            if attack == "wrong secret":
                connect(address, "store", b"", identity=Identity(1, "run/0", b"wrong"), timeout_s=30)
            with socket.create_connection(address, 30) as sock:
                if attack == "garbage":
                    sock.sendall(os.urandom(4096))
        except OSError:
            pass
    return count


# All together


def start(arguments: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    environment = {**os.environ, **environment}
    command = [sys.executable, __file__, *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def until_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    if process.stdout.readline().strip() != "ready":
        raise SystemExit("a process failed")


def measure(environment: dict[str, str], exchanges: int, connections: int) -> dict[str, float]:
    port = free_port()
    listening = start(["--listen", "127.0.0.1", str(port)], environment)
    until_ready(listening)
    asking = start(["--ask", "127.0.0.1", str(port), str(exchanges), str(connections)], environment)
    found: dict[str, float] = json.loads(asking.communicate()[0])
    listening.kill()
    listening.wait()
    return found


def measure_over_link(environment: dict[str, str], mbit: float, exchanges: int) -> float:
    """Return the megabits per second each way between two hosts."""
    with Hosts(2, mbit) as hosts:
        address, port = hosts.address(0), "29500"
        own = [sys.executable, __file__]
        listening = hosts.start(0, [*own, "--listen", address, port], environment, output=subprocess.PIPE)
        until_ready(listening)
        asking = hosts.start(
            1, [*own, "--ask", address, port, str(exchanges), "3"], environment, output=subprocess.PIPE
        )
        found = json.loads(asking.communicate()[0].splitlines()[-1])
        listening.kill()
        listening.wait()
    return 8e3 * float(found["GB/s each way"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3, help="how often each setting is measured")
    parser.add_argument("--seconds", type=float, default=15.0, help="how long workers train at a time")
    parser.add_argument("--mbit", type=float, default=1000.0, help="rate of the link; 0: none")
    for hidden, count in (("--listen", 2), ("--ask", 4), ("--work", 1)):
        parser.add_argument(hidden, nargs=count, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.listen:
        listen(options.listen[0], int(options.listen[1]))
    elif options.ask:
        ask(options.ask[0], *map(int, options.ask[1:]))
    elif options.work:
        work(float(options.work[0]))
    else:
        compare(options)


def compare(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        files = make_certificates(Path(folder))
        secret = {"GOSSAMER_SECRET": SECRET}
        tls = {"GOSSAMER_TLS_CERT": files.cert, "GOSSAMER_TLS_KEY": files.key, "GOSSAMER_TLS_CA": files.ca}
        settings: dict[str, dict[str, str]] = {"nothing": {}, "secret": secret, "secret, TLS": {**secret, **tls}}
        turns: dict[str, list[dict[str, float]]] = {name: [] for name in settings}
        for _ in range(options.turns):
            for name, environment in settings.items():
                found = measure(environment, 10, 50)
                found |= train(environment, options.seconds)
                if options.mbit:
                    try:
                        found["Mbit/s over the link"] = measure_over_link(environment, options.mbit, 5)
                    except Unavailable as error:
                        print(f"without the link: {error}", file=sys.stderr)
                        options.mbit = 0.0
                turns[name].append(found)
        print(table([medians(name, found) for name, found in turns.items()]))
        rows = []
        for attack in ("", "connect and close", "idle", "garbage", "wrong secret"):
            found = train(secret, options.seconds, attack)
            rows.append({"strangers": attack or "none", **found})
        print()
        print(table(rows))


def medians(name: str, found: list[dict[str, float]]) -> dict[str, Any]:
    columns = [column for column in found[0] if column not in ("longest ms", "connections")]
    return {"protection": name, **{column: statistics.median(turn[column] for turn in found) for column in columns}}


if __name__ == "__main__":
    main()
