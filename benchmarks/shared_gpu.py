"""Workers that share one GPU, through host memory: every method on a ResNet-18, and what waits for what.

For each method, worker 0 is profiled for a few steps in the middle of the training::

    step     a step's time, and over that of workers that do not communicate
    waits    what the training's threads spend per step in calls that wait for the GPU or for a copy
    copies   how much of the copying between GPU and host runs on the training stream
    gap      the longest time that the training stream was idle between two kernels; where several processes share a
             GPU that includes the others' turns

``python benchmarks/shared_gpu.py [--method a2cid2,lasgd] [--workers 4] [--json] [--traces DIR]``, with CUDA.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.profiler import ProfilerActivity, profile

import gossamer
from gossamer.methods import METHODS
from gossamer.optim import AccumAdam
from gossamer.process.store.rank_info import free_port
from gossamer.tasks.cifar10 import ResNet18

BATCH = 64
WARM, PROFILED, TIMED = 10, 5, 30
BLOCKING = ("cudaStreamSynchronize", "cudaEventSynchronize")
ALONE = "alone"


def train(rank: int, workers: int, port: int, method: str, out: str, together: Any) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(workers), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(2)
    torch.manual_seed(0)
    model = ResNet18().cuda()
    optimizer: torch.optim.Optimizer
    if method in ("overlap", "divisible"):
        kind = AccumAdam if method == "overlap" else torch.optim.Adam
        optimizer = kind(model.parameters(), lr=1e-3)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    swarm = None if method == ALONE else gossamer.join(model, optimizer, method=method, topology="ring")
    generator = torch.Generator("cuda").manual_seed(rank)
    inputs = torch.randn(BATCH, 3, 32, 32, device="cuda", generator=generator)
    labels = torch.randint(0, 10, (BATCH,), device="cuda", generator=generator)

    def steps(count: int) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / count

    steps(WARM)
    # They share the GPU, so all have to be at work while one is timed.
    together.wait()
    step_s = steps(TIMED)
    report: dict[str, Any] = {"step_s": step_s}
    if rank == 0:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            for _ in range(PROFILED):
                nn.functional.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
        torch.cuda.synchronize()
        profiler.export_chrome_trace(f"{out}/{method}.json")
        report |= looked_at(Path(f"{out}/{method}.json"))
    else:
        steps(PROFILED)
    if swarm is not None:
        report["exchanges"] = swarm.metrics().exchanges
        swarm.finish()
        report["loss"] = nn.functional.cross_entropy(model(inputs), labels).item()
    if rank == 0:
        Path(out, "report.json").write_text(json.dumps(report))


def looked_at(trace: Path) -> dict[str, Any]:
    """What the trace says about the training stream and the training thread."""
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e.get("ph") == "X"]
    kernels = [e for e in events if e.get("cat") == "kernel"]
    streams = [e["args"]["stream"] for e in kernels]
    training = max(set(streams), key=streams.count)
    on_training = sorted((e for e in kernels if e["args"]["stream"] == training), key=lambda e: e["ts"])
    gaps = [b["ts"] - (a["ts"] + a["dur"]) for a, b in itertools.pairwise(on_training)]
    copies = [e for e in events if e.get("cat") == "gpu_memcpy" and ("DtoH" in e["name"] or "HtoD" in e["name"])]
    on = sum(e["args"].get("bytes", 0) for e in copies if e["args"]["stream"] == training)
    calls = [e for e in events if e.get("cat") == "cuda_runtime"]
    launching = [e["tid"] for e in calls if "Launch" in e["name"]]
    # Forward and backward have a thread each; those that communicate launch a few kernels at most.
    threads = {thread for thread in set(launching) if launching.count(thread) > len(launching) / 10}
    waits = [e for e in calls if e["name"] in BLOCKING and e["tid"] in threads]
    total = sum(e["args"].get("bytes", 0) for e in copies)
    return {
        "host_waits_ms": sum(e["dur"] for e in waits) / 1e3 / PROFILED,
        "copied_on_training_stream": on / total if total else 0.0,
        "copied_bytes": total,
        "longest_gap_ms": max(gaps) / 1e3,
    }


def measure(method: str, workers: int, traces: Path | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        out = str(traces or temporary)
        Path(out).mkdir(parents=True, exist_ok=True)
        port = free_port()
        together = mp.get_context("spawn").Barrier(workers)
        mp.start_processes(train, (workers, port, method, out, together), workers, start_method="spawn")
        return dict(json.loads(Path(out, "report.json").read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default=",".join(METHODS))
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--traces", type=Path, help="keep worker 0's profiler traces in this folder")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/shared_gpu.py needs a GPU with CUDA, and there is none here")
    results: dict[str, Any] = {}
    if not arguments.json:
        gpu = torch.cuda.get_device_name()
        print(f"{gpu}, torch {torch.__version__}, ResNet-18, batch {BATCH}, {arguments.workers} workers")
        print(f"{'method':10} {'step':>9} {'ratio':>6} {'waits':>10} {'copies':>7} {'gap':>8} {'exchanges':>9}")
    for method in [ALONE, *arguments.method.split(",")]:
        results[method] = r = measure(method, arguments.workers, arguments.traces)
        if not arguments.json:
            print(
                f"{method:10} {r['step_s'] * 1e3:6.1f} ms {r['step_s'] / results[ALONE]['step_s']:5.2f}x "
                f"{r['host_waits_ms']:7.2f} ms {r['copied_on_training_stream']:6.0%} {r['longest_gap_ms']:5.2f} ms "
                f"{r.get('exchanges', 0):9}",
                flush=True,
            )
    if arguments.json:
        print(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "results": results}))


if __name__ == "__main__":
    main()
