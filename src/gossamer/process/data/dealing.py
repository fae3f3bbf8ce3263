"""How the examples of an epoch are dealt: which worker gets which batches. Nothing here communicates.

All workers draw the same order of an epoch's examples, from the seed of the run. The worker at position ``p`` of ``n``
takes the examples ``p``, ``p + n``, ``p + 2n``, … of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch

from gossamer.errors import InputError
from gossamer.seeds import stream

Item = TypeVar("Item")


def common_order(sampler: Iterable[Item], seed: int, *counters: int) -> list[Item]:
    """Return what the sampler yields, the same on all workers that give the same seed and counters.

    The sampler draws from torch's generator or from one of its own; both are as before afterwards.
    """
    value = int(stream(seed, "data", *counters).integers(2**63))
    inner = getattr(sampler, "sampler", None)
    own = (getattr(each, "generator", None) for each in (sampler, inner))
    generators = [torch.default_generator, *(each for each in own if isinstance(each, torch.Generator))]
    before = [generator.get_state() for generator in generators]
    try:
        for generator in generators:
            generator.manual_seed(value)
        return list(sampler)
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)


def num_batches(size: int, workers: int, batch_size: int, drop_last: bool) -> int:
    """Return how many batches each of the workers gets of ``size`` examples: as many as every other worker."""
    if drop_last:
        return size // workers // batch_size
    largest_share = -(-size // workers)
    return -(-largest_share // batch_size)


def check_size(size: int, workers: int, batch_size: int, drop_last: bool) -> None:
    """Raise ``InputError`` if there is not a batch for every worker."""
    if size < workers:
        raise InputError(f"{size} examples cannot be dealt among {workers} workers: give at least one to each")
    if num_batches(size, workers, batch_size, drop_last) == 0:
        raise InputError(
            f"{size} examples are no full batch of {batch_size} for each of {workers} workers: "
            "take a smaller batch_size, or drop_last=False"
        )


def deal(
    items: Sequence[Item], position: int, workers: int, batch_size: int, drop_last: bool = False
) -> list[list[Item]]:
    """Return the batches of the worker at ``position``.

    All workers get the same number of batches, since workers in lockstep wait for each other's. No item goes to two
    workers. Every item goes to one, except those that ``drop_last`` drops. Shares differ by at most one item; where
    that would make one batch more on some workers, the others' last but one batch is smaller. With batches of one item
    it cannot be: there, a worker repeats one of its own.
    """
    share = list(items[position::workers])
    count = num_batches(len(items), workers, batch_size, drop_last)
    if drop_last:
        return [share[at * batch_size : (at + 1) * batch_size] for at in range(count)]
    share += share[: max(0, count - len(share))]
    batches, start = [], 0
    for num_after in reversed(range(count)):
        # At least one item is left for each of the batches after this one.
        end = min(start + batch_size, len(share) - num_after)
        batches.append(share[start:end])
        start = end
    return batches


def cut(items: Sequence[Item], batch_size: int, drop_last: bool) -> list[list[Item]]:
    """Return the batches of a common pool: all items in order, the last batch smaller or dropped."""
    end = len(items) - len(items) % batch_size if drop_last else len(items)
    return [list(items[at : min(at + batch_size, end)]) for at in range(0, end, batch_size)]


def fingerprint(order: Sequence[Any], indices: Sequence[Any]) -> str:
    """Return a short text that tells apart orders, and subsets of a data set, that are not the same."""
    return f"{len(order)} {list(order[:64])} {list(indices[:64])}"


def read_fingerprint(value: bytes | None) -> bytes | None:
    """Return the fingerprint that another worker has published; None if it is none."""
    return value if value is not None and re.fullmatch(rb"[0-9]{1,15} \[[^\n]*\] \[[^\n]*\]", value) else None
