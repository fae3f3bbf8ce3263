"""Runs a user's script in workers of this machine. A worker that dies is started again while the others train on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from gossamer.launch.script import Script, run_script
from gossamer.process.liveness.board import read_stage
from gossamer.process.liveness.records import Stage
from gossamer.process.store.rank_info import free_port, run_name
from gossamer.train.launcher import BAD_INPUT, LocalStore, LocalWorkers, StopSignals, describe_exit

POLL_S = 0.5
"""How often signals are looked at; the end of a worker is noticed at once."""

FIRST_JOIN = "0/"
"""The prefix of the first join of a script, below that of the run."""


@dataclass
class Outcome:
    """What became of the workers."""

    exit_codes: dict[int, int] = field(default_factory=dict)
    """Of each worker's last process; below 0: the signal that killed it."""
    restarts: dict[int, int] = field(default_factory=dict)
    seconds: float = 0.0
    failed: str = ""
    """Why the run failed as a whole."""
    interrupted: bool = False


def supervise(
    script: Script,
    num_workers: int,
    max_restarts: int,
    logs: Path | None,
    signals: StopSignals,
    say: Callable[[str], None],
    grace_s: float,
) -> Outcome:
    """Run ``script`` in ``num_workers`` workers until all have ended.

    ``say``: is told of each that dies. ``grace_s``: how long they may take to end after the first stop signal.
    """
    store = LocalStore(name=run_name())
    began = time.monotonic()
    target = partial(run_script, replace(script, torch_port=free_port()))
    board = store.connect(run_name())
    try:
        with LocalWorkers(target, store.rank_infos(num_workers, run_name()), logs) as workers:
            supervisor = _Supervisor(
                workers, max_restarts, lambda rank: _stage(board.get(f"{FIRST_JOIN}done/{rank}")), say, grace_s
            )
            with _passing_on_pauses(workers):
                outcome = supervisor.run(signals)
    finally:
        board.close()
    outcome.seconds = time.monotonic() - began
    return outcome


class _Supervisor:
    def __init__(
        self,
        workers: LocalWorkers,
        max_restarts: int,
        stage: Callable[[int], Stage | None],
        say: Callable[[str], None],
        grace_s: float,
    ) -> None:
        """``stage(rank)``: how far that worker is; None if it has not joined yet."""
        self.workers, self.max_restarts, self._stage, self._say = workers, max_restarts, stage, say
        self._grace_s, self._stopping = grace_s, False
        self.outcome = Outcome(restarts=dict.fromkeys(workers.ranks, 0))
        self._ended: set[int] = set()

    def run(self, signals: StopSignals) -> Outcome:
        outcome, workers = self.outcome, self.workers
        while len(self._ended) < len(workers.ranks) and not outcome.failed:
            workers.wait_for_end(POLL_S)
            for rank, code in workers.exit_codes().items():
                if rank not in self._ended:
                    self._ended.add(rank)
                    if code != 0 and not signals.count:
                        self._handle_failure(rank, code)
            if signals.first is not None:
                self._stop(signals.first)
                if signals.count > 1 or workers.stop_timed_out(self._grace_s):
                    workers.kill()
        workers.kill()
        outcome.exit_codes, outcome.interrupted = workers.exit_codes(), signals.count > 0
        return outcome

    def _stop(self, number: signal.Signals) -> None:
        """Let the workers end by themselves: a script may save something first."""
        if self._stopping:
            return
        self._stopping = True
        self._say(f"stopping: the workers have {self._grace_s:g} s to end; a second Ctrl-C kills them")
        # A second one would end what a script does upon the first.
        self.workers.request_stop(number)

    def _handle_failure(self, rank: int, code: int) -> None:
        """Start a worker that has failed again, if there is a use in that."""
        why, stage, restarts = describe_exit(code), self._stage(rank), self.outcome.restarts
        others_left = len(self._ended) == len(self.workers.ranks)
        if stage is None:
            self.outcome.failed = f"worker {rank} ended before it joined the others: {why}"
        elif stage == Stage.LEFT:
            self._say(f"worker {rank} {why} after the end of its training")
        elif others_left or code == BAD_INPUT or restarts[rank] == self.max_restarts:
            again = f" (after {restarts[rank]} restarts)" if restarts[rank] else ""
            self._say(f"worker {rank} died: {why}{again}; {'nobody is left' if others_left else 'the others go on'}")
        else:
            restarts[rank] += 1
            self._ended.remove(rank)
            self.workers.start(rank)
            number = f"{restarts[rank]} of {self.max_restarts}"
            self._say(f"worker {rank} died: {why}; it starts again ({number}), the others go on")


@contextmanager
def _passing_on_pauses(workers: LocalWorkers) -> Iterator[None]:
    """Inside this block, Ctrl-Z stops the workers too, and they go on when this process does."""

    def pause(*_: object) -> None:
        workers.send_signal(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        workers.send_signal(signal.SIGCONT)

    before = signal.getsignal(signal.SIGTSTP)
    if before != signal.SIG_DFL:
        # Whoever started this process does not want it to be stopped.
        yield
        return
    signal.signal(signal.SIGTSTP, pause)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, before)


def _stage(published: bytes | None) -> Stage | None:
    """Return the stage that a worker has published in the store."""
    stage = read_stage(published)
    return None if stage is None else stage[0]
