"""Replicas of two ranks on two hosts: methods between them beside HSDP and DDP, with the same model, in one run.

    python benchmarks/replicas.py                          # links of 100 Mbit/s between the hosts (needs root)
    python benchmarks/replicas.py --rate-mbit 0            # no limit: what joining costs

A host is a network namespace. Each has one replica of two ranks (gloo, CPU), with FSDP2 inside. Every step is a small
forward and backward pass of the real model, with its all-gathers and reduce-scatters, and a wait of 100 ms in place of
the computing. ``alone`` is that loop with nothing joined; ``HSDP`` is FSDP2 over a mesh with a dimension of replicas;
``DDP`` averages over all four ranks. All run in the same processes, one after the other, ``--rounds`` times in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import gossamer
from gossamer.process.store.rank_info import free_port
from hosts import Hosts

REPLICAS, SHARDS = 2, 2
WARM_UP = 3
JOINED: dict[str, dict[str, Any]] = {
    "a2cid2": {"rate": 0.25},
    "noloco": {"period": 8},
    "lasgd": {},
    "diloco": {"period": 20, "delay": 10},
}
BESIDE = ("alone", "HSDP", "DDP")
RATIOS = (("alone", 9), ("HSDP", 8))


def build(width: int, layers: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


@contextmanager
def training(contender: str, mesh: DeviceMesh, width: int, layers: int) -> Iterator[tuple[Callable[[], None], Any]]:
    """Yield a function that makes a step, and the swarm if there is one."""
    model: nn.Module = build(width, layers)
    if contender == "DDP":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        over = mesh if contender == "HSDP" else mesh["shard"]
        for layer in model.children():
            fully_shard(layer, mesh=over)
        fully_shard(model, mesh=over)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    swarm = None
    if contender in JOINED:
        settings = JOINED[contender]
        swarm = gossamer.join(model, optimizer, mesh=mesh, between="replica", method=contender, **settings)
    inputs = torch.randn(1, width)

    def step(wait_s: float) -> None:
        loss = model(inputs).square().mean()
        time.sleep(wait_s)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    yield step, swarm
    if swarm is not None:
        swarm.finish()


def measure(contender: str, mesh: DeviceMesh, args: argparse.Namespace) -> dict[str, float]:
    """Return seconds and CPU seconds per step, the mean of all ranks, and the exchanges per step of this rank."""
    with training(contender, mesh, args.width, args.layers) as (step, swarm):
        for _ in range(WARM_UP):
            step(args.wait_s)
        dist.barrier()
        before = swarm.metrics().exchanges if swarm else 0
        began, cpu_began = time.monotonic(), time.process_time()
        for _ in range(args.steps):
            step(args.wait_s)
        took = torch.tensor([time.monotonic() - began, time.process_time() - cpu_began]) / args.steps
        exchanges = (swarm.metrics().exchanges - before if swarm else 0) / args.steps
    dist.all_reduce(took)
    seconds, cpu_s = (took / dist.get_world_size()).tolist()
    return {"seconds": seconds, "cpu_s": cpu_s, "exchanges": exchanges}


def work(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (REPLICAS, SHARDS), mesh_dim_names=("replica", "shard"))
    for _ in range(args.rounds):
        for contender in args.contenders.split(","):
            found = measure(contender, mesh, args)
            if dist.get_rank() == 0:
                print(json.dumps({"contender": contender, **found, "load": os.getloadavg()[0]}), flush=True)
    dist.destroy_process_group()


def run(args: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Run all ranks; return what was found of each contender, round by round."""
    found: dict[str, list[dict[str, float]]] = {}
    with Hosts(REPLICAS, args.rate_mbit or None) as hosts:
        shared = {"WORLD_SIZE": str(REPLICAS * SHARDS), "MASTER_ADDR": hosts.address(0)}
        shared |= {"MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1", "GOSSAMER_SECRET": secrets.token_hex(16)}
        ranks = [
            hosts.start(
                rank // SHARDS,
                [sys.executable, __file__, *sys.argv[1:], "--worker"],
                {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank % SHARDS)},
                subprocess.PIPE if rank == 0 else None,
            )
            for rank in range(REPLICAS * SHARDS)
        ]
        try:
            assert ranks[0].stdout is not None
            for line in ranks[0].stdout:
                if line.startswith("{"):
                    sys.stderr.write(line)
                    each = json.loads(line)
                    found.setdefault(each.pop("contender"), []).append(each)
                else:
                    sys.stderr.write(line)
            if any(rank.wait(120) for rank in ranks):
                sys.exit("a rank failed")
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate-mbit", type=float, default=100.0, help="of each host's link; 0: no limit (100)")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=30, help="per contender and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--wait-s", type=float, default=0.1, help="in place of computing (0.1)")
    parser.add_argument("--contenders", default=",".join((*BESIDE, *JOINED)))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args)
        return
    # The ranks and the hosts go with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    found = run(args)
    size = sum(parameter.numel() for parameter in build(args.width, args.layers).parameters())
    limit = f"{args.rate_mbit:g} Mbit/s" if args.rate_mbit else "no limit"
    print(
        f"{size / 1e6:.1f} million parameters, {REPLICAS} replicas of {SHARDS} ranks, {limit}, {args.rounds} rounds of"
    )
    print(f"{args.steps} steps; medians of the rounds")
    print(
        f"{'':10} {'steps/s':>8} {'to alone':>9} {'to HSDP':>8} {'CPU ms/step':>12} {'exchanges/step':>15} {'load':>6}"
    )
    for contender, rounds in found.items():
        rate = statistics.median(1 / each["seconds"] for each in rounds)
        cpu_s, exchanges, load = (
            statistics.median(each[key] for each in rounds) for key in ("cpu_s", "exchanges", "load")
        )
        ratios = " ".join(f"{_ratio(found.get(other, []), rounds):>{width}}" for other, width in RATIOS)
        print(f"{contender:10} {rate:8.2f} {ratios} {1e3 * cpu_s:12.0f} {exchanges:15.2f} {load:6.1f}")


def _ratio(other: list[dict[str, float]], own: list[dict[str, float]]) -> str:
    """Return how many times as many steps ``own`` makes: the median of the rounds, in which both ran side by side."""
    ratios = [theirs["seconds"] / ours["seconds"] for theirs, ours in zip(other, own, strict=False)]
    return f"{statistics.median(ratios):.2f}" if ratios else ""


if __name__ == "__main__":
    main()
