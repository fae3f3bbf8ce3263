"""Stochastic gradient push: every worker sends half of its model to one other in every step, along a directed graph.

In the paper's symbols a worker has a numerator x_i and a weight w_i, 1 at the start. Its model is ``z_i = x_i / w_i``:
gradients are evaluated there.

    x_i ← Update(x_i, gradient at z_i) ;  send (x_i/2, w_i/2) to one worker ;  keep the other half ;  add what arrives

    z, w             worker.x, scalars["weight"]; the numerator is x·w

The code keeps the model itself in ``worker.x``, sends it with the weight w_i/2, and takes the weighted mean of what it
kept and what arrives, which is the same. Nothing changes ``x`` while it is in flight, so no snapshot is needed.

``Σ_i w_i z_i`` moves only by the workers' updates and ``Σ_i w_i`` not at all, what is in flight included. As long as
every worker receives one message per step, all weights are 1 and z is the plain average. If a worker is gone, the one
that would send to it keeps that half, and the one that would receive from it gets nothing: weights differ from then on,
and the weighted mean is still kept. A worker that joins begins with weight 1.

Who sends to whom in step t (``graph``), with n workers:

    exponential      i → i + 2^k mod n,  k = t mod ⌈log2 n⌉; exact consensus after ⌈log2 n⌉ steps if n is a power of two
    ring             i → i + 1 and i → i − 1 in turn, so that it stays connected if a worker is gone
    pairs            the topology's schedule of pairs, both ways: the synchronous pairwise average

With ``overlap`` a message is added one step after it was sent, before that step's Update, and is in flight during the
gradient.

What travels: one vector of parameters and one number per worker and step, ``4P + 8`` bytes sent in float32. Extra
memory: one buffer for what arrives.

Reference: Assran, Loizou, Ballas, Rabbat, "Stochastic Gradient Push for Distributed Deep Learning", ICML 2019.
Deviation: the graphs ``ring`` and ``pairs`` are ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gossamer.effects import MethodGenerator, Shift, Start, Update, Wait, yields
from gossamer.errors import InputError
from gossamer.methods.method import Method, MethodConfig
from gossamer.methods.quasi_global import AveragingConfig
from gossamer.settings import option
from gossamer.topology import Topology
from gossamer.vectors.vector_math import combine
from gossamer.worker import Worker

if TYPE_CHECKING:
    from torch import Tensor

GRAPHS = ("exponential", "ring", "pairs")


@dataclass(frozen=True, kw_only=True)
class SGPConfig(AveragingConfig):
    graph: str = option("exponential", "who sends to whom", choices=GRAPHS)
    overlap: bool = option(False, "add a message one step after it was sent", metavar="BOOL")


class SGP(Method):
    """Push-sum of the models over a directed graph, one message per step."""

    name = "sgp"
    summary = "every step half of the model goes to one other worker, along a directed graph (Assran et al. 2019)"
    Config: ClassVar[type[MethodConfig]] = SGPConfig
    uses_topology = False
    planned_options = ({}, {"overlap": True})

    def __init__(self, config: SGPConfig, topology: Topology) -> None:
        super().__init__(config, topology)
        self.graph, self.overlap = config.graph, config.overlap
        if self.graph == "pairs" and not only_pairs(topology):
            raise InputError(
                f"--graph is pairs, but the schedule of {topology.name} has other groups: expected a topology such as "
                "ring or one-peer-exponential, or another --graph"
            )

    def on_topology_change(self, topology: Topology) -> None:
        super().on_topology_change(topology)
        # Its schedule for another number of workers may have larger groups.
        wanted = self.config.graph
        self.graph = "exponential" if wanted == "pairs" and not only_pairs(topology) else wanted

    @yields(Update, Shift, Start, Wait)
    def step(self, worker: Worker) -> MethodGenerator:
        if self.overlap:
            yield from self.merge(worker)
        weight = worker.scalars.setdefault("weight", 1.0)
        if weight == 1.0:
            yield Update()
        else:
            # The update is added to the numerator.
            worker.x.mul_(weight)
            try:
                yield Update()
            finally:
                # Also if the step is abandoned here.
                worker.x.mul_(1.0 / weight)
        yield from self.push(worker)
        if not self.overlap:
            yield from self.merge(worker)

    def push(self, worker: Worker) -> MethodGenerator:
        """Start to send half of the weight."""
        to, source = self.route(worker, worker.step)
        half = 0.0 if to == worker.rank else 0.5 * worker.scalars["weight"]
        worker.scalars["weight"] -= half
        worker.scalars["in_flight"] = half
        worker.tickets["push"] = yield Start(
            Shift(worker.x, to=to, source=source, round=worker.step, topic="push", scalars=(half,))
        )

    def merge(self, worker: Worker) -> MethodGenerator:
        """Wait for the message in flight, if there is one, and add it."""
        ticket = worker.tickets.get("push")
        if ticket is None:
            return
        received, scalars, delivered = yield Wait(ticket)
        # Only now: if the step is abandoned while it waits, ``finish`` still finds the ticket.
        worker.tickets.pop("push", None)
        # A worker that is left alone has taken it back already (on_membership_change).
        in_flight = worker.scalars.pop("in_flight", 0.0)
        if not delivered:
            worker.scalars["weight"] += in_flight
        if received is not None and scalars[0] > 0.0:
            kept, arrived = worker.scalars["weight"], scalars[0]
            worker.scalars["weight"] = total = kept + arrived
            combine((worker.x, kept / total, ((arrived / total, received),)))

    def route(self, worker: Worker, round: int) -> tuple[int, int]:
        """Return the rank to which the worker sends in this round, and the one from which it receives."""
        rank, n = worker.rank, worker.num_workers
        if self.graph == "pairs":
            group = worker.topology.group(round, rank).members
            peer = next((member for member in group if member != rank), rank)
            return peer, peer
        hop = 1 << round % max((n - 1).bit_length(), 1)
        if self.graph == "ring":
            hop = -1 if round % 2 else 1
        return (rank + hop) % n, (rank - hop) % n

    def on_membership_change(self, worker: Worker) -> None:
        """Take back what was in flight: ``x`` has not changed since it was sent."""
        if "in_flight" in worker.scalars:
            worker.scalars["weight"] += worker.scalars.pop("in_flight")
        super().on_membership_change(worker)

    def steps_until_shared(self, step: int) -> int:
        # With overlap a message is added in the step after.
        return int(self.overlap)

    def conserved(self, worker: Worker) -> Tensor:
        """Return the numerator: the sum of all w·z moves only by updates."""
        return worker.x * worker.scalars.get("weight", 1.0)

    @yields(Wait)
    def finish(self, worker: Worker) -> MethodGenerator:
        yield from self.merge(worker)


def only_pairs(topology: Topology) -> bool:
    return all(len(group.members) == 2 and group.strength == 1.0 for groups in topology.rounds for group in groups)
