"""A²CiD²: asynchronous pairwise gossip, accelerated by a continuous local momentum.

In the paper's symbols, with ``N^i`` the gradient events of worker i and ``M^ij`` the exchange events of an edge:

    dx_i  = η (x̃_i − x_i) dt − γ g_i dN^i − α Σ_j (x_i − x_j) dM^ij
    dx̃_i = η (x_i − x̃_i) dt − γ g_i dN^i − α̃ Σ_j (x_i − x_j) dM^ij

The code uses the coordinates ``(x, z)`` with ``z = x̃ − x`` (``worker.x`` and ``worker.vector("z")``). The gradient
term cancels out of ``z``, so the optimizer changes only ``x``, and any optimizer works:

    advance to now:  c = (1 − e^(−2ηΔ)) / 2 ;  x += c·z ;  z *= 1 − 2c       Δ: time since this worker's last event
    gradient:        at x advanced to now ;  Update(x)
    exchange:        s = x advanced to now ;  send s, receive s' ;  advance ;
                     x −= ½ (s − s') ;  z −= (α̃ − ½)(s − s')

A gradient step does not change ``z``, so its update commutes with advancing (except for weight decay). Gradients and
snapshots are evaluated at the advanced parameters, but ``x`` and ``z`` are advanced in memory only when an exchange
ends. That saves the training several passes over both.

Both peers advance their snapshots *before* they send them, and both use the same difference. To exchange first and
advance afterwards would use two different differences and lose about half of the acceleration.

``η = 1/(2√(χ1 χ2))`` and ``α̃ = ½ √(χ1/χ2)`` come from the graph and the exchange rate (``gossamer.topology``), α = ½.
On graphs with χ1 = χ2 (complete graphs) the method is plain gossip.

What travels: one vector of parameters each way per exchange, ``rate`` exchanges per gradient, so ``rate · 4P`` bytes
sent per worker and step in float32, exactly as in gossip. Extra memory: ``z``, one snapshot, and one buffer for the
peer's.

Reference: Nabli, Belilovsky, Oyallon, "A²CiD²: Accelerating Asynchronous Communication in Decentralized Deep
Learning", NeurIPS 2023. Deviation: every worker has its own time, in units of its average gradient.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from gossamer.effects import MethodGenerator, Pair, Swap, yields
from gossamer.methods.gossip import GossipConfig
from gossamer.methods.method import Method, MethodConfig
from gossamer.topology import Topology
from gossamer.topology.disagreement import Disagreement, Pairwise
from gossamer.vectors.vector_math import combine
from gossamer.worker import Worker

if TYPE_CHECKING:
    from torch import Tensor


def drift(eta: float, elapsed: float) -> float:
    """Return the share ``c`` of ``z`` that flows into ``x`` in ``elapsed`` units of time."""
    return -math.expm1(-2.0 * eta * elapsed) / 2.0


class A2CiD2(Method):
    """Asynchronous gossip with a continuous momentum between ``x`` and its companion ``x̃``."""

    name = "a2cid2"
    summary = "asynchronous gossip accelerated by a continuous momentum; no worker waits (Nabli et al. 2023)"
    Config: ClassVar[type[MethodConfig]] = GossipConfig
    planned_options = ({"rate": 0.5}, {"rate": 1.0}, {"rate": 2.0})

    def __init__(self, config: GossipConfig, topology: Topology) -> None:
        super().__init__(config, topology)
        self.rate = config.rate
        self.on_topology_change(topology)

    def on_topology_change(self, topology: Topology) -> None:
        super().on_topology_change(topology)
        constants = topology.constants(self.rate)
        self.eta, self.alpha_tilde = constants.eta, constants.alpha_tilde

    def advance(self, worker: Worker) -> None:
        c = self.flow(worker)
        if c > 0.0:
            z = worker.vector("z")
            worker.x.add_(z, alpha=c)
            z.mul_(1.0 - 2.0 * c)

    def flow(self, worker: Worker) -> float:
        """Return the share of ``z`` that flows into ``x`` until now, and note that the worker is advanced to now."""
        now, scalars = worker.time, worker.scalars
        c = drift(self.eta, now - scalars.get("advanced_to", now))
        scalars["advanced_to"] = now
        return c

    def eval_point(self, worker: Worker, out: Tensor) -> None:
        now = worker.time
        c = drift(self.eta, now - worker.scalars.setdefault("advanced_to", now))
        if c > 0.0:
            combine((out, 0.0, ((1.0, worker.x), (c, worker.vector("z")))))
        else:
            out.copy_(worker.x)

    @yields()
    def finish(self, worker: Worker) -> MethodGenerator:
        self.advance(worker)
        yield from ()

    def conserved(self, worker: Worker) -> Tensor:
        """Return ½(x + x̃): what flows from ``z`` into ``x`` at different times does not cancel out of the sum of x."""
        return worker.x + 0.5 * worker.vector("z")

    def disagreement(self) -> Disagreement:
        return Pairwise(self.topology, self.rate, self.eta, self.alpha_tilde)

    @yields(Pair, Swap)
    def background(self, worker: Worker) -> MethodGenerator:
        ready = Pair(self.rate)
        while True:
            peer = yield ready
            sent = worker.snapshot(self.eval_point)
            received = yield Swap(sent, peer)
            if received is None:
                self.advance(worker)
            else:
                c, z, push = self.flow(worker), worker.vector("z"), self.alpha_tilde - 0.5
                # Advance to now, move half-way to the peer and push the momentum, in one pass over memory.
                combine(
                    (worker.x, 1.0, ((c, z), (-0.5, sent), (0.5, received))),
                    (z, 1.0 - 2.0 * c, ((-push, sent), (push, received))),
                )
            # Free the memory while the worker waits for its next peer.
            del sent, received
