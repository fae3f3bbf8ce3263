"""How long the handshake of ``gossamer.join`` takes, and its share of the whole join: a table for 2 to 16 workers.

Real processes on this machine, forked from a server that has torch loaded. They meet at a barrier before they join.
The handshake lasts from the arrival of the last worker until the last one goes on, plus what a worker needs to collect
its facts. The join is that of the slowest worker.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

from gossamer.process.store.rank_info import free_port

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["gossamer.process.runtime.swarm", "torch._dynamo"])


def join_once(rank: int, workers: int, port: int, layers: int, method: str, barrier: Any, out: Connection) -> None:
    """Join as one worker; send the seconds to collect the facts, the handshake's start and end, the seconds of join."""
    import torch
    from torch import nn

    import gossamer
    from gossamer.process.joining.handshake import Handshake
    from gossamer.process.runtime import worker_runtime

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(workers), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    times: dict[str, tuple[float, float]] = {}

    def timed(name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            began = time.monotonic()
            result = function(*args)
            times[name] = began, time.monotonic()
            return result

        return call

    worker_runtime.find_facts = timed("facts", worker_runtime.find_facts)
    Handshake.run = timed("run", Handshake.run)  # type: ignore[method-assign]
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)) for _ in range(layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    barrier.wait(300)
    began = time.monotonic()
    swarm = gossamer.join(model, optimizer, method=method)
    joined_s = time.monotonic() - began
    collected, (arrived, went_on) = times["facts"], times["run"]
    out.send((collected[1] - collected[0], arrived, went_on, joined_s))
    swarm.finish()


def measure(workers: int, layers: int, method: str) -> tuple[float, float]:
    """Return the seconds of the handshake and of the join, each of the slowest worker."""
    barrier, port = FORKS.Barrier(workers), free_port()
    pipes = [FORKS.Pipe(duplex=False) for _ in range(workers)]
    processes = [
        FORKS.Process(target=join_once, args=(rank, workers, port, layers, method, barrier, pipes[rank][1]))
        for rank in range(workers)
    ]
    for process in processes:
        process.start()
    times = [receiving.recv() for receiving, _ in pipes]
    for process in processes:
        process.join()
    facts_s, arrived, went_on, joined_s = (max(each) for each in zip(*times, strict=True))
    return facts_s + went_on - arrived, joined_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--layers", type=int, default=100, help="of the model; each has four parameters")
    parser.add_argument("--method", default="a2cid2")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    print("| workers | handshake, s | whole join, s | share |")
    print("|---|---|---|---|")
    for workers in args.workers:
        runs = [measure(workers, args.layers, args.method) for _ in range(args.repeats)]
        spent, joined = (statistics.median(each) for each in zip(*runs, strict=True))
        print(f"| {workers} | {spent:.3f} | {joined:.3f} | {spent / joined:.0%} |", flush=True)


if __name__ == "__main__":
    main()
