"""Speed and memory of the virtual cluster. Prints markdown tables; ``benchmarks/README.md`` has the results.

    python benchmarks/virtual.py                      # on the CPU, 64 workers
    python benchmarks/virtual.py --device cuda        # on a GPU, 256 workers, and ResNet-18

Speeds that are compared are measured alternately, in one process; every figure is the median of ``--repeats`` rounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from gossamer.config import Run, resolve
from gossamer.tasks import Task, cross_entropy
from gossamer.virtual.sim.cluster import Cluster
from tables import table

METHODS = ("allreduce", "lasgd", "gossip", "a2cid2")
CLOCKS = ("hardware", "ideal")


def resolved(**values: Any) -> Run:
    (run,) = resolve(values)
    return run


class TimedCluster:
    """A cluster whose speed is measured over some steps at a time."""

    def __init__(self, run: Run) -> None:
        self.batch, self.cluster = run.config.batch, Cluster(run)

    def steps(self, count: int) -> float:
        """Run until all workers together have made ``count`` more steps. Return seconds per step."""
        cluster, before = self.cluster, self.cluster.total_steps
        synchronize(cluster)
        began = time.perf_counter()
        while cluster.total_steps < before + count:
            cluster.advance()
        synchronize(cluster)
        return (time.perf_counter() - began) / (cluster.total_steps - before)

    def samples_per_s(self, count: int) -> float:
        return self.batch / self.steps(count)


def synchronize(cluster: Cluster) -> None:
    """Wait until everything on the tape has been executed."""
    cluster.tape.flush()
    if cluster.tape.device.type == "cuda":
        torch.cuda.synchronize()


def in_turns(repeats: int, *measure: Callable[[], float]) -> list[list[float]]:
    """Take each measurement ``repeats`` times, alternately, so that a busy moment of the machine affects all."""
    turns = [[one() for one in measure] for _ in range(repeats)]
    return [list(values) for values in zip(*turns, strict=True)]


def plain_training(task: Task, workers: int, batch: int, device: str) -> Callable[[int], float]:
    """Return a plain PyTorch loop over ``workers`` models with an optimizer each, without any simulation."""
    torch.manual_seed(0)
    inputs, targets = (part.to(device) for part in task.train)
    models = [task.model().to(device) for _ in range(workers)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in models]
    order = torch.randperm(len(inputs), device=device)

    def samples_per_s(count: int) -> float:
        began = time.perf_counter()
        for step in range(count):
            model, optimizer = models[step % workers], optimizers[step % workers]
            start = step * batch % (len(order) - batch)
            taken = order[start : start + batch]
            optimizer.zero_grad()
            task.loss(model(inputs[taken]), targets[taken]).backward()
            optimizer.step()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        return batch * count / (time.perf_counter() - began)

    return samples_per_s


def throughput(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Samples per second: workers batched, and the same workers one by one (digits MLP)."""
    rows = []
    for clock in CLOCKS:
        for method in METHODS:
            common = {"workers": args.workers, "method": method, "clock": clock, "device": args.device}
            runs = [resolved(gradient_backend=backend, seed=args.seed, **common) for backend in ("batched", "loop")]
            batched, loop = (TimedCluster(run) for run in runs)
            plain = plain_training(runs[0].task, args.workers, batched.batch, args.device)
            # Numbers of steps that take about equally long, so that a busy moment of the machine affects all alike.
            few, many = 2 * args.workers, (64 if args.device.startswith("cuda") else 16) * args.workers
            # On a GPU the first steps capture a graph for every batch size.
            batched.steps(many), loop.steps(few), plain(few)
            fast, slow, bare = in_turns(
                args.repeats,
                lambda batched=batched, many=many: batched.samples_per_s(many),
                lambda loop=loop, few=few: loop.samples_per_s(few),
                lambda plain=plain, few=few: plain(few),
            )
            rows.append(
                {
                    "clock": clock,
                    "method": method,
                    "batched samples/s": statistics.median(fast),
                    "loop samples/s": statistics.median(slow),
                    "batched / loop": median_ratio(fast, slow),
                    "plain PyTorch samples/s": statistics.median(bare),
                    "batched / plain": median_ratio(fast, bare),
                }
            )
    return rows


