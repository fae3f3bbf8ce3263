"""Starts workers as processes of this machine, and ends them.

The launching process hosts the store, as torchrun's agent does. A fork server that has loaded torch forks the workers,
so they start at once. All of them are in the launcher's process group, so Ctrl-C and Ctrl-Z in a terminal reach them,
unless they make a group of their own: then the launcher passes signals on. If the launcher is killed, the workers end
too.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import torch

from gossamer.errors import InputError
from gossamer.process.events import logger
from gossamer.process.net.identity import Identity
from gossamer.process.net.secret import find_secret, make_secret
from gossamer.process.net.tls import find_tls_files, make_tls
from gossamer.process.store.failover_store import FailoverStore
from gossamer.process.store.home_store import Home, Host, HostedStore
from gossamer.process.store.rank_info import RankInfo
from gossamer.runs.run_folder import remove_if_empty
from gossamer.train.replica.place import ReplicaPlace, shard_prefix

HOST = "127.0.0.1"

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)

TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGSTOP, signal.SIGCONT)

STOP_TIMEOUT_S = 20.0
"""How long workers that were asked to stop may take; then they are killed."""

REPLICA_ENDS_S = 5.0
"""How long the other processes of a replica may take to end when one of them has failed; then they are killed."""

BAD_INPUT = 2
"""The exit code of a worker that cannot do what it is asked."""

FORK_SERVER = multiprocessing.get_context("forkserver")

Target = Callable[[RankInfo], int]
"""What a worker's process runs: takes its rank info, returns its exit code. Must be picklable."""


def warm_up(modules: Sequence[str] = ("gossamer.train.entrypoint",)) -> None:
    """Start the fork server and let it load ``modules``, which workers need, while this process goes on."""
    # Optimizers load torch._dynamo when they are constructed.
    FORK_SERVER.set_forkserver_preload([*modules, "torch._dynamo"])
    # Ctrl-C must not end the fork server while it loads; afterwards it ignores the signal by itself. What it needs is
    # started first, since that unblocks the signals.
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


class LocalStore:
    """The store of all runs of one command, hosted by this process."""

    def __init__(self, host: str = HOST, port: int = 0, *, name: str | None = None) -> None:
        """``host``: where the workers listen too. ``name``: what the workers present as the name of the run; None: one
        that nobody else has."""
        self._tls = find_tls_files()
        tls = None if self._tls is None else make_tls(self._tls)
        given = find_secret()
        self._identity = Identity(None, name or uuid.uuid4().hex, given or make_secret(), tls=tls)
        self.made_secret = "" if given else self._identity.secret.decode()
        """The secret of this run, if the environment gives none."""
        try:
            self._store = HostedStore(host, port, self._identity, logger.warning)
        except OSError as error:
            reason = error.strerror or error
            raise InputError(f"no port could be opened for the store of the workers at {host}: {reason}") from None
        self.host, self.port = host, self._store.address[1]

    def rank_info(self, rank: int, workers: int, run: str) -> RankInfo:
        """Return the rank info of a worker; ``run``: the name of a run, or of one shard of it."""
        name, secret = self._identity.run, self._identity.secret
        return RankInfo(rank, workers, self.host, self.port, f"gossamer/{run}/", name, secret, Host.LAUNCHER, self._tls)

    def rank_infos(self, workers: int, run: str) -> list[RankInfo]:
        return [self.rank_info(rank, workers, run) for rank in range(workers)]

    def connect(self, run: str) -> FailoverStore:
        return FailoverStore(Home(self.host, self.port, Host.LAUNCHER, ""), self._identity, f"gossamer/{run}/", 60.0)


