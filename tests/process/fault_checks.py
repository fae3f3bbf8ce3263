"""What the tests of the fault suite have in common: which methods there are, and how a run ends well."""

from __future__ import annotations

from real_workers import RealWorkers, Report

from gossamer.methods import METHODS

PAIRWISE = tuple(name for name, method in METHODS.items() if method.pairwise)
NOT_WAITING = tuple(name for name, method in METHODS.items() if not method.lockstep)
WAITING = tuple(name for name, method in METHODS.items() if method.lockstep)
EVERY = NOT_WAITING + WAITING
LONG = {"width": 50_000, "lr": 0.001}
"""A model whose exchange takes a while: 4 MB."""


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
