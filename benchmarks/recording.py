"""Measures the cost of recording, and the size and speed of the report of a long run. Prints markdown tables.

    python benchmarks/recording.py

A run without a recorder, with one, and with one that writes a trace are measured in turns, in one process, by the CPU
time of the training thread, which excludes other processes. The report is opened in Chromium, if it is installed.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gossamer.config import resolve
from gossamer.recording import Recorder
from gossamer.recording.trace import TraceFile
from gossamer.report.document import report_document
from gossamer.report.page import page
from gossamer.report.runs import read_run
from gossamer.results import Point, Spread
from gossamer.runs.run_folder import RECORDING, RunFolder
from gossamer.virtual.sim.cluster import Cluster
from tables import table

RUNS = {
    "digits MLP, gossip": {"task": "digits", "method": "gossip", "workers": 16},
    "digits MLP, allreduce": {"task": "digits", "method": "allreduce", "workers": 16},
    "digits conv, a2cid2": {"task": "digits", "model": "conv", "method": "a2cid2", "workers": 16},
    "quadratic, a2cid2": {"task": "quadratic", "method": "a2cid2", "workers": 64},
}
STEPS_PER_TURN = 1_600
"""Steps of all workers together."""

MODES = ("nothing", "recording", "trace")


class Contender:
    """A virtual cluster whose speed is measured turn by turn."""

    def __init__(self, values: dict[str, Any], mode: str, folder: Path) -> None:
        (run,) = resolve(values)
        self.recorder: Recorder | None = None
        if mode != "nothing":
            ranks = range(run.config.workers)
            trace = TraceFile(folder / "trace.json", ranks, began_ns=0, title="") if mode == "trace" else None
            self.recorder = Recorder(ranks, trace)
        self.cluster = Cluster(run, self.recorder)

    def seconds_per_step(self) -> float:
        cluster, before = self.cluster, self.cluster.total_steps
        began = time.thread_time()
        while cluster.total_steps < before + STEPS_PER_TURN:
            cluster.advance()
        cluster.replicas.take_losses()
        if self.recorder is not None:
            self.recorder.document()
        return (time.thread_time() - began) / (cluster.total_steps - before)


def cost(repeats: int) -> str:
    rows = []
    for name, values in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            contenders = {mode: Contender(values, mode, Path(folder)) for mode in MODES}
            seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
            for contender in contenders.values():
                contender.seconds_per_step()
            for _ in range(repeats):
                for mode, contender in contenders.items():
                    seconds[mode].append(contender.seconds_per_step())
        # The fastest turn of each: disturbances make a turn longer, never shorter.
        plain, *others = (min(seconds[mode]) for mode in MODES)
        rows.append([name, f"{1e6 * plain:.1f}", *(f"{1e6 * other:.1f}" for other in others)])
        rows[-1] += [f"{100 * (other / plain - 1):+.1f}%" for other in others]
    columns = ["run", "µs per step", "with recording", "with a trace", "recording costs", "a trace costs"]
    return table([dict(zip(columns, row, strict=True)) for row in rows])


def calls(repeats: int) -> str:
    """Measure what one step of a gossip worker costs the recorder alone, aggregation included."""
    seconds = []
    for _ in range(repeats):
        recorder = Recorder(range(64))
        began = time.thread_time()
        feed(recorder, 64, 2_000)
        recorder.document()
        seconds.append((time.thread_time() - began) / (64 * 2_000))
    empty = time.thread_time()
    feed(None, 64, 2_000)
    loop = (time.thread_time() - empty) / (64 * 2_000)
    return (
        f"{1e6 * (statistics.median(seconds) - loop):.2f} µs per step of a worker that waits, exchanges and merges once"
    )


def feed(recorder: Recorder | None, workers: int, steps: int) -> None:
    """Record steps of workers that wait, exchange with a neighbour and merge."""
    times = np.random.default_rng(0).uniform(0.03, 0.05, steps).tolist()
    for step, compute_s in enumerate(times):
        start = 0.05 * step
        for rank in range(workers):
            if recorder is None:
                continue
            recorder.stepped(rank, start, start + compute_s, start + 0.05)
            recorder.waited(rank, start + compute_s, start + 0.05)
            recorder.exchanged((rank, (rank + 1) % workers), start, start + 0.02, 40_000)
            recorder.merged(rank, start, start, step % 5)


def large(events: int) -> str:
    """Measure the report of 64 workers with ``events`` events each."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        steps = events // 4
        (run,) = resolve({"task": "quadratic", "method": "gossip", "workers": 64, "steps": steps})
        run_folder = RunFolder(folder, run.values(), "gossamer simulate …")
        spread = Spread(mean=0.9, min=0.8, max=1.0)
        for step in range(steps):
            noise = 0.1 * np.sin(step) + 1000 / (step + 100)
            counts = {"steps": step, "total_steps": 64 * step, "samples": 2048 * step, "exchanges": 32 * step}
            point = Point(
                time=0.05 * step, **counts, worker_steps=spread, loss=noise, train_loss=noise, accuracy=0.9,
                worker_accuracy=spread, consensus=noise, bytes_sent=10**6 * step, utilization=1.0, workers_alive=64,
                wall_s=0.0,
            )  # fmt: skip
            run_folder.metric(point)
        recorder = Recorder(range(64))
        feed(recorder, 64, steps)
        (folder / RECORDING).write_text(json.dumps(recorder.document()))
        began = time.perf_counter()
        path = Path(name) / "report.html"
        path.write_text(page(report_document([read_run(folder)])), encoding="utf-8")
        write_s = time.perf_counter() - began
        opened = f"{open_in_browser(path):.2f} s" if shutil.which("chromium") else "Chromium is not installed"
        size = path.stat().st_size / 1e6
    columns = ["workers", "events each", "page", "to write it", "to open it"]
    row = ["64", f"{events:,}", f"{size:.2f} MB", f"{write_s:.1f} s", opened]
    return table([dict(zip(columns, row, strict=True))])


def open_in_browser(path: Path) -> float:
    """Return the seconds until all pictures are drawn; the median of five."""
    from playwright.sync_api import sync_playwright

    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with sync_playwright() as running:
        browser = running.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        seconds = []
        for _ in range(5):
            opened = browser.new_page()
            began = time.perf_counter()
            opened.goto(path.as_uri())
            opened.wait_for_selector("html[data-drawn]")
            seconds.append(time.perf_counter() - began)
            opened.close()
        browser.close()
    return statistics.median(seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--events", type=int, default=100_000, help="per worker, for the large report")
    parsed = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {platform.processor() or platform.machine()}\n")
    print(cost(parsed.repeats), "\n")
    print(calls(parsed.repeats), "\n")
    print(large(parsed.events))
    return 0


if __name__ == "__main__":
    sys.exit(main())
