"""PairwiseExchanges in pairs, as a method's background part asks for them: ``Pair`` and ``Swap``."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from gossamer.effects import Pair, Swap
from gossamer.process.collectives.membership import STUCK_S, TrainingEnded
from gossamer.process.deadline import Deadline
from gossamer.process.metrics import Metrics
from gossamer.process.pairwise.edge import Edge, Lost
from gossamer.process.pairwise.pairing import Agreement, Pairing
from gossamer.process.pairwise.peer_connections import PeerConnections
from gossamer.process.runtime.staging import Staging
from gossamer.process.runtime.step_recorder import StepRecorder
from gossamer.process.runtime.worker_state import WorkerState
from gossamer.process.store.failover_store import FailoverStore
from gossamer.seeds import stream
from gossamer.vector_math import CHUNK, distance

ABSURD = 1e3
"""A vector so many times longer than our own is refused."""

MEASURED = 4
"""How far long vectors are apart is measured at every so many-th exchange: only the metrics want to know."""

OUTVOTED = 2
"""When so many peers in a row refuse ours it is ours that is absurd."""


class PairwiseExchanges:
    """This worker's exchanges with its neighbours."""

    def __init__(
        self,
        state: WorkerState,
        neighbours: tuple[int, ...],
        store: FailoverStore,
        staging: Staging,
        counts: Metrics,
        dead: Callable[[int], bool],
        stopped: Callable[[], bool],
        step_recorder: StepRecorder,
    ) -> None:
        self.step_recorder = step_recorder
        self.state, self.worker, self.staging, self.counts = state, state.worker, staging, counts
        rank = self.worker.rank
        self.peers = PeerConnections(rank, neighbours, store, self._hear)
        self.pairing = Pairing(self.peers, stream(self.worker.seed, "pairing", rank), stopped)
        self._dead = dead
        self.done = False
        """This worker makes no offers any more; it still accepts them."""
        self.in_step = False
        """The optimizer is at work: ``weights`` are written when it is through."""
        self._agreement: Agreement | None = None
        self._deadline = Deadline(first_s=60.0, least_s=2.0)
        self._next_offer = 0.0
        self._refused_by: set[int] = set()
        self._began = float("inf")
        """When the exchange under way began."""

    @property
    def longest_s(self) -> float:
        """How long an exchange under way may take."""
        return self._deadline.seconds

    def _hear(self, edge: Edge, words: tuple[int, ...]) -> None:
        self.pairing.hear(edge, words)

    def pair(self, effect: Pair) -> int:
        """The neighbour with whom the next exchange is agreed on."""
        agreement = self.pairing.agree(self._until_offer)
        if agreement is None:
            raise TrainingEnded
        if agreement.offered:
            # Half of a worker's exchanges are its own offers; it does not catch up on more than one.
            gap = float(self.worker.rng.standard_exponential()) * 2 / effect.rate
            self._next_offer = max(self._next_offer + gap, self.worker.time - 2 / effect.rate)
        self._agreement = agreement
        return agreement.edge.peer

    def _until_offer(self) -> float:
        """Seconds until this worker's next offer is due."""
        if self.pairing.needs_state:
            return 0.0
        if self.done:
            return float("inf")
        return (self._next_offer - self.worker.time) * (self.worker.step_s or 0.1)

    def swap(self, swap: Swap) -> Tensor | None:
        """The peer's vector for ours; None if there is nothing to merge."""
        agreement = self._agreement
        if agreement is None or not agreement.edge.open:
            return None
        edge = agreement.edge
        sent = self.staging.to_host(swap.vector, "sent")
        received = self.staging.host_buffer("received", sent)
        buffers = None
        self._began = began = time.monotonic()
        try:
            edge.swap(sent, received, self.longest_s)
            self._deadline.observe(time.monotonic() - began)
            if agreement.taken_from or self.pairing.needs_state:
                buffers = self._swap_buffers(edge)
        except Lost:
            return None
        finally:
            self._began = float("inf")
        self.counts.bytes_sent += sent.numel() * sent.element_size()
        pair, name = (self.worker.rank, swap.peer), f"{edge.name}/{edge.num_swaps}"
        self.step_recorder.exchanged(pair, began, sent.numel() * sent.element_size(), name)
        if agreement.taken_from:
            return None
        ours, theirs = (float(torch.linalg.vector_norm(vector)) for vector in (sent, received))
        nonfinite = not ours < float("inf")
        if absurd(theirs, ours) and not (nonfinite and theirs < float("inf")):
            self.counts.refused += 1
            self.state.events.append(f"refused a message of worker {swap.peer}: not finite or absurdly large")
            return None
        if not nonfinite and absurd(ours, theirs):
            # What one refuses the other does not take either: that would not leave the mean where it was.
            self._refused_by.add(swap.peer)
            if len(self._refused_by) < OUTVOTED:
                return None
            nonfinite = True
        self._refused_by.clear()
        if self.pairing.needs_state or nonfinite:
            self._adopt(received, buffers, swap.peer, nonfinite)
            return None
        if len(sent) <= CHUNK or self.counts.exchanges % MEASURED == 0:
            self.counts.consensus = distance(sent, received) / 2**0.5
        self.counts.exchanges += 1
        return self.staging.to_device(received)

    def _swap_buffers(self, edge: Edge) -> Tensor:
        """A worker that is new takes the peer's batch-norm statistics and such too."""
        own = self.staging.to_host(self.state.flat_model.buffer_vector(), "buffers sent")
        received = torch.empty_like(own)
        if len(own):
            edge.swap(own, received, self.longest_s)
        return received

    def _adopt(self, weights: Tensor, buffers: Tensor | None, peer: int, nonfinite: bool) -> None:
        """Take over a peer's weights."""
        state = self.state
        with state.lock, self.staging.beside_training():
            state.flat_model.x.copy_(weights)
            state.begin_again()
            state.stale_gradient = nonfinite
            if buffers is not None:
                state.flat_model.load_buffers(buffers)
            if not self.in_step:
                state.flat_model.load_weights(state.flat_model.x)
        why = "our weights were not finite or absurdly large" if nonfinite else "joined"
        state.events.append(f"{why}: took over the weights of worker {peer}")
        self.pairing.needs_state = state.needs_state = False

    def poll(self) -> None:
        """Build and answer for edges, and give up a dead peer whose connection is up; beside the training."""
        self.peers.poll()
        agreement = self._agreement
        if time.monotonic() - self._began > STUCK_S and agreement is not None and self._dead(agreement.edge.peer):
            agreement.edge.drop()

    def close(self) -> None:
        """Let go of all neighbours."""
        self.peers.close()


def absurd(length: float, beside: float) -> bool:
    """Whether a vector of this length is not finite, or absurdly long beside another."""
    return not length <= ABSURD * (beside + 1.0)
