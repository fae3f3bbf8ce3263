"""Topology: the graph of workers, its schedule of rounds, and how well both mix."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from gossamer.errors import InputError
from gossamer.topology import mixing, schedules, spectra
from gossamer.topology.schedules import Group, Rounds
from gossamer.topology.spectra import Constants
from gossamer.topology.structures import EdgeGraph, Structure

if TYPE_CHECKING:
    import networkx as nx

MAX_CACHED_DEGREE = 256
"""Longer lists of neighbours are not cached: those of a complete graph would fill the memory."""


class Topology:
    """A connected graph of workers 0..n-1 with a schedule of averaging rounds.

    ``gossamer.topology.build`` returns one. Expensive properties are computed at their first use and cached.
    """

    def __init__(
        self,
        name: str,
        *,
        structure: Structure | None = None,
        schedule: Callable[[], Rounds] | None = None,
        workers: int | None = None,
        note: str = "",
        layout: str = "spring",
    ) -> None:
        """Take a structure, a schedule, or both.

        Without a structure, the edges are all pairs that the schedule brings together. Without a schedule, the rounds
        are the classes of an edge colouring. ``layout`` is how ``draw`` places the workers.
        """
        self.name = name
        self.note = note
        self.layout = layout
        self._given_structure = structure
        self._schedule = schedule
        if structure is not None:
            workers = structure.workers
        assert workers is not None, "a topology without a structure needs a number of workers"
        self.workers: int = workers
        self._neighbours: dict[int, tuple[int, ...]] = {}
        self._contraction: float | None = None
        self.spec: tuple[str, int | None, int] | None = None
        """Name with its option, number of machines and seed, if ``build`` has built it by name."""

    def __repr__(self) -> str:
        return f"Topology({self.name!r}, workers={self.workers})"

    @cached_property
    def structure(self) -> Structure:
        """The graph as it is stored."""
        if self._given_structure is not None:
            return self._given_structure
        return EdgeGraph(self.workers, schedules.edges_of(self.rounds))

    @property
    def num_edges(self) -> int:
        """The number of edges."""
        return self.structure.num_edges

    @property
    def edges(self) -> np.ndarray:
        """All edges, int64 [E, 2] with i < j, sorted."""
        return self.structure.edges

    @property
    def degrees(self) -> np.ndarray:
        """The number of neighbours of each worker."""
        return self.structure.degrees

    def neighbours(self, rank: int) -> tuple[int, ...]:
        """Return the neighbours of ``rank``, sorted."""
        cached = self._neighbours.get(rank)
        if cached is not None:
            return cached
        neighbours = self.structure.neighbours(self._checked(rank))
        if len(neighbours) <= MAX_CACHED_DEGREE:
            self._neighbours[rank] = neighbours
        return neighbours

    def rates(self, rate: float = 1.0) -> np.ndarray:
        """Return each edge's exchanges per unit of time, λ_ij = (r/2)(1/d_i + 1/d_j), in the order of ``edges``."""
        return spectra.edge_rates(self.structure, _checked_rate(rate))

    def graph(self) -> nx.Graph:
        """Return the graph as a networkx graph with nodes 0..n-1."""
        import networkx as nx

        graph = nx.Graph(name=self.name)
        graph.add_nodes_from(range(self.workers))
        graph.add_edges_from(self.edges.tolist())
        return graph

    @cached_property
    def rounds(self) -> Rounds:
        """The groups of two and more workers in each round of the period; other workers do not average."""
        rounds = self._schedule() if self._schedule is not None else schedules.colour_classes(self.workers, self.edges)
        return rounds or ((),)

    @property
    def period(self) -> int:
        """The number of rounds after which the schedule repeats."""
        return len(self.rounds)

    def group(self, round: int, rank: int) -> Group:
        """Return the group of ``rank`` in a round, itself included; the schedule repeats without end."""
        group = self._table[round % len(self._table)].get(rank)
        return group if group is not None else Group((self._checked(rank),))

    @cached_property
    def _table(self) -> list[dict[int, Group]]:
        return [{rank: group for group in groups for rank in group.members} for groups in self.rounds]

    def constants(self, rate: float = 1.0) -> Constants:
        """Return χ1, χ2, η, α̃ and the spectral gap at an exchange rate; ``spectra`` defines them."""
        return self._constants.at_rate(_checked_rate(rate))

    @cached_property
    def _constants(self) -> Constants:
        return spectra.constants(self.structure)

    def contraction(self) -> float:
        """Return the largest share of a difference that one period of rounds can leave; about 0 for exact consensus."""
        if self._contraction is None:
            self._contraction = mixing.contraction(self.workers, self._mixing_rounds)
        return self._contraction

    def rounds_to_consensus(self) -> int | None:
        """Return the number of rounds after which all workers agree to round-off; None if they never do."""
        return mixing.rounds_to_consensus(self.workers, self._mixing_rounds)

    @cached_property
    def mixing_rounds(self) -> list[mixing.MixingRound]:
        """The rounds of a period as operators on many values at once."""
        return [mixing.MixingRound(groups) for groups in self._mixing_rounds]

    @cached_property
    def rate_spectrum(self) -> np.ndarray:
        """The eigenvalues of the exchange rates' Laplacian Λ at rate 1 without the 0 of the mean, ascending."""
        return spectra.rate_spectrum(self.structure)

    @property
    def _mixing_rounds(self) -> Rounds:
        return self.rounds if self.workers > 1 else ()

    def _checked(self, rank: int) -> int:
        if not 0 <= rank < self.workers:
            raise InputError(
                f"there is no worker {rank}: {self.name} has workers 0..{self.workers - 1}; give one of them"
            )
        return rank


def _checked_rate(rate: float) -> float:
    if not (rate > 0 and math.isfinite(rate)):
        raise InputError(f"an exchange rate cannot be {rate}: expected a number above 0, e.g. 1.0; give one")
    return rate
