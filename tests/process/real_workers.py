"""Real workers for the tests: processes that are started, watched, killed, stopped and restarted."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gossamer.process.place import free_port

SCRIPT = Path(__file__).with_name("training_script.py")


class RealWorker:
    """One process and what it reports."""

    def __init__(self, rank: int, environment: dict[str, str], order: dict[str, Any]) -> None:
        self.rank = rank
        self.reports: list[dict[str, Any]] = []
        self._lines: queue.Queue[dict[str, Any]] = queue.Queue()
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), json.dumps(order)],
            env={**os.environ, **environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.errors: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._read_errors, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(json.loads(line))

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.errors.extend(self.process.stderr)

    def until(self, wanted: Callable[[dict[str, Any]], bool], within_s: float = 60.0) -> dict[str, Any]:
        """The first report from now on that is wanted."""
        end = time.monotonic() + within_s
        while True:
            try:
                report = self._lines.get(timeout=max(0.01, end - time.monotonic()))
            except queue.Empty:
                tail = "".join(self.errors[-30:])
                raise AssertionError(f"worker {self.rank} did not report in {within_s} s; it said:\n{tail}") from None
            self.reports.append(report)
            if wanted(report):
                return report

    def at(self, what: str, within_s: float = 60.0) -> dict[str, Any]:
        return self.until(lambda report: report["at"] == what, within_s)

    def step(self, number: int, within_s: float = 60.0) -> dict[str, Any]:
        return self.until(lambda report: report["at"] == "step" and report["step"] >= number, within_s)


class RealWorkers:
    """A job of several workers, all gone when the test is over."""

    def __init__(self, count: int, **order: Any) -> None:
        self.order = order
        self.environment = {
            "WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": "1",
        }
        self.workers = [RealWorker(rank, self.environment, order) for rank in range(count)]

    def __enter__(self) -> RealWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.process.send_signal(signal.SIGCONT) if worker.process.poll() is None else None
            worker.process.kill()
            worker.process.wait()

    def __getitem__(self, rank: int) -> RealWorker:
        return self.workers[rank]

    def __iter__(self):  # noqa: ANN204
        return iter(self.workers)

    def kill(self, *ranks: int) -> None:
        for rank in ranks:
            self.workers[rank].process.kill()
        for rank in ranks:
            self.workers[rank].process.wait()

    def restart(self, rank: int) -> RealWorker:
        self.workers[rank] = RealWorker(rank, self.environment, self.order)
        return self.workers[rank]

    def finished(self, ranks: list[int] | None = None, within_s: float = 60.0) -> list[dict[str, Any]]:
        """What the workers report in the end, once their processes have ended well."""
        chosen = [self.workers[rank] for rank in (range(len(self.workers)) if ranks is None else ranks)]
        reports = [worker.at("finished", within_s) for worker in chosen]
        for worker in chosen:
            assert worker.process.wait(20) == 0, "".join(worker.errors[-30:])
        return reports
