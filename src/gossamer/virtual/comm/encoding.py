"""Models that are encoded on the wire (``gossamer.wire``), between virtual workers.

What a codec does to the numbers is recorded on the tape, as all other arithmetic. So whether a message can be decoded
is not known yet when its answer is delivered. An exchange that cannot be decoded answers both workers with their own
vectors: nothing is exchanged. That is what real workers get too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gossamer import wire
from gossamer.effects import Mean
from gossamer.virtual.compute.tape import Tape
from gossamer.wire import Codec, Links, MeanLink


class Encoding:
    """How the workers of a cluster encode what they send."""

    def __init__(self, codec: Codec, seed: int, num_workers: int, tape: Tape) -> None:
        self.codec, self.seed, self.tape = codec, seed, tape
        self._links = [Links(codec, seed, rank) for rank in range(num_workers)]
        self._mean_links: dict[tuple[int, str], MeanLink] = {}

    def swap_bytes(self, vector: Any) -> int:
        return wire.exchange_bytes(self.codec, vector.numel(), vector.element_size())

    def mean_bytes(self, vector: Any, num_members: int) -> int:
        return wire.mean_bytes(self.codec, vector.numel(), num_members, vector.element_size())

    def swap(self, one: int, sent: Any, other: int, others: Any) -> tuple[Any, Any]:
        """Return what the two workers receive for the vectors that they send each other."""
        links = self._links[one].to(other), self._links[other].to(one)

        def run(vectors: list[Tensor], outs: list[Tensor]) -> None:
            wire.exchange(links, (vectors[0], vectors[1]), (outs[0], outs[1]))

        answers = self.tape.record(run, [sent, others])
        return answers[0], answers[1]

    def mean(self, ranks: Sequence[int], effects: Sequence[Mean]) -> list[Any]:
        """Return the answer of every member of a mean."""
        topic, same = effects[0].topic, effects[0].same
        links = [self._mean_link(rank, topic) for rank in ranks]
        weights = [effect.weight for effect in effects]

        def run(vectors: list[Tensor], outs: list[Tensor]) -> None:
            wire.average(links, vectors, outs, weights, same)

        return self.tape.record(run, [effect.vector for effect in effects])

    def _mean_link(self, rank: int, topic: str) -> MeanLink:
        if (rank, topic) not in self._mean_links:
            self._mean_links[rank, topic] = MeanLink(self.codec, self.seed + rank)
        return self._mean_links[rank, topic]

    def forget(self, rank: int) -> None:
        """Drop what a worker that joins knew about its peers."""
        self._links[rank] = Links(self.codec, self.seed, rank)
        self._mean_links = {key: link for key, link in self._mean_links.items() if key[0] != rank}
