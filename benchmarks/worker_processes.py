"""Worker processes of a benchmark that are killed and started again, and what they report (``worker_reports.py``)."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

POLL_S = 0.05


class Late(Exception):
    """A worker did not reach something in time."""


class Reports:
    """What a worker has reported into a file, among other lines."""

    def __init__(self, file: Path) -> None:
        self.reports_file = file

    def reports(self) -> list[dict[str, Any]]:
        lines = self.reports_file.read_text(errors="replace").split("\n")[:-1]
        return [json.loads(line) for line in lines if line.startswith('{"at"')]

    def times(self, at: str, since: float = 0.0) -> list[float]:
        return [report["time"] for report in self.reports() if report["at"] == at and report["time"] >= since]

    def steps(self) -> list[float]:
        """When its steps ended; reports of steps begin with that word."""
        return [report["time"] for report in self.reports() if report["at"].startswith("step")]


class Worker(Reports):
    """A process and the file to which it reports."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], folder: Path, name: str) -> None:
        super().__init__(folder / f"{name}.jsonl")
        self.errors_file = folder / f"{name}.log"
        self.started = time.time()
        with self.reports_file.open("w") as out, self.errors_file.open("w") as errors:
            # A process group of its own: whatever a library has started is killed with the worker.
            self.process = subprocess.Popen(command, stdout=out, stderr=errors, env=environment, start_new_session=True)

    def ended(self) -> bool:
        return self.process.poll() is not None

    def wait_for(self, at: str, count: int = 1, limit_s: float = 180.0) -> None:
        until = time.monotonic() + limit_s
        while len(self.times(at)) < count:
            if self.ended():
                raise Late(f"ended with status {self.process.returncode} before {at}:\n{self.errors()}")
            if time.monotonic() > until:
                raise Late(f"no {at} in {limit_s:.0f} s:\n{self.errors()}")
            time.sleep(POLL_S)

    def errors(self) -> str:
        return self.errors_file.read_text(errors="replace")[-2000:]

    def kill(self) -> None:
        """Kill it and all processes that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def longest_step(workers: Iterable[Reports], since: float) -> float:
    """Return the longest time between two steps of one of the workers, from the last one before a time until now."""
    now = time.time()
    found = 0.0
    for worker in workers:
        steps = worker.steps()
        steps = [*[at for at in steps if at < since][-1:], *(at for at in steps if at >= since), now]
        found = max(found, *(after - before for before, after in itertools.pairwise(steps)))
    return found


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
