"""A²CiD²: asynchronous pairwise gossip, accelerated by a continuous local momentum.

In the paper's symbols, with ``N^i`` the gradient spikes of worker i and ``M^ij`` the exchange spikes of an edge::

    dx_i  = η (x̃_i − x_i) dt − γ g_i dN^i − α Σ_j (x_i − x_j) dM^ij
    dx̃_i = η (x_i − x̃_i) dt − γ g_i dN^i − α̃ Σ_j (x_i − x_j) dM^ij

It is computed in the coordinates ``(x, z)`` with ``z = x̃ − x`` (``worker.x`` and ``worker.vector("z")``). The gradient
term cancels out of ``z``, so the optimizer touches only ``x`` and any optimizer works::

    advance to now:  c = (1 − e^(−2ηΔ)) / 2 ;  x += c·z ;  z *= 1 − 2c       Δ: time since this worker's last event
    gradient:        at x advanced to now ;  Update(x)
    exchange:        s = x advanced to now ;  send s, receive s' ;  advance ;
                     x −= ½ (s − s') ;  z −= (α̃ − ½)(s − s')

A gradient does not touch ``z``, so (weight decay apart) its update commutes with advancing: it is evaluated at the
advanced parameters, and so is the snapshot taken, but the advance is only written down when an exchange ends, which
spares the training several passes over ``x`` and ``z``.

The snapshots of both peers are advanced *before* they travel and both use the same difference; exchanging first and
advancing afterwards makes the difference lopsided and loses about half of the acceleration.

``η = 1/(2√(χ1 χ2))`` and ``α̃ = ½ √(χ1/χ2)`` come from the graph and the exchange rate (``gossamer.topology``), α = ½.
On graphs where χ1 = χ2 (complete) it is plain gossip.

What travels: one vector of parameters each way per exchange, ``rate`` exchanges per gradient, so ``rate · 4P`` bytes
sent per worker and step in float32: exactly gossip's. Extra memory: ``z``, one snapshot and one buffer for the peer's.

Reference: Nabli, Belilovsky, Oyallon, "A²CiD²: Accelerating Asynchronous Communication in Decentralized Deep
Learning", NeurIPS 2023. Deviation: time is each worker's own, in units of its average gradient.
"""

from __future__ import annotations

import math
from typing import ClassVar

from torch import Tensor

from gossamer.effects import MethodGenerator, Pair, Swap
from gossamer.methods.gossip import GossipConfig
from gossamer.methods.method import Method, MethodConfig
from gossamer.topology import Topology
from gossamer.topology.disagreement import Disagreement, Pairwise
from gossamer.vector_math import combine
from gossamer.worker import Worker


def drift(eta: float, elapsed: float) -> float:
    """The share ``c`` of ``z`` that flows into ``x`` in ``elapsed`` units of time."""
    return -math.expm1(-2.0 * eta * elapsed) / 2.0


class A2CiD2(Method):
    """Asynchronous gossip with a continuous momentum between ``x`` and its companion ``x̃``."""

    name = "a2cid2"
    summary = "asynchronous gossip accelerated by a continuous momentum; nobody waits (Nabli et al. 2023)"
    Config: ClassVar[type[MethodConfig]] = GossipConfig
    pairwise = True

    def __init__(self, config: GossipConfig, topology: Topology) -> None:
        super().__init__(config, topology)
        self.rate = config.rate
        constants = topology.constants(config.rate)
        self.eta, self.alpha_tilde = constants.eta, constants.alpha_tilde

    def advance(self, worker: Worker) -> None:
        """Let the momentum act up to now."""
        c = self.flow(worker)
        if c > 0.0:
            z = worker.vector("z")
            worker.x.add_(z, alpha=c)
            z.mul_(1.0 - 2.0 * c)

    def flow(self, worker: Worker) -> float:
        """The share of ``z`` that flows into ``x`` up to now, to which the worker counts as advanced from here on."""
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

    def finish(self, worker: Worker) -> MethodGenerator:
        self.advance(worker)
        yield from ()

    def disagreement(self) -> Disagreement:
        return Pairwise(self.topology, self.rate, self.eta, self.alpha_tilde)

    def background(self, worker: Worker) -> MethodGenerator:
        ready, beyond = Pair(self.rate), self.alpha_tilde - 0.5
        while True:
            peer = yield ready
            sent = worker.snapshot(self.eval_point)
            received = yield Swap(sent, peer)
            if received is None:
                self.advance(worker)
            else:
                c, z = self.flow(worker), worker.vector("z")
                # One pass over memory for what happened until now, and for meeting half-way and the momentum's push.
                combine(
                    (worker.x, 1.0, ((c, z), (-0.5, sent), (0.5, received))),
                    (z, 1.0 - 2.0 * c, ((-beyond, sent), (beyond, received))),
                )
            # Not kept while the worker waits for its next peer.
            del sent, received
