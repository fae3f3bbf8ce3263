"""Accuracy of a run that grows from 4 to 8 workers and shrinks to 3, beside 4 workers all the time.

    python benchmarks/growing.py
    python benchmarks/growing.py --methods gossip --seeds 1

``gossamer train`` on digits; a gradient takes at least 25 ms, so that there is time for it. Once the first command
listens, ``gossamer train --join`` brings four more. When these have made a quarter of the steps of a worker,
they leave upon SIGTERM to their command, and worker 1 upon SIGTERM to its process. Then the same job runs with four
workers all the time, for as many samples: with methods in lockstep eight workers make more of them in as many steps.
Prints a markdown table. Steps are those of all workers together. On a busy machine a run may be over before the others
have come; make it longer with ``--steps``.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gossamer.process.store.rank_info import free_port
from tables import table

GOSSAMER = [sys.executable, "-m", "gossamer", "train"]
WORKERS, COMING = 4, 4
LIMIT_S = 300.0
QUIET: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


def job(method: str, steps: int, seed: int, folder: Path) -> list[str]:
    settings = {"task": "digits", "batch": 8, "workers": WORKERS, "compute": "25ms"}
    settings |= {"method": method, "steps": steps, "seed": seed, "out": folder}
    return [*GOSSAMER, *(part for name, value in settings.items() for part in (f"--{name}", str(value)))]


def statuses(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the last status of each worker that has published one."""
    found = {}
    for path in (folder / "workers").glob("*.jsonl"):
        lines = path.read_text().split("\n")[:-1]
        if lines:
            found[int(path.stem)] = json.loads(lines[-1])
    return found


def wait_until(reached: Any, *processes: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + LIMIT_S
    while not reached():
        if time.monotonic() > until or any(process.poll() is not None for process in processes):
            raise SystemExit("a run ended too early, or came to nothing")
        time.sleep(0.1)


def listens(at: str) -> bool:
    host, _, port = at.partition(":")
    try:
        socket.create_connection((host, int(port)), 1.0).close()
    except OSError:
        return False
    return True


def summary(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return document


def grow_and_shrink(method: str, steps: int, seed: int, folder: Path) -> dict[str, Any]:
    """Return the summary of the run; also the steps of all workers when there were eight, and when there were three."""
    at = f"127.0.0.1:{free_port()}"
    environment = {**os.environ, "GOSSAMER_SECRET": secrets.token_hex(16)}
    first = subprocess.Popen([*job(method, steps, seed, folder), "--listen", at], env=environment, **QUIET)
    coming = None
    try:
        wait_until(lambda: listens(at), first)
        command = [*GOSSAMER, "--join", at, "--workers", str(COMING), "--compute", "25ms"]
        coming = subprocess.Popen(command, env=environment, **QUIET)
        ranks = range(WORKERS, WORKERS + COMING)
        wait_until(lambda: statuses(folder).keys() >= set(ranks), first, coming)
        grown = sum(status["steps"] for status in statuses(folder).values())
        wait_until(lambda: min(statuses(folder)[rank]["steps"] for rank in ranks) >= steps // 4, first, coming)
        coming.terminate()
        os.kill(statuses(folder)[1]["pid"], signal.SIGTERM)
        wait_until(lambda: [status["state"] for status in statuses(folder).values()].count("left") == COMING + 1, first)
        shrunk = sum(status["steps"] for status in statuses(folder).values())
        for process in (coming, first):
            if process.wait(LIMIT_S):
                raise SystemExit(f"{' '.join(process.args)} ended with code {process.returncode}")  # type: ignore[arg-type]
    finally:
        for process in (first, coming):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()
    return {**summary(folder), "grown": grown, "shrunk": shrunk}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="allreduce,a2cid2,lasgd,gossip")
    parser.add_argument("--steps", type=int, default=2000, help="of a worker")
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    args = parser.parse_args()
    print(f"load before: {Path('/proc/loadavg').read_text().split()[0]}")
    rows = []
    for method in args.methods.split(","):
        for seed in range(args.seeds):
            with tempfile.TemporaryDirectory() as folder:
                growing = grow_and_shrink(method, args.steps, seed, Path(folder) / "growing")
                total = growing["total_steps"]
                fixed_steps = round(total / WORKERS)
                subprocess.run(job(method, fixed_steps, seed, Path(folder) / "fixed"), check=True, **QUIET)
                fixed = summary(Path(folder) / "fixed")
            row = {
                "method": method,
                "seed": seed,
                "steps in all": total,
                "8 workers from": growing["grown"],
                "3 workers from": growing["shrunk"],
            }
            for name, result in (("growing", growing), ("4 workers", fixed)):
                row |= {f"accuracy, {name}": f"{result['accuracy']:.1%}", f"loss, {name}": f"{result['loss']:.3f}"}
            rows.append(row)
            print(row, flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
