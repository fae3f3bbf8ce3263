"""Pairwise exchanges as a method's background part asks for them: the answers to ``Pair`` and ``Swap``."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from gossamer.effects import Pair, Swap
from gossamer.process.collectives.group_builder import GroupBuilder
from gossamer.process.collectives.membership import STUCK_S
from gossamer.process.deadline import Deadline
from gossamer.process.lifecycle import TrainingEnded
from gossamer.process.pairwise.edge import Edge, EdgeLost
from gossamer.process.pairwise.pairing import Agreement, Pairing
from gossamer.process.pairwise.peer_connections import PeerConnections
from gossamer.process.pairwise.screening import Screening, Verdict
from gossamer.process.runtime.worker_state import WorkerState
from gossamer.process.store.heartbeats import Heartbeats
from gossamer.seeds import stream
from gossamer.vector_math import CHUNK, distance

CONSENSUS_EVERY = 4
"""The distance of long vectors is computed at every 4th exchange only: it is for the metrics."""


class PairwiseExchanges:
    def __init__(
        self, state: WorkerState, neighbours: tuple[int, ...], builder: GroupBuilder, heartbeats: Heartbeats
    ) -> None:
        self.state, self.worker, self.staging = state, state.worker, state.staging
        self.metrics, self.heartbeats, self.lifecycle = state.metrics, heartbeats, state.lifecycle
        self.peers = PeerConnections(neighbours, builder, self._on_message)
        self.pairing = Pairing(self.peers, stream(self.worker.seed, "pairing", self.worker.rank), state.lifecycle)
        self.screening = Screening()
        self._agreement: Agreement | None = None
        self._deadline = Deadline(initial_s=60.0, min_s=2.0)
        self._next_offer = 0.0
        """Local time of this worker's next offer."""
        self._started = float("inf")
        """When the exchange in flight started."""

    @property
    def max_duration_s(self) -> float:
        """How long an exchange in flight may take."""
        return self._deadline.seconds

    def _on_message(self, edge: Edge, message: tuple[int, ...]) -> None:
        self.pairing.on_message(edge, message)

    # Pair

    def pair(self, effect: Pair) -> int:
        """Agree on the next exchange and return the peer's rank."""
        agreement = self.pairing.agree(self._offer_due_in_s)
        if agreement is None:
            raise TrainingEnded
        if agreement.offered:
            # Half of a worker's exchanges are its own offers. It catches up on at most one that is overdue.
            gap = float(self.worker.rng.standard_exponential()) * 2 / effect.rate
            self._next_offer = max(self._next_offer + gap, self.worker.time - 2 / effect.rate)
        self._agreement = agreement
        return agreement.edge.peer

    def _offer_due_in_s(self) -> float:
        if self.pairing.needs_state:
            return 0.0
        if self.lifecycle.done:
            # It makes no more offers, but still accepts them.
            return float("inf")
        return (self._next_offer - self.worker.time) * (self.worker.step_s or 0.1)

    # Swap

    def swap(self, effect: Swap) -> Tensor | None:
        """Exchange vectors with the agreed peer; return its vector, or None if there is nothing to merge."""
        agreement = self._agreement
        if agreement is None or not agreement.edge.open:
            return None
        sent = self.staging.to_host(effect.vector, "sent")
        received = self.staging.host_buffer("received", sent)
        try:
            buffers = self._transport(agreement, sent, received)
        except EdgeLost:
            return None
        if agreement.peer_needs_state:
            return None
        verdict = self.screening.judge(effect.peer, _norm(sent), _norm(received))
        if verdict is Verdict.REFUSE:
            self.metrics.refused += 1
            self.state.events.append(f"refused a message of worker {effect.peer}: not finite or absurdly large")
        elif verdict is Verdict.ADOPT or (verdict is Verdict.MERGE and self.pairing.needs_state):
            self._adopt(received, buffers, effect.peer, nonfinite=verdict is Verdict.ADOPT)
        elif verdict is Verdict.MERGE:
            if len(sent) <= CHUNK or self.metrics.exchanges % CONSENSUS_EVERY == 0:
                self.metrics.consensus = distance(sent, received) / 2**0.5
            self.metrics.exchanges += 1
            return self.staging.to_device(received)
        return None

    def _transport(self, agreement: Agreement, sent: Tensor, received: Tensor) -> Tensor | None:
        """Exchange the vectors, and the model's buffers if one of the two needs state; return the peer's buffers."""
        edge, buffers = agreement.edge, None
        self._started = started = time.monotonic()
        try:
            edge.exchange(sent, received, self.max_duration_s)
            self._deadline.observe(time.monotonic() - started)
            if agreement.peer_needs_state or self.pairing.needs_state:
                buffers = self._exchange_buffers(edge)
        finally:
            self._started = float("inf")
        self.metrics.bytes_sent += sent.nbytes
        members, name = (self.worker.rank, edge.peer), f"{edge.name}/{edge.num_exchanges}"
        self.worker.recorder.exchanged(members, started, time.monotonic(), sent.nbytes, name)
        return buffers

    def _exchange_buffers(self, edge: Edge) -> Tensor:
        own = self.staging.to_host(self.state.flat_model.buffer_vector(), "buffers sent")
        received = torch.empty_like(own)
        if len(own):
            edge.exchange(own, received, self.max_duration_s)
        return received

    def _adopt(self, weights: Tensor, buffers: Tensor | None, peer: int, nonfinite: bool) -> None:
        """Take over the weights, and buffers if given, of ``peer``."""
        state = self.state
        with state.lock, self.staging.on_training_stream():
            state.flat_model.x.copy_(weights)
            state.reset_vectors()
            state.stale_gradient = nonfinite
            if buffers is not None:
                state.flat_model.load_buffers(buffers)
            if not state.in_step:
                state.flat_model.load_weights(state.flat_model.x)
        reason = "our weights were not finite or absurdly large" if nonfinite else "joined"
        state.events.append(f"{reason}: took over the weights of worker {peer}")
        self.pairing.needs_state = state.needs_state = False

    # Maintenance

    def poll(self) -> None:
        """Build edges, and close the edge of an exchange whose peer is dead. Runs in the heartbeat thread."""
        self.peers.poll()
        agreement, stuck = self._agreement, time.monotonic() - self._started > STUCK_S
        if stuck and agreement is not None and self.heartbeats.dead(agreement.edge.peer):
            agreement.edge.drop()

    def close(self) -> None:
        self.peers.close()


def _norm(vector: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector))
