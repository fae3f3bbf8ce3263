"""Many workers on one machine: how long they take to join, and the threads, descriptors and store requests of each.

    python benchmarks/wide.py                                   # 64 workers, a minute for each row
    python benchmarks/wide.py --workers 16 --methods allreduce --topologies ring

Real processes, forked from a server that has torch loaded, meet at a barrier before they join. A gradient is a wait, so
that many workers fit on few cores. Prints a markdown table: of each figure that of the worker with the most. Rank 0,
which serves the store to all others, counts only where the table says so. On a machine with other work,
``chrt -r 1 python benchmarks/wide.py`` takes the cores for itself.
"""

from __future__ import annotations

import argparse
import gc
import logging
import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from gossamer.process.store.rank_info import free_port
from tables import table

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["gossamer.process.runtime.swarm", "torch._dynamo"])
JOIN_TIMEOUT_S = 120.0
SETTLED_AFTER_S = 3.0
"""After this long, connections that served only to join are closed."""


def num_descriptors() -> int:
    # The folder itself is open while it is read.
    return len(os.listdir("/proc/self/fd")) - 1


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def work(rank: int, order: dict[str, Any], port: int, barrier: Any, out: Connection) -> None:
    """Train as one worker; send what it has cost."""
    import torch

    import gossamer
    from gossamer.process.store.store_client import StoreClient

    environment = {"RANK": rank, "WORLD_SIZE": order["workers"], "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in environment.items()})
    torch.set_num_threads(1)
    num_requests, call = 0, StoreClient._call

    def counted(self: StoreClient, *args: Any) -> Any:
        nonlocal num_requests
        num_requests += 1
        return call(self, *args)

    StoreClient._call = counted  # type: ignore[method-assign]
    logging.getLogger("gossamer").setLevel(logging.CRITICAL)
    # What the server has loaded is not collected: every worker would copy it, page by page.
    gc.freeze()
    before = num_descriptors()
    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    barrier.wait(JOIN_TIMEOUT_S)
    began = time.monotonic()
    swarm = gossamer.join(model, optimizer, method=order["method"], topology=order["topology"], timeout=JOIN_TIMEOUT_S)
    joined_s = time.monotonic() - began
    threads, descriptors, settled, steps = [], [num_descriptors()], [], []
    cpu_s, started, requests_before = time.process_time(), time.monotonic(), num_requests
    while (now := time.monotonic()) - started < order["seconds"]:
        time.sleep(order["step_s"])
        model(torch.ones(2, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.append(time.monotonic() - now)
        threads.append(num_threads())
        (settled if now - started > SETTLED_AFTER_S else descriptors).append(num_descriptors())
    passed_s = time.monotonic() - started
    report = {
        "join s": joined_s,
        "threads": max(threads),
        "before": before,
        "descriptors": max(settled),
        "fewest descriptors": min(settled),
        "at first": max(descriptors),
        "requests/s": (num_requests - requests_before) / passed_s,
        "CPU": (time.process_time() - cpu_s) / passed_s,
        "longest step s": max(steps),
        "deaths": [str(event) for event in swarm.events if "died" in str(event)],
    }
    began = time.monotonic()
    swarm.finish()
    report["finish s"] = time.monotonic() - began
    out.send(report)


def train(workers: int, method: str, topology: str, seconds: float, step_s: float) -> list[dict[str, Any]]:
    """Return what each worker has cost, by rank."""
    order = {"workers": workers, "method": method, "topology": topology, "seconds": seconds, "step_s": step_s}
    barrier, port = FORKS.Barrier(workers), free_port()
    pipes = [FORKS.Pipe(duplex=False) for _ in range(workers)]
    processes = [
        FORKS.Process(target=work, args=(rank, order, port, barrier, pipes[rank][1])) for rank in range(workers)
    ]
    try:
        for process, (_, sending) in zip(processes, pipes, strict=True):
            process.start()
            sending.close()
        reports = [receiving.recv() for receiving, _ in pipes]
        for process in processes:
            process.join()
    finally:
        for process in processes:
            process.kill()
    return reports


def row(method: str, topology: str, reports: list[dict[str, Any]]) -> dict[str, Any]:
    def most(name: str) -> Any:
        return max(report[name] for report in reports[1:])

    return {
        "method": method,
        "topology": topology,
        "workers": len(reports),
        "join, s": max(report["join s"] for report in reports),
        "threads": most("threads"),
        "descriptors": most("descriptors"),
        "of rank 0": reports[0]["descriptors"],
        "at first": most("at first"),
        "store requests/s": most("requests/s"),
        "CPU": f"{statistics.mean(report['CPU'] for report in reports):.1%}",
        "longest step, s": most("longest step s"),
        "finish, s": max(report["finish s"] for report in reports),
        "deaths seen": sum(len(report["deaths"]) for report in reports),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[64])
    parser.add_argument("--methods", nargs="+", default=["a2cid2", "lasgd", "allreduce"])
    parser.add_argument("--topologies", nargs="+", default=["ring", "complete"])
    parser.add_argument("--seconds", type=float, default=20.0, help="how long they train")
    parser.add_argument("--step", type=float, default=1.0, help="seconds of a gradient")
    args = parser.parse_args()
    print(f"load before: {Path('/proc/loadavg').read_text().split()[0]}")
    rows = []
    for workers in args.workers:
        for method in args.methods:
            for topology in args.topologies:
                reports = train(workers, method, topology, args.seconds, args.step)
                rows.append(row(method, topology, reports))
    print(table(rows))


if __name__ == "__main__":
    main()
