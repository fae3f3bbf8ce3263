"""Measures what ``out=`` and ``trace=`` cost a loop of one's own. Prints a markdown table.

    python benchmarks/loop_output.py

Two workers train with a fixed amount of arithmetic per step, about 20 ms. They join again and again, in turns without a
run folder, with one, and with one and a trace, so that a noisy machine disturbs all three alike. Worker 0 also monitors
the run. Step times are medians over all steps. CPU time is that of the whole process, with all its threads.
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
    cpu_s: dict[str, list[float]] = {mode: [] for mode in MODES}
    for repeat in range(repeats):
        for mode, arguments in MODES.items():
            model = nn.Linear(256, 256)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            out = {"out": Path(folder) / f"{mode}-{repeat}"} if arguments else {}
            swarm = gossamer.join(model, optimizer, method="gossip", **out, **arguments)
            for step in range(steps + WARM_UP):
                if step == WARM_UP:
                    cpu = time.process_time()
                began = time.perf_counter()
                for _ in range(products):
                    matrix @ matrix
                loss = model(matrix).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                swarm.log(loss=loss)
                if step >= WARM_UP:
                    step_s[mode].append(time.perf_counter() - began)
            cpu_s[mode].append((time.process_time() - cpu) / steps)
            swarm.finish()
    (Path(folder) / f"{rank}.json").write_text(json.dumps({"step_s": step_s, "cpu_s": cpu_s}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--steps", type=int, default=250, help="steps of one turn")
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
            step_s = {mode: statistics.median(times) for mode, times in measured["step_s"].items()}
            cpu_s = {mode: statistics.median(times) for mode, times in measured["cpu_s"].items()}
            for mode in MODES:
                rows.append(
                    {
                        "worker": str(rank),
                        "written": mode,
                        "step": f"{1e3 * step_s[mode]:.2f} ms",
                        "ratio": f"{step_s[mode] / step_s['nothing']:.3f}",
                        "CPU per step": f"{1e3 * cpu_s[mode]:.2f} ms",
                        "CPU ratio": f"{cpu_s[mode] / cpu_s['nothing']:.3f}",
                    }
                )
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
