"""The workers of a run on this machine: started, watched, restarted and ended by one process.

That process hosts the store at which the workers meet, as torchrun's agent does, and reads their reports there. All of
them are in its process group, so a terminal's Ctrl-C and Ctrl-Z reach them. A server that has loaded torch forks them,
so they are there in no time. When the process that started them is killed, they end too.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import torch.distributed as dist

from gossamer.errors import InputError
from gossamer.process.store.failover_store import FailoverStore
from gossamer.process.store.rank_info import RankInfo
from gossamer.runfolder import WORKERS, remove_if_empty
from gossamer.train.entrypoint import STOPS, work
from gossamer.train.job_spec import JobSpec
from gossamer.train.status import FAILED, StatusBoard

HOST = "127.0.0.1"

STOP_S = 20.0
"""How long workers that were asked to end may take; then they are killed."""

FORKS = multiprocessing.get_context("forkserver")


def warm_up() -> None:
    """Start the server from which workers are forked, with what they need loaded, beside what else is to be done."""
    # Optimizers load torch._dynamo when they are made.
    FORKS.set_forkserver_preload(["gossamer.train.entrypoint", "torch._dynamo"])
    forkserver.ensure_running()


class LocalStore:
    """The store of all runs of one command."""

    def __init__(self) -> None:
        try:
            self._store = dist.TCPStore(HOST, 0, None, True, timedelta(seconds=60), wait_for_workers=False)
        except RuntimeError as error:
            said = str(error).splitlines()[0]
            raise InputError(f"no port could be opened for the workers to meet at: {said}") from None
        self.port = self._store.port

    def status_board(self, method: str) -> StatusBoard:
        return StatusBoard(FailoverStore(HOST, self.port, False, _prefix(method), 60.0))


def _prefix(method: str) -> str:
    """Under which name the workers of one of the command's runs meet."""
    return f"gossamer/{method}/"


class Workers:
    """The processes of one run; none is left when the ``with`` block ends."""

    def __init__(self, job_spec: JobSpec, count: int, port: int) -> None:
        self.job_spec, self.count, self.port = job_spec, count, port
        self._processes: dict[int, ForkServerProcess] = {}
        self._scrap: str | None = None
        if job_spec.path is None:
            self._scrap = tempfile.mkdtemp(prefix="gossamer-")
            self.logs = Path(self._scrap)
        else:
            self.logs = job_spec.path / WORKERS
            self.logs.mkdir(parents=True, exist_ok=True)
        self._asked_at: float | None = None

    def __enter__(self) -> Workers:
        for rank in range(self.count):
            self.start(rank)
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for rank, process in self._processes.items():
            process.close()
            if self.log(rank).stat().st_size == 0:
                self.log(rank).unlink()
        remove_if_empty([self.logs])
        if self._scrap is not None:
            shutil.rmtree(self._scrap, ignore_errors=True)

    def start(self, rank: int) -> None:
        """Start worker ``rank``, or start it again."""
        rank_info = RankInfo(rank, self.count, HOST, self.port, _prefix(self.job_spec.values["method"]))
        arguments = (self.job_spec.text(), rank_info, self._environment(rank), str(self.log(rank)))
        self.log(rank).touch()
        self._processes[rank] = FORKS.Process(target=work, args=arguments, name=f"gossamer-worker-{rank}")
        self._processes[rank].start()

    def _environment(self, rank: int) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.count),
            "MASTER_ADDR": HOST,
            "MASTER_PORT": str(self.port),
            # The store is hosted for them.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }

    def log(self, rank: int) -> Path:
        """What the worker printed."""
        return self.logs / f"{rank}.log"

    def ended(self) -> dict[int, int]:
        """The exit codes of the workers that have ended; below 0: the signal that killed them."""
        codes = {rank: process.exitcode for rank, process in self._processes.items()}
        return {rank: code for rank, code in codes.items() if code is not None}

    def ask_to_stop(self) -> None:
        """Let all workers end after their present step."""
        if self._asked_at is None:
            self._asked_at = time.monotonic()
            for process in self._running():
                assert process.pid is not None
                os.kill(process.pid, signal.SIGTERM)
                # One that is stopped hears nothing.
                os.kill(process.pid, signal.SIGCONT)

    @property
    def too_slow_to_stop(self) -> bool:
        return self._asked_at is not None and time.monotonic() - self._asked_at > STOP_S

    def kill(self) -> None:
        """End all workers at once."""
        for process in self._running():
            process.kill()
        for process in self._processes.values():
            process.join()

    def _running(self) -> list[ForkServerProcess]:
        return [process for process in self._processes.values() if process.is_alive()]


def why_ended(code: int, status_board: StatusBoard, rank: int) -> str:
    """Why a worker's process ended, in a few words."""
    report = status_board.get(rank)
    if report is not None and report.state == FAILED:
        return report.error
    if code < 0:
        names = {number.value: number.name for number in signal.Signals}
        return f"killed by {names.get(-code, f'signal {-code}')}"
    return f"ended with code {code}"


class StopSignals:
    """Hears Ctrl-C and SIGTERM, and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def hear(self, *_: object) -> None:
        self.count += 1


@contextmanager
def counting_stop_signals() -> Iterator[StopSignals]:
    """Ctrl-C and SIGTERM are only counted in this block."""
    stops = StopSignals()
    before = {number: signal.signal(number, stops.hear) for number in STOPS}
    try:
        yield stops
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