class LocalWorkers:
    """The worker processes of one run; all of them have ended when the ``with`` block ends.

    A worker is one process, or a replica of ``replica_size`` processes: its shards. They start and end together.
    """

    def __init__(
        self,
        target: Callable[..., int],
        rank_infos: Sequence[RankInfo],
        logs: Path | None = None,
        replica_size: int = 1,
    ) -> None:
        """``target``: a ``Target``; in a replica it also takes a ``ReplicaPlace``, as ``place``.

        ``logs``: the folder for what the workers print; None: they print to our own output.
        """
        self.target, self.logs, self.replica_size = target, logs, replica_size
        self._rank_infos = {rank_info.rank: rank_info for rank_info in rank_infos}
        if logs is not None:
            logs.mkdir(parents=True, exist_ok=True)
        self._processes: dict[tuple[int, int], ForkServerProcess] = {}
        """By the ranks of the worker, and of the process in it."""
        self._first_failures: dict[int, tuple[int, float]] = {}
        """The exit code of the first process of a replica that failed, and when that was seen."""
        self._rendezvous = tempfile.TemporaryDirectory(prefix="gossamer-") if replica_size > 1 else None
        self._num_starts = 0
        self._stop_requested_at: float | None = None

    def __enter__(self) -> LocalWorkers:
        for rank in self._rank_infos:
            self.start(rank)
        return self

    @property
    def ranks(self) -> list[int]:
        return list(self._rank_infos)

    def __exit__(self, *_: object) -> None:
        self.kill()
        for at, process in self._processes.items():
            process.close()
            if self.logs is not None and self.log(*at).stat().st_size == 0:
                self.log(*at).unlink()
        if self.logs is not None:
            remove_if_empty([self.logs])
        if self._rendezvous is not None:
            self._rendezvous.cleanup()

    def start(self, rank: int) -> None:
        """Start worker ``rank``, or start it again."""
        self._num_starts += 1
        self._first_failures.pop(rank, None)
        for shard in range(self.replica_size):
            rank_info, target, environment = self._rank_infos[rank], self.target, {}
            if self._rendezvous is not None:
                meet = str(Path(self._rendezvous.name) / f"{rank}-{self._num_starts}")
                place = ReplicaPlace(shard, self.replica_size, meet)
                rank_info = replace(rank_info, prefix=shard_prefix(rank_info.prefix[:-1], shard) + "/")
                target, environment = partial(target, place=place), place.environment(rank)
            log = None
            if self.logs is not None:
                log = str(self.log(rank, shard))
                self.log(rank, shard).touch()
            main = partial(_worker_main, target, rank_info, log, environment)
            name = f"gossamer-worker-{rank}" + (f"-{shard}" if shard else "")
            self._processes[rank, shard] = FORK_SERVER.Process(target=main, name=name)
            self._processes[rank, shard].start()

    def log(self, rank: int, shard: int = 0) -> Path:
        assert self.logs is not None
        return self.logs / (f"{rank}-{shard}.log" if shard else f"{rank}.log")

    def exit_codes(self) -> dict[int, int]:
        """Return the exit codes of the workers that have ended; below 0: the signal that killed them.

        That of a replica is the one of its first process that failed; a replica ends as a whole.
        """
        return {rank: code for rank in self._rank_infos if (code := self._exit_code(rank)) is not None}

    def _exit_code(self, rank: int) -> int | None:
        processes = [self._processes[rank, shard] for shard in range(self.replica_size)]
        codes = [process.exitcode for process in processes]
        failures = [code for code in codes if code]
        if failures:
            # A process that was killed is why the others failed.
            _, since = self._first_failures.setdefault(rank, (min(failures), time.monotonic()))
            if time.monotonic() - since > REPLICA_ENDS_S:
                for process in processes:
                    process.kill()
        if None in codes:
            return None
        return self._first_failures[rank][0] if failures else 0

    def wait_for_end(self, timeout_s: float) -> None:
        """Wait until one of the workers that run has ended, at most ``timeout_s``."""
        connection.wait([process.sentinel for process in self._running()], timeout_s)

    def wait(self, grace_s: float) -> int:
        """Wait until all workers have ended, ``grace_s`` after the first failure; return the worst exit code."""
        failed_at: float | None = None
        while len(codes := self.exit_codes()) < len(self._rank_infos):
            if failed_at is None and any(codes.values()):
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() - failed_at > grace_s:
                break
            time.sleep(0.05)
        self.kill()
        return max(code if code in (0, 1, BAD_INPUT, 130) else 1 for code in self.exit_codes().values())

    def request_stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send all workers a signal to stop, once."""
        if self._stop_requested_at is None:
            self._stop_requested_at = time.monotonic()
            self.send_signal(number)
            # A stopped process does not handle signals.
            self.send_signal(signal.SIGCONT)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to all workers; what a terminal sends goes to a worker's process group, if it leads one."""
        for process in self._running():
            assert process.pid is not None
            with contextlib.suppress(ProcessLookupError):
                if number in TERMINAL_SIGNALS and os.getpgid(process.pid) == process.pid:
                    os.killpg(process.pid, number)
                else:
                    os.kill(process.pid, number)

    def stop_timed_out(self, after_s: float = STOP_TIMEOUT_S) -> bool:
        requested = self._stop_requested_at
        return requested is not None and time.monotonic() - requested > after_s

    def kill(self) -> None:
        for process in self._running():
            process.kill()
        for process in self._processes.values():
            process.join()

    def _running(self) -> list[ForkServerProcess]:
        return [process for process in self._processes.values() if process.is_alive()]


def _worker_main(target: Target, rank_info: RankInfo, log: str | None, environment: Mapping[str, str]) -> None:
    """Run ``target`` in a forked process, in the environment that torchrun would give it."""
    # The fork server has blocked them (``warm_up``).
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    os.environ.update(
        RANK=str(rank_info.rank),
        LOCAL_RANK=str(rank_info.rank),
        WORLD_SIZE=str(rank_info.workers),
        MASTER_ADDR=rank_info.host,
        MASTER_PORT=str(rank_info.port),
    )
    os.environ.update(environment)
    if log is not None:
        with open(log, "ab", buffering=0) as file:
            for descriptor in (sys.stdout.fileno(), sys.stderr.fileno()):
                os.dup2(file.fileno(), descriptor)
    if (rank_info.workers > 1 or environment) and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    try:
        code = target(rank_info)
    except InputError as error:
        print(f"gossamer: {error}", file=sys.stderr)
        code = BAD_INPUT
    sys.exit(code)


def orphaned() -> bool:
    """Return whether the launcher of this worker has died."""
    parent = multiprocessing.parent_process()
    return parent is not None and not parent.is_alive()


def describe_exit(code: int) -> str:
    if code < 0:
        names = {number.value: number.name for number in signal.Signals}
        return f"killed by {names.get(-code, f'signal {-code}')}"
    return f"ended with code {code}"


class StopSignals:
    """Counts Ctrl-C and SIGTERM."""

    def __init__(self) -> None:
        self.count = 0
        self.first: signal.Signals | None = None

    def add(self, number: int = signal.SIGTERM) -> None:
        self.first = self.first or signal.Signals(number)
        self.count += 1


@contextmanager
def counting_stop_signals() -> Iterator[StopSignals]:
    """Only count Ctrl-C and SIGTERM inside this block."""
    signals = StopSignals()
    with handling_stop_signals(signals.add):
        yield signals


@contextmanager
def handling_stop_signals(handle: Callable[[int], None]) -> Iterator[None]:
    """Only call ``handle(number)`` at Ctrl-C and SIGTERM inside this block."""
    before = {number: signal.signal(number, lambda number, frame: handle(number)) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
