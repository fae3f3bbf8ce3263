"""Schedules: which workers average with each other in which round.

In a round every worker is in exactly one group: x_i += strength · (mean of the group − x_i). A schedule lists the
groups of two and more workers for each round of its period; a worker in none of them keeps its parameters in that
round.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np


@dataclass(frozen=True, slots=True)
class Group:
    """Workers that average in one round."""

    members: tuple[int, ...]
    """Their ranks, sorted."""
    strength: float = 1.0
    """How far each moves towards their mean; 1: all the way."""


Rounds = tuple[tuple[Group, ...], ...]


def everyone(workers: int) -> Rounds:
    """Return one round with one group of all workers."""
    return ((Group(tuple(range(workers))),),) if workers > 1 else ()


def along_axes(shape: tuple[int, ...]) -> Rounds:
    """Return rounds of pairs along the rings of a torus, one axis after the other, the last axis first.

    A ring of even length needs two rounds, of odd length three, of two workers one. A hypercube is the torus of shape
    (2, 2, …): round k pairs i with i xor 2^k, and all workers agree after one round per dimension.
    """
    ranks = np.arange(prod(shape)).reshape(shape)
    rounds = []
    for axis in reversed(range(len(shape))):
        length = shape[axis]
        lines = np.moveaxis(ranks, axis, -1).reshape(-1, length)
        last_even = length - length % 2
        second = range(1, length if length > 2 else 1, 2)
        third = range(last_even, length if length > 2 else last_even)
        for positions in (range(0, last_even, 2), second, third):
            pairs = [(int(line[p]), int(line[(p + 1) % length])) for p in positions for line in lines]
            if pairs:
                rounds.append(tuple(Group((min(pair), max(pair))) for pair in sorted(pairs)))
    return tuple(rounds)


def colour_classes(workers: int, edges: np.ndarray) -> Rounds:
    """Return rounds of disjoint pairs that together use every edge once: a proper edge colouring.

    Greedy: each edge, in order, takes the first colour that is free at both ends. It needs at most 2Δ − 1 rounds, Δ the
    largest degree, and is deterministic.
    """
    taken = [0] * workers  # bit c of taken[i]: worker i has an edge of colour c
    classes: list[list[Group]] = []
    for i, j in edges.tolist():
        used = taken[i] | taken[j]
        bit = ~used & (used + 1)  # the lowest zero bit
        taken[i] |= bit
        taken[j] |= bit
        colour = bit.bit_length() - 1
        if colour == len(classes):
            classes.append([])
        classes[colour].append(Group((i, j)))
    return tuple(tuple(groups) for groups in classes)


def alternating_exponential_ring(nodes: int, per_node: int) -> Rounds:
    """Return the schedule of Wang et al. (ICLR 2025) for 2^m nodes with ``per_node`` workers each.

    Rank r is on node r // per_node. Each node distance 2^k has two rounds. In the first, every other pair of nodes u
    and u xor 2^k averages over both nodes, and the other nodes average inside; in the second, the roles swap. After
    both rounds every pair has averaged exactly, and after all distances all workers have. Only half of the nodes use
    the slow links at a time.
    """
    inside = [tuple(range(node * per_node, (node + 1) * per_node)) for node in range(nodes)]
    if nodes == 1:
        return everyone(per_node)
    rounds = []
    distance = 1
    while distance < nodes:
        pairs = [(u, u + distance) for u in range(nodes) if not u & distance]
        for half in (0, 1):
            groups = []
            for index, (u, v) in enumerate(pairs):
                joined = index % 2 == half
                groups += [inside[u] + inside[v]] if joined else [inside[u], inside[v]]
            rounds.append(tuple(Group(members) for members in sorted(groups) if len(members) > 1))
        distance *= 2
    return tuple(rounds)


def base(workers: int, k: int) -> Rounds:
    """Return a Base-(k+1) schedule: exact consensus in finitely many rounds for every number of workers.

    After Takezawa et al. (NeurIPS 2023). With V the workers and n = |V|:

    - If n is a product of factors ≤ k+1: the hyper-hypercube, one round of plain means for each factor.
    - Otherwise split V. A is the first a·(k+1)^p workers, a the leading digit of n in base k+1; B is the rest, |B| <
      |A|. A's rounds bring it to its mean m_A. One round then pairs each worker of B with its own worker of A, at
      weight w = |A|/n (strength 2w): x_b becomes (1−w)·x_b + w·m_A, so B's mean is now the mean of all. Pairs keep
      their sum, so A's mean is the mean of all too, and A's rounds, repeated, bring A to it. B's own rounds run at the
      same time as A's, before or after the pairing: the order does not matter, because the pairing treats all of B
      alike.
    - Or split n = p·q, p the largest factor that is a product of numbers ≤ k+1: the schedule for q in each of p blocks,
      then the hyper-hypercube across the blocks. The shorter of the two splits is used.

    This is our variant. It mixes only by groups of at most k+1 workers with one strength each, the one kind of mixing
    that the methods support. For k = 1 it has as many rounds as the paper's. For k ≥ 2 the paper joins each worker of B
    to several workers of A at once, with a weight per edge, and saves A's repeated round for the factor a.
    """
    return tuple(tuple(sorted(groups, key=_members)) for groups in _base_rounds(range(workers), k))


def _base_rounds(ranks: Sequence[int], k: int) -> list[list[Group]]:
    n = len(ranks)
    factors = fewest_factors(n, k + 1)
    if factors is not None:
        return _hyper_hypercube(ranks, factors)
    split = _split_rounds(ranks, k)
    smooth = _smooth_part(n, k + 1)
    if smooth == 1:
        return split
    size = n // smooth
    blocks = [ranks[start : start + size] for start in range(0, n, size)]
    blocked = _concurrent([_base_rounds(block, k) for block in blocks])
    columns = [[block[position] for block in blocks] for position in range(size)]
    across = fewest_factors(smooth, k + 1)
    assert across is not None
    blocked += _concurrent([_hyper_hypercube(column, across) for column in columns])
    return min(blocked, split, key=len)


def _split_rounds(ranks: Sequence[int], k: int) -> list[list[Group]]:
    n = len(ranks)
    power = 1
    while power * (k + 1) <= n:
        power *= k + 1
    size = n // power * power
    part_a, part_b = ranks[:size], ranks[size:]
    schedule_a, schedule_b = _base_rounds(part_a, k), _base_rounds(part_b, k)
    strength = 2 * size / n
    pairing = [Group((a, b), strength) for a, b in zip(part_a, part_b, strict=False)]
    before = _concurrent([schedule_a, schedule_b[: len(schedule_a)]])
    after = _concurrent([schedule_a, schedule_b[len(schedule_a) :]])
    return [*before, pairing, *after]


def _concurrent(schedules: list[list[list[Group]]]) -> list[list[Group]]:
    return [list(itertools.chain(*rounds)) for rounds in itertools.zip_longest(*schedules, fillvalue=[])]


def _hyper_hypercube(ranks: Sequence[int], factors: Sequence[int]) -> list[list[Group]]:
    """Return one round per factor: in the mixed radix of the factors, the members of a group differ in one digit."""
    grid = np.asarray(ranks).reshape(tuple(reversed(factors)))
    rounds = []
    for axis in reversed(range(grid.ndim)):
        groups = np.moveaxis(grid, axis, -1).reshape(-1, grid.shape[axis])
        rounds.append([Group(tuple(sorted(members))) for members in groups.tolist()])
    return rounds


@lru_cache(maxsize=4096)
def fewest_factors(n: int, largest: int) -> tuple[int, ...] | None:
    """Return n as a product of as few factors ≤ ``largest`` as possible; None if a prime factor is larger."""
    if n == 1:
        return ()
    best: tuple[int, ...] | None = None
    for factor in range(min(n, largest), 1, -1):
        if n % factor == 0:
            rest = fewest_factors(n // factor, largest)
            if rest is not None and (best is None or len(rest) + 1 < len(best)):
                best = (factor, *rest)
    return best


def _smooth_part(n: int, largest: int) -> int:
    """Return the largest factor of n that is a product of numbers ≤ ``largest``."""
    part = 1
    for factor in range(2, largest + 1):
        while n % factor == 0:
            n //= factor
            part *= factor
    return part


def _members(group: Group) -> tuple[int, ...]:
    return group.members


def edges_of(rounds: Rounds) -> np.ndarray:
    """Return every pair of workers that some group contains, as an array [E, 2]."""
    groups = {group.members for groups in rounds for group in groups}
    pairs = [pair for members in groups for pair in itertools.combinations(members, 2)]
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)
