"""Measures what ``out=`` and ``trace=`` cost a loop of one's own. Prints a markdown table.

    python benchmarks/loop_output.py

Two workers train with a fixed amount of arithmetic per step, about 20 ms. They join again and again, in turns without a
run folder, with one, and with one and a trace, so that a noisy machine disturbs all three alike. Worker 0 also monitors
the run. The ratio is the median, over the turns, of a turn's median step against that of the turn without a folder
before it. CPU times are those of the training thread per step, and of all other threads per second: what the latter
gain is what a worker can lose that has one core for everything.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from operator import truediv
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gossamer
from gossamer.process.store.rank_info import free_port
from tables import table

MODES: dict[str, dict[str, Any]] = {"nothing": {}, "out": {"trace": False}, "out, trace": {"trace": True}}
COMPUTE_S = 0.020
SIDE = 256
WARM_UP = 5
"""Steps at the start of each turn that are not counted: connections are made in them."""


def num_products() -> int:
    """Return how many products of matrices take ``COMPUTE_S``."""
    matrix = torch.randn(SIDE, SIDE)
    times = []
    for _ in range(200):
        began = time.perf_counter()
        matrix @ matrix
        times.append(time.perf_counter() - began)
    return max(1, round(COMPUTE_S / statistics.median(times)))


def work(rank: int, port: int, repeats: int, steps: int, products: int, folder: str) -> None:
    """One worker: all turns, written as a file at the end."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    matrix = torch.randn(SIDE, SIDE)
    step_s: dict[str, list[float]] = {mode: [] for mode in MODES}
    own_s: dict[str, list[float]] = {mode: [] for mode in MODES}
    others_s: dict[str, list[float]] = {mode: [] for mode in MODES}
    for repeat in range(repeats):
        for mode, arguments in MODES.items():
            model = nn.Linear(256, 256)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            out = {"out": Path(folder) / f"{mode}-{repeat}"} if arguments else {}
            swarm = gossamer.join(model, optimizer, method="gossip", **out, **arguments)
            turn_s = []
            for step in range(steps + WARM_UP):
                if step == WARM_UP:
                    started = time.perf_counter()
                    cpu, own = time.process_time(), time.thread_time()
                began = time.perf_counter()
                for _ in range(products):
                    matrix @ matrix
                loss = model(matrix).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                swarm.log(loss=loss)
                if step >= WARM_UP:
                    turn_s.append(time.perf_counter() - began)
            step_s[mode].append(statistics.median(turn_s))
            own, cpu = time.thread_time() - own, time.process_time() - cpu
            own_s[mode].append(own / steps)
            others_s[mode].append((cpu - own) / (time.perf_counter() - started))
            swarm.finish()
    (Path(folder) / f"{rank}.json").write_text(json.dumps({"step_s": step_s, "own_s": own_s, "others_s": others_s}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--steps", type=int, default=100, help="steps of one turn")
    parsed = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {platform.processor() or platform.machine()}, {os.cpu_count()} cores\n")
    context = multiprocessing.get_context("spawn")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        port, products = free_port(), num_products()
        arguments = (port, parsed.repeats, parsed.steps, products, folder)
        workers = [context.Process(target=work, args=(rank, *arguments)) for rank in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        for rank in range(2):
            measured = json.loads((Path(folder) / f"{rank}.json").read_text())
            turns = measured["step_s"]
            step_s, own_s, others_s = (
                {mode: statistics.median(times) for mode, times in measured[what].items()}
                for what in ("step_s", "own_s", "others_s")
            )
            for mode in MODES:
                rows.append(
                    {
                        "worker": str(rank),
                        "written": mode,
                        "step": f"{1e3 * step_s[mode]:.2f} ms",
                        "ratio": f"{statistics.median(map(truediv, turns[mode], turns['nothing'])):.3f}",
                        "training thread, CPU per step": f"{1e3 * own_s[mode]:.2f} ms",
                        "other threads, CPU per second": f"{1e3 * others_s[mode]:.1f} ms",
                        "they gain": f"{100 * (others_s[mode] - others_s['nothing']):.1f}%",
                    }
                )
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
