"""What the tests of the fault suite have in common: which methods there are, and how a run ends well."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from real_workers import RealWorkers, Report

from gossamer.methods import METHODS

Test = TypeVar("Test", bound=Callable[..., Any])
GOLDEN = 0.618

PAIRWISE = tuple(name for name, method in METHODS.items() if method.pairwise)
NOT_WAITING = tuple(name for name, method in METHODS.items() if not method.lockstep)
WAITING = tuple(name for name, method in METHODS.items() if method.lockstep)
EVERY = NOT_WAITING + WAITING
LONG = {"width": 12_500, "lr": 0.004}
"""A model of 1 MB: as long vectors do, it travels by a thread of its own, in which a worker can die."""


def victim_of(method: str, run: int) -> int:
    """Rank 2, or rank 0, which hosts the store: in one run each for half of the methods, in the next the other way."""
    return 2 * ((EVERY.index(method) + run) % 2)


def spread(method: str, run: int) -> float:
    """A number between 0 and 1. Those of the methods are spread evenly, in one run and over several."""
    return (EVERY.index(method) / len(EVERY) + run * GOLDEN) % 1


def bound_s(method: str) -> float:
    """How long a worker that is alive may stand still: if it waits for others, as long as these need to agree."""
    return 5.0 if METHODS[method].lockstep else 2.0


def once(test: Test) -> Test:
    """Decorates a test that takes so long that it is repeated in no further run."""
    test.once = True  # type: ignore[attr-defined]
    return test


def good(ends: list[Report]) -> None:
    assert all(end["weights"] == ends[0]["weights"] for end in ends)
    assert ends[0]["accuracy"] > 0.95
    assert [end["threads"] for end in ends] == [[]] * len(ends)


def newest_steps(workers: RealWorkers, ranks: list[int]) -> list[int]:
    """How far these workers are."""
    for rank in ranks:
        while workers[rank].waiting():
            workers[rank].next()
    return [workers[rank].reports[-1]["step"] for rank in ranks]


def measured(text: str) -> None:
    """Say what a test has measured: ``make faults`` prints these lines when the tests have ended."""
    if "FAULT_FIGURES" in os.environ:
        with Path(os.environ["FAULT_FIGURES"]).open("a") as figures:
            figures.write(f"{text}\n")
    print(text)
