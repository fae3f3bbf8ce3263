"""Real workers for the tests: processes that are started, watched, killed, stopped and restarted."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from training_script import train

from gossamer.process.store.rank_info import free_port

# A server that has torch loaded already, and what optimizers load at their first step, forks the workers: they start in
# no time, and are processes of their own.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["gossamer.process.runtime.swarm", "torch._dynamo"])

Report = dict[str, Any]
Script = Callable[..., None]
"""What a worker runs: called with its rank, its environment, its order and where to report to."""


FRAMES = 4
"""So many of each thread are told where a worker is stuck."""


def watched(script: Script, stacks: str, *arguments: Any) -> None:
    """A worker that writes down what it is doing when it is asked, even if its interpreter stands still."""
    # Whatever is started in the background of a shell, and all it starts, would not hear Ctrl-C. Nor would the children
    # of a fork server that the launcher of gossamer train started in a test before: it blocks signals meanwhile.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
    # What the server has loaded is not collected: every worker would copy it, page by page.
    gc.freeze()
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file)
        script(*arguments)


class Late(AssertionError):
    """A worker is stuck, or slow."""


class Ended(AssertionError):
    """A worker has ended before it was expected to."""


class RealWorker:
    """One process and what it reports."""

    def __init__(self, rank: int, environment: dict[str, str], script: Script, order: dict[str, Any]) -> None:
        self.rank = rank
        self.reports: list[Report] = []
        self._incoming, outgoing = FORKS.Pipe(duplex=False)
        handle, self._stacks = tempfile.mkstemp(prefix="gossamer-stacks-")
        os.close(handle)
        self.process = FORKS.Process(target=watched, args=(script, self._stacks, rank, environment, order, outgoing))
        self.process.start()
        outgoing.close()

    def died(self, within_s: float = 60.0) -> None:
        """Wait until it has killed itself."""
        self.process.join(within_s)
        assert self.process.exitcode == -signal.SIGKILL

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> None:
        """No process is left when this returns."""
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGCONT)
        self.process.kill()
        self.process.join()
        self._incoming.close()
        Path(self._stacks).unlink(missing_ok=True)

    def doing(self) -> str:
        """What its threads are at, on one line: that is what survives of a failure in a long log."""
        if not self.process.is_alive():
            return f"worker {self.rank} has ended"
        self.signal(signal.SIGUSR1)
        time.sleep(0.5)
        while self.waiting():
            self.next()
        threads = Path(self._stacks).read_text().split("\n\n")
        calls = [re.findall(r'([^/"]+)\.py", line (\d+) in (\S+)', thread)[:FRAMES] for thread in threads]
        told = [" < ".join(f"{file}:{line} {name}" for file, line, name in frames) for frames in calls]
        return f"worker {self.rank}, after {self.reports[-1:]}: {' | '.join(told)}"

    def until(self, wanted: Callable[[Report], bool], within_s: float = 60.0) -> Report:
        """The first report from now on that is wanted."""
        end = time.monotonic() + within_s
        while self.waiting(max(0.0, end - time.monotonic())):
            if wanted(self.next()):
                return self.reports[-1]
        raise Late(f"worker {self.rank} did not report in {within_s} s")

    def waiting(self, within_s: float = 0.0) -> bool:
        """Whether there is a report that was not read yet."""
        return self._incoming.poll(within_s)

    def next(self) -> Report:
        try:
            self.reports.append(self._incoming.recv())
        except EOFError:
            raise Ended(f"worker {self.rank} ended") from None
        return self.reports[-1]

    def end_and_last(self) -> str:
        """How it ended, if it did, and its last report."""
        while self.waiting():
            try:
                self.reports.append(self._incoming.recv())
            except EOFError:
                self.process.join(5)
                break
        return f"worker {self.rank}, exit code {self.process.exitcode}, after {self.reports[-1:]}"

    def at(self, what: str, within_s: float = 60.0) -> Report:
        return self.until(lambda report: report["at"] == what, within_s)

    def step(self, number: int) -> Report:
        return self.until(lambda report: report["at"] == "step" and report["step"] >= number)

    def exchanged(self, more_than: int = 0) -> Report:
        """Wait until it has made more exchanges than this."""
        return self.until(lambda report: report.get("exchanges", 0) > more_than)

    def said(self, words: str) -> Report:
        """Wait until one of the events that it reports while it trains has these words."""
        return self.until(lambda report: any(words in event for event in report.get("events", ())))


class RealWorkers:
    """A job of several workers, all gone when the test is over."""

    def __init__(
        self, count: int, *, script: Script = train, environment: dict[str, str] | None = None, **order: Any
    ) -> None:
        """``environment``: variables besides, or in place of, the usual ones."""
        self.script, self.order = script, order
        self.environment = {
            "WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": "1",
            **(environment or {}),
        }
        self.workers = [RealWorker(rank, self.environment, script, order) for rank in range(count)]

    def __enter__(self) -> RealWorkers:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if isinstance(error, Late):
                raise Late("; ".join([str(error), *(worker.doing() for worker in self.workers)])) from None
            if isinstance(error, Ended):
                # Another one may be why.
                raise Ended("; ".join([str(error), *(worker.end_and_last() for worker in self.workers)])) from None
        finally:
            for worker in self.workers:
                worker.end()

    def __getitem__(self, rank: int) -> RealWorker:
        return self.workers[rank]

    def __iter__(self) -> Iterator[RealWorker]:
        return iter(self.workers)

    def kill(self, *ranks: int) -> None:
        for rank in ranks:
            self.workers[rank].process.kill()
        for rank in ranks:
            self.workers[rank].end()

    def grow(self, count: int, at: str = "") -> list[RealWorker]:
        """Start workers that come to the run, by default at the address of its store; their ranks are given to them."""
        at = at or "{MASTER_ADDR}:{MASTER_PORT}".format(**self.environment)
        environment = {name: value for name, value in self.environment.items() if name != "WORLD_SIZE"}
        environment["GOSSAMER_JOIN"] = at
        first = len(self.workers)
        self.workers += [RealWorker(first + number, environment, self.script, self.order) for number in range(count)]
        return self.workers[first:]

    def restart(self, rank: int) -> RealWorker:
        environment = {**self.environment, "revived": "1"}
        self.workers[rank] = RealWorker(rank, environment, self.script, self.order)
        return self.workers[rank]

    def finished(self, ranks: list[int] | None = None) -> list[Report]:
        """What the workers report in the end, once their processes have ended well."""
        chosen = [self.workers[rank] for rank in (range(len(self.workers)) if ranks is None else ranks)]
        reports = [worker.at("finished") for worker in chosen]
        for worker in chosen:
            worker.process.join(60)
            assert worker.process.exitcode == 0
        return reports
