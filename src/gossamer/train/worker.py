"""A worker's process: its part in a run, what it does when it is asked to stop, and what it says when it fails."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from gossamer.errors import InputError
from gossamer.process.place import Place
from gossamer.train.gate import Gate
from gossamer.train.order import Order
from gossamer.train.report import FAILED, Board, Report
from gossamer.train.training import Training

STOPS = (signal.SIGINT, signal.SIGTERM)

LAST_WORDS_S = 10.0
"""How long a worker that fails tries to say why."""


def part_of(order: Order, place: Place, orphaned: Callable[[], bool] = lambda: False) -> Report:
    """Take part in a run as the worker at ``place``, until its end or until ``orphaned``; returns the last report."""
    board = Board(place.meeting_point())
    report = Report(place.rank)
    try:
        run = order.run()
        gate = Gate(place.rank, place.workers, together=run.method().lockstep)
        with _heeding_stops(gate):
            training = Training(order, run, place, board, gate, orphaned)
            report = training.report
            return training.whole()
    except Exception as error:
        report.state, report.error = FAILED, one_line(error)
        board.put(report, LAST_WORDS_S)
        raise
    finally:
        board.close()


@contextmanager
def _heeding_stops(gate: Gate) -> Iterator[None]:
    """Ctrl-C and SIGTERM ask to stop, however often they come: whoever is in a hurry kills."""
    before = {number: signal.signal(number, lambda *_: gate.asked.set()) for number in STOPS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def one_line(error: Exception) -> str:
    """What went wrong and where, in one line."""
    said = " ".join(str(error).split())
    if isinstance(error, InputError):
        return said
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {said}{where}"


def work(order_text: str, place: Place, environment: dict[str, str], log: str) -> None:
    """What a process does that was forked to be a worker: all that it prints goes to its log."""
    os.environ.update(environment)
    with open(log, "ab", buffering=0) as file:
        for descriptor in (sys.stdout.fileno(), sys.stderr.fileno()):
            os.dup2(file.fileno(), descriptor)
    if place.workers > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    order = Order.of_text(order_text)
    try:
        report = part_of(order, place, _orphaned)
    except InputError as error:
        print(f"gossamer: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(130 if report.interrupted else 0)


def _orphaned() -> bool:
    """Whether the process that had us forked is there no more."""
    parent = multiprocessing.parent_process()
    return parent is not None and not parent.is_alive()