def median_ratio(above: list[float], below: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def resnet(args: argparse.Namespace) -> list[dict[str, Any]]:
    """ResNet-18 at batch 128 on random images: a captured graph, and the same eagerly."""
    if not args.device.startswith("cuda"):
        return []
    rng = np.random.default_rng(args.seed)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "images.npz"
        parts = {"train": 4096, "test": 128}
        images = {f"x_{part}": rng.integers(0, 256, (n, 32, 32, 3), np.uint8) for part, n in parts.items()}
        labels = {f"y_{part}": rng.integers(0, 10, n) for part, n in parts.items()}
        np.savez(data, **images, **labels)
        for precision, method in itertools.product(("float32", "bfloat16"), ("allreduce", "a2cid2")):
            common = {"task": "cifar10", "model": "resnet18", "data": str(data), "batch": 128, "device": args.device}
            common["precision"] = precision
            graph, loop = (
                TimedCluster(resolved(gradient_backend=backend, workers=4, method=method, seed=args.seed, **common))
                for backend in ("graph", "loop")
            )
            graph.steps(8), loop.steps(8)
            fast, slow = in_turns(
                args.repeats, lambda graph=graph: graph.samples_per_s(120), lambda loop=loop: loop.samples_per_s(40)
            )
            rows.append(
                {
                    "precision": precision,
                    "method": method,
                    "graph samples/s": statistics.median(fast),
                    "eager samples/s": statistics.median(slow),
                    "graph ms/gradient": 128e3 / statistics.median(fast),
                    "eager ms/gradient": 128e3 / statistics.median(slow),
                    "graph / eager": median_ratio(fast, slow),
                }
            )
    return rows


def large_task(seed: int) -> Task:
    """10.5 million parameters in layers of a million, with few samples, so that vectors take nearly all the memory."""
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = torch.randn(512, 1024, generator=generator), torch.randint(10, (512,), generator=generator)
    return Task(
        name="large",
        model=lambda: nn.Sequential(*(m for _ in range(10) for m in (nn.Linear(1024, 1024), nn.ReLU()))),
        train=(inputs, targets),
        test=(inputs, targets),
        loss=cross_entropy,
    )


def memory(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Peak memory against the vectors that the workers, their optimizers and the method have (10.5 M parameters)."""
    rows = []
    for method in ("allreduce", "gossip", "a2cid2"):
        for backend in ("loop", "graph", "batched") if args.device.startswith("cuda") else ("loop", "batched"):
            command = [sys.executable, __file__, "--one-memory", method, backend, "--device", args.device]
            command += ["--seed", str(args.seed), "--threads", str(args.threads)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            rows.append(json.loads(done.stdout.splitlines()[-1]))
    return rows


def one_memory(method: str, backend: str, device: str, seed: int, workers: int = 16) -> dict[str, Any]:
    """Measure in a process of its own, because a peak never goes down."""
    task = large_task(seed)
    # Over links so fast that vectors of this length arrive between two steps.
    run = resolved(
        workers=workers, method=method, gradient_backend=backend, device=device, seed=seed, batch=8, link="100gbit"
    )
    run = dataclasses.replace(run, task=task)
    # Load torch's kernels first: their memory is not the simulation's.
    nn.Linear(8, 8, device=device)(torch.ones(8, 8, device=device)).sum().backward()
    workspaces_bytes(device)
    before = peak_bytes(device)
    timed = TimedCluster(run)
    timed.steps(4 * workers)
    peak, workspaces = peak_bytes(device) - before, workspaces_bytes(device)
    peak -= workspaces
    vector = timed.cluster.replicas.parameters.data[0].nbytes
    # Parameters, gradients and momentum; A²CiD²'s z; snapshots in flight, the mean of an all-reduce.
    vectors = {"allreduce": 3 * workers + 1, "gossip": 4 * workers, "a2cid2": 5 * workers}[method]
    batch = min(workers, timed.cluster.evaluator.max_workers)
    accounted = (vectors + batch) * vector
    return {
        "method": method,
        "gradients": backend,
        "workers": workers,
        "vectors MB": vectors * vector / 1e6,
        "one batch of gradients MB": batch * vector / 1e6,
        "peak MB": peak / 1e6,
        "cuBLAS MB": workspaces / 1e6,
        "peak / (vectors + batch)": peak / accounted,
    }


def peak_bytes(device: str) -> int:
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def workspaces_bytes(device: str) -> int:
    """Free cuBLAS's workspaces, one for each stream and thread, and reset the peak. Return how large they were.

    Captured graphs must not be replayed afterwards.
    """
    if not device.startswith("cuda"):
        return 0
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    freed = before - torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return freed


def parameters(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Time per event over the length of the parameter vector (quadratic, 8 workers, gossip)."""
    rows = []
    for dim in (1_000, 10_000, 100_000, 1_000_000, 10_000_000):
        run = resolved(task="quadratic", dim=dim, workers=8, method="gossip", device=args.device, seed=args.seed)
        count = max(24, min(2_000, 40_000_000 // dim))
        rows.append({"parameters": dim, **per_event(TimedCluster(run), count, args.repeats)})
        rows[-1]["ns per parameter"] = rows[-1]["µs per event"] * 1e3 / dim
    return rows


def workers(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Time per event over the number of workers (quadratic with 16 parameters, ring)."""
    rows = []
    for count in (16, 64, 256, 1024, 4096):
        row: dict[str, Any] = {"workers": count}
        for clock in CLOCKS:
            for method in ("gossip", "a2cid2"):
                common = {"task": "quadratic", "dim": 16, "workers": count, "device": args.device, "seed": args.seed}
                timed = TimedCluster(resolved(clock=clock, method=method, **common))
                figures = per_event(timed, max(2_000, 4 * count), args.repeats)
                row[f"{clock} {method}: µs per event"] = figures["µs per event"]
        rows.append(row)
    return rows


def per_event(timed: TimedCluster, count: int, repeats: int) -> dict[str, float]:
    """Return µs per event. Gradients and exchanges of two workers are events."""
    cluster = timed.cluster
    timed.steps(count)
    times = []
    for _ in range(repeats):
        steps, exchanges = cluster.total_steps, cluster.exchanges.count
        seconds_per_step = timed.steps(count)
        steps, exchanges = cluster.total_steps - steps, cluster.exchanges.count - exchanges
        times.append(seconds_per_step * steps / (steps + exchanges) * 1e6)
    return {"µs per event": statistics.median(times)}


def machine(args: argparse.Namespace) -> dict[str, Any]:
    cuda = args.device.startswith("cuda")
    return {
        "device": torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "seed": args.seed,
        "workers": args.workers,
        "tf32 in convolutions": torch.backends.cudnn.allow_tf32,
        "tf32 in matrix products": torch.backends.cuda.matmul.allow_tf32,
    }


SECTIONS: dict[str, Callable[[argparse.Namespace], list[dict[str, Any]]]] = {
    "throughput": throughput,
    "resnet": resnet,
    "memory": memory,
    "parameters": parameters,
    "workers": workers,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=0, help="for throughput; 64, or 256 on a GPU")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0, help="of torch on the CPU (default: all cores)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default=",".join(SECTIONS), help="some of " + ", ".join(SECTIONS))
    parser.add_argument("--json", metavar="FILE", help="also write the results to this file")
    parser.add_argument("--one-memory", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    args.workers = args.workers or (256 if args.device.startswith("cuda") else 64)
    if args.one_memory:
        print(json.dumps(one_memory(*args.one_memory, args.device, args.seed)))
        return
    results: dict[str, Any] = {"machine": machine(args)}
    print(", ".join(f"{name} {value}" for name, value in results["machine"].items()), flush=True)
    for section in args.only.split(","):
        measure = SECTIONS[section]
        if rows := measure(args):
            results[section] = rows
            print(f"\n{(measure.__doc__ or '').strip()}\n\n{table(rows)}", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
