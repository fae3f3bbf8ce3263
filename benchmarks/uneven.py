"""Accuracy before and after ``finish()`` when workers have different numbers of batches.

Digits, a network with batch norm, AdamW with a cosine schedule and clipping, on real workers. *Before* is the accuracy
of the worker with the most batches on its own (of two, that of the one that ends last); *after* is that of the averaged
model.

    python benchmarks/uneven.py
    python benchmarks/uneven.py --methods allreduce,gossip --seeds 1
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from importlib import resources
from multiprocessing.connection import Connection
from statistics import mean

import numpy as np
import torch
from torch import nn

import gossamer
from gossamer.methods import METHODS
from gossamer.process.store.rank_info import free_port

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["gossamer.process.runtime.swarm", "torch._dynamo"])

CASES = (((69, 10), (0, 0)), ((0, 1, 37, 100), (0, 0, 0, 0)), ((69, 69), (0, 0)), ((69, 69), (0, 10)))
"""The workers' numbers of batches, and the milliseconds that each pauses in a step."""

BATCH, LR, TIMEOUT_S = 20, 4e-3, 300.0


def network() -> nn.Module:
    """Three convolutions with batch norm, on pixels whose statistics are far from batch norm's initial ones."""
    layers: list[nn.Module] = []
    for width, wider, stride in ((1, 16, 1), (16, 32, 2), (32, 32, 1)):
        layers += [nn.Conv2d(width, wider, 3, padding=1, stride=stride, bias=False), nn.BatchNorm2d(wider), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 4 * 4, 10))


def load(part: str) -> tuple[torch.Tensor, torch.Tensor]:
    with (resources.files("gossamer.tasks") / "data" / "digits.npz").open("rb") as file, np.load(file) as arrays:
        images, labels = arrays[f"x_{part}"][:, None].astype(np.float32) / 16, arrays[f"y_{part}"].astype(np.int64)
    return torch.from_numpy(images), torch.from_numpy(labels)


def train(
    rank: int,
    environment: dict[str, str],
    method: str,
    batches: tuple[int, ...],
    pauses_ms: tuple[int, ...],
    seed: int,
    out: Connection,
) -> None:
    os.environ.update(environment, RANK=str(rank))
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = network()
    train_set, test_set = load("train"), load("test")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=max(batches))
    swarm = gossamer.join(model, optimizer, method=method, seed=seed)
    images, labels = (part[rank :: len(batches)] for part in train_set)
    generator = torch.Generator().manual_seed(seed * 100 + rank)
    for _ in range(batches[rank]):
        chosen = torch.randperm(len(images), generator=generator)[:BATCH]
        nn.functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        time.sleep(pauses_ms[rank] / 1000)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    before = accuracy(model, test_set)
    exchanges = swarm.metrics().exchanges
    swarm.finish()
    state = torch.cat([tensor.flatten().double() for tensor in model.state_dict().values()])
    events = [f"{event.kind}: {event}" for event in swarm.events]
    out.send(
        {
            "before": before,
            "after": accuracy(model, test_set),
            "exchanges": exchanges,
            "events": events,
            "state": state.tolist(),
        }
    )


def accuracy(model: nn.Module, test: tuple[torch.Tensor, torch.Tensor]) -> float:
    model.eval()
    with torch.no_grad():
        right = model(test[0]).argmax(1) == test[1]
    model.train()
    return 100 * float(right.float().mean())


def run(method: str, batches: tuple[int, ...], pauses_ms: tuple[int, ...], seed: int) -> list[dict[str, object]]:
    """Train once; return what the workers say in the end."""
    environment = {
        "WORLD_SIZE": str(len(batches)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    workers = []
    for rank in range(len(batches)):
        incoming, outgoing = FORKS.Pipe(duplex=False)
        process = FORKS.Process(target=train, args=(rank, environment, method, batches, pauses_ms, seed, outgoing))
        process.start()
        outgoing.close()
        workers.append((process, incoming))
    ends = []
    for process, incoming in workers:
        assert incoming.poll(TIMEOUT_S), f"{method} {batches}: no result in {TIMEOUT_S} s"
        ends.append(incoming.recv())
        process.join()
    assert all(end["state"] == ends[0]["state"] for end in ends), f"{method} {batches}: the workers' models differ"
    return ends


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--events", action="store_true", help="print the events of every worker")
    parsed = parser.parse_args()
    print("| method | batches | before | after | largest loss of a seed |\n|---|---|---|---|---|", flush=True)
    for method in parsed.methods.split(","):
        for batches, pauses_ms in CASES:
            # Of those with the most batches, the slowest: it ends last.
            most = max(range(len(batches)), key=lambda rank: (batches[rank], pauses_ms[rank]))
            pairs = []
            for seed in range(parsed.seeds):
                ends = run(method, batches, pauses_ms, seed)
                pairs.append((ends[most]["before"], ends[most]["after"]))
                if parsed.events:
                    print(json.dumps([(end["exchanges"], end["events"]) for end in ends]))
            before, after = (mean(column) for column in zip(*pairs, strict=True))
            worst = max(one - other for one, other in pairs)
            case = ", ".join(map(str, batches)) + ("; the last one is slow" if any(pauses_ms) else "")
            print(f"| {method} | {case} | {before:.1f} | {after:.1f} | {worst:.1f} |", flush=True)


if __name__ == "__main__":
    main()
