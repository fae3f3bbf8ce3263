"""Asynchronous pairwise gossip: the baseline that A²CiD² accelerates.

Workers do gradient steps at their own pace. In the background, each averages with one neighbour at a time:

    gradient:   Update(x)
    exchange:   s = x ;  send s, receive s' ;  x −= ½ (s − s')

Both peers apply the same difference ``s − s'``. So an exchange does not change the mean of all workers, and no step
that a worker did while the message was in flight is lost.

What travels: one vector of parameters each way per exchange, ``rate`` exchanges per gradient, so ``rate · 4P`` bytes
sent per worker and step in float32. Extra memory: one snapshot of the parameters, and one buffer for the peer's.

Reference: the η = 0, α = α̃ = ½ case of Nabli, Belilovsky, Oyallon, "A²CiD²", NeurIPS 2023.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gossamer.effects import MethodGenerator, Pair, Swap, yields
from gossamer.methods.method import Method, MethodConfig
from gossamer.methods.quasi_global import AveragingConfig
from gossamer.settings import option
from gossamer.topology import Topology
from gossamer.topology.disagreement import Disagreement, Pairwise
from gossamer.vectors.vector_math import combine
from gossamer.worker import Worker


@dataclass(frozen=True, kw_only=True)
class GossipConfig(AveragingConfig):
    """Settings of the pairwise gossip methods."""

    rate: float = option(1.0, "exchanges per worker and gradient", above=0)


class Gossip(Method):
    """Asynchronous pairwise averaging with neighbours, without acceleration."""

    name = "gossip"
    summary = "asynchronous pairwise averaging with neighbours; no worker waits (A²CiD² without its momentum)"
    Config: ClassVar[type[MethodConfig]] = GossipConfig
    planned_options = ({"rate": 0.5}, {"rate": 1.0}, {"rate": 2.0})

    def __init__(self, config: GossipConfig, topology: Topology) -> None:
        super().__init__(config, topology)
        self.rate = config.rate

    def disagreement(self) -> Disagreement:
        return Pairwise(self.topology, self.rate)

    @yields(Pair, Swap)
    def background(self, worker: Worker) -> MethodGenerator:
        ready = Pair(self.rate)
        while True:
            peer = yield ready
            sent = worker.snapshot()
            received = yield Swap(sent, peer)
            if received is not None:
                combine((worker.x, 1.0, ((-0.5, sent), (0.5, received))))
            # Free the memory while the worker waits for its next peer.
            del sent, received
