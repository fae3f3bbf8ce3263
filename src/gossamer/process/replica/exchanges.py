"""Exchanges of one rank of a replica with the same rank of another: of vectors, and of states.

The first ranks of two replicas pair as workers do. The exchange has a number, by which all their ranks know that they
talk of the same one: it travels along with the vectors.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.effects import Pair, Swap
from gossamer.errors import MethodError
from gossamer.process.pairwise.edge import Edge, EdgeLost
from gossamer.process.pairwise.exchanges import CONSENSUS_EVERY, PairwiseExchanges
from gossamer.process.pairwise.pairing import DECLINE, OFFER
from gossamer.process.replica.background import COMPLETED, END, EXCHANGE, LOST, TAKE, Decision, Moved, Row
from gossamer.process.replica.boundary import Boundary
from gossamer.process.state.state_transfer import move_state
from gossamer.seeds import stream
from gossamer.vectors.copies import Copies
from gossamer.vectors.vector_math import CHUNK

EDGE_WAIT_S = 5.0
"""How long a rank waits for its connection to the other replica, if that is alive: the first ranks have theirs."""

EDGE_POLL_S = 0.005

UNKNOWN = -1.0
"""In place of a distance that was not computed."""


class ReplicaExchanges(PairwiseExchanges):
    boundary: Boundary
    copies: Copies

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        # The method's generator must draw the same on all ranks, and only the first one makes offers.
        self.offer_rng = stream(self.worker.seed, "offers", self.worker.run_rank)
        self._gives: dict[int, threading.Thread] = {}
        """The newest transfer of our state to each peer."""
        self._given_over: dict[int, Edge] = {}
        """On the first rank: the edges over which it is to give its state, by the number of the exchange."""

    # On the first rank

    def decide(self, effect: Pair) -> Decision:
        """Agree on the next exchange, as ``pair`` does."""
        self.delivery.asked(effect.rate)
        while True:
            agreement = self.pairing.agree(self._offer_due_in_s)
            if agreement is None:
                return Decision(END)
            edge, number = agreement.edge, _number(agreement.edge)
            if agreement.gives_state:
                self.pairing.giving(edge)
                self._give_state(edge)
                continue
            if not agreement.takes_state:
                self._note(agreement, effect.rate)
            self._agreement = agreement
            return Decision(TAKE if agreement.takes_state else EXCHANGE, edge.peer, number)

    def _offer_due_in_s(self) -> float:
        # Nobody would take part before the next boundary.
        return float("inf") if self._pauses() else super()._offer_due_in_s()

    def _pauses(self) -> bool:
        return self.boundary.overdue() and not self.pairing.needs_state

    def _on_message(self, edge: Edge, message: tuple[int, ...]) -> None:
        kind, number, peer_needs_state, _ = message
        if kind == OFFER and not peer_needs_state and self._pauses():
            with contextlib.suppress(EdgeLost):
                edge.send(DECLINE, number)
            return
        super()._on_message(edge, message)

    def _give_state(self, edge: Edge) -> None:
        number = _number(edge)
        self._given_over[number] = edge
        self.boundary.give(edge.peer, number)

    # On all ranks

    def move(self, effect: Swap, decision: Decision) -> Moved:
        """Exchange this rank's part of a vector."""
        if decision.kind != EXCHANGE or effect.peer != decision.peer:
            raise MethodError(
                f"background of method {self.state.method.name} yielded Swap with worker {effect.peer}, with which no "
                "Pair was agreed: expected the rank that Pair answered, once"
            )
        sent = self.staging.to_host(effect.vector, "sent")
        received = self.staging.host_buffer("received", sent)
        try:
            edge = self._edge(decision)
            number, *scalars = self._exchange(edge, sent, received, (float(decision.number), *effect.scalars))
            if number != decision.number:
                # One of the replicas has given up an exchange that the other is still in.
                edge.drop()
                raise EdgeLost
        except EdgeLost:
            return Moved((LOST,))
        norms = (float(torch.linalg.vector_norm(vector)) for vector in (sent, received))
        measures = len(sent) <= CHUNK or self.metrics.exchanges % CONSENSUS_EVERY == 0
        apart = self.copies.squared_distance(sent, received) if measures else UNKNOWN
        row = (COMPLETED, *(norm**2 for norm in norms), apart)
        answer = self.staging.to_device(received)
        return Moved(row, (answer, tuple(scalars)) if effect.scalars else answer)

    def judge(self, decision: Decision, rows: Sequence[Row]) -> bool:
        """Return whether to merge an exchange that all ranks have completed, by the norms of the whole vectors."""
        own, peer = (sum(row[column] for row in rows) ** 0.5 for column in (1, 2))
        agreement, self._agreement = self._agreement, None
        merges = self._judge(decision.peer, (own, peer), agreement is not None and agreement.offered)
        if merges and all(row[3] != UNKNOWN for row in rows):
            self.metrics.consensus = (sum(row[3] for row in rows) / 2) ** 0.5
        return merges

    def _edge(self, decision: Decision) -> Edge:
        """Return the connection for an exchange; EdgeLost if there is none."""
        if decision.peer in self._gives:
            self._gives[decision.peer].join()
        return self._edge_to(decision.peer) if self._agreement is None else self._agreement.edge

    def _edge_to(self, peer: int) -> Edge:
        until = time.monotonic() + EDGE_WAIT_S
        while (edge := self.peers.edge(peer)) is None:
            if time.monotonic() > until or self.heartbeats.dead(peer) or self.lifecycle.closed:
                raise EdgeLost
            time.sleep(EDGE_POLL_S)
        return edge

    # States

    def take(self, decision: Decision) -> Moved:
        """Receive this rank's part of the state of another replica."""
        try:
            edge = self._edge(decision)
            self._started, self._exchanging = time.monotonic(), edge
            self._confirm(edge, decision.number)
            return Moved((COMPLETED,), (decision.peer, *move_state(lambda tensor: self._receive(edge, tensor), None)))
        except (EdgeLost, RuntimeError):
            return Moved((LOST,))
        finally:
            self._started, self._exchanging, self._agreement = float("inf"), None, None

    def give(self, peer: int, number: int) -> None:
        """Begin to give this rank's part of the state, as it is now. At a boundary."""
        exported, before = self.state.export_state(), self._gives.get(peer)

        def give() -> None:
            if before is not None:
                before.join()
            agreed = self._given_over.pop(number, None)
            try:
                edge = agreed or self._edge_to(peer)
                self._confirm(edge, number)
                move_state(lambda tensor: self._send(edge, tensor), exported)
            except EdgeLost:
                pass
            finally:
                if agreed is not None:
                    self.pairing.given(agreed)

        self._gives[peer] = threading.Thread(target=give, name=f"gossamer-give-{peer}", daemon=True)
        self._gives[peer].start()

    def _confirm(self, edge: Edge, number: int) -> None:
        """Make sure that both ends talk of the same exchange; EdgeLost if not."""
        words = edge.exchange(torch.zeros(1), torch.zeros(1), self.max_duration_s, (float(number),))
        if not words or words[0] != number:
            edge.drop()
            raise EdgeLost

    def _receive(self, edge: Edge, tensor: Tensor) -> Tensor:
        edge.exchange(None, tensor.view(-1), self.max_duration_s)
        return tensor

    def _send(self, edge: Edge, tensor: Tensor) -> Tensor:
        edge.exchange(tensor.flatten(), None, self.max_duration_s)
        self.metrics.bytes_sent += tensor.nbytes
        return tensor


def _number(edge: Edge) -> int:
    """Return a number for the next exchange over an edge, the same at both ends; a float64 can hold it."""
    name = f"{edge.name}/{edge.num_exchanges}"
    return int(hashlib.sha1(name.encode()).hexdigest()[:12], 16)
