"""Pairwise exchanges as a method's background part asks for them: the answers to ``Pair`` and ``Swap``.

A worker that has just joined, or whose weights are not finite, takes over the whole state of a peer instead. The method
does not see these transfers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.effects import Pair, Swap
from gossamer.errors import MethodError
from gossamer.process.collectives.call import mismatch
from gossamer.process.collectives.membership import STUCK_S
from gossamer.process.deadline import Deadline
from gossamer.process.events import EventKind
from gossamer.process.lifecycle import TrainingEnded
from gossamer.process.liveness.heartbeats import Heartbeats
from gossamer.process.net.listener import Listener
from gossamer.process.pairwise.delivery import DeliveryWatch
from gossamer.process.pairwise.edge import Edge, EdgeLost
from gossamer.process.pairwise.pairing import Agreement, Pairing
from gossamer.process.pairwise.peer_connections import PeerConnections
from gossamer.process.pairwise.screening import Screening, Verdict
from gossamer.process.runtime.worker_state import WorkerState
from gossamer.process.state.state_transfer import transfer_state
from gossamer.seeds import stream
from gossamer.vectors.vector_math import CHUNK, distance
from gossamer.wire import Links

CONSENSUS_EVERY = 4
"""The distance of long vectors is computed at every 4th exchange only: it is for the metrics."""

SCALAR_BYTES = 8

Received = tuple[Tensor, tuple[float, ...], tuple[float, float], tuple[Tensor, Tensor]]
"""The answer, the peer's scalars, the norms of our vector and of the peer's, and two vectors as far apart as these."""


class PairwiseExchanges:
    def __init__(
        self,
        state: WorkerState,
        neighbours: tuple[int, ...],
        listener: Listener,
        heartbeats: Heartbeats,
        links: Links | None = None,
    ) -> None:
        """``links``: how vectors are encoded on the wire; None: they travel as they are."""
        self._links = links
        self.state, self.worker, self.staging = state, state.worker, state.staging
        self.metrics, self.heartbeats, self.lifecycle = state.metrics, heartbeats, state.lifecycle
        self.peers = PeerConnections(self.worker.run_rank, neighbours, listener, self._on_message, self._counts_as_lost)
        rng = stream(self.worker.seed, "pairing", self.worker.run_rank)
        self.pairing = Pairing(self.peers, rng, state.lifecycle, lambda: state.metrics.steps > 0, self._give_state)
        self.offer_rng = self.worker.rng
        """Draws the times of offers."""
        self.screening = Screening()
        self.delivery = DeliveryWatch(state.events)
        self._agreement: Agreement | None = None
        """What ``Pair`` answered, until its ``Swap`` is over."""
        self._exchanging: Edge | None = None
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
        if self._agreement is not None and self._agreement.edge.open:
            raise MethodError(
                f"background of method {self.state.method.name} yielded Pair before its Swap with worker "
                f"{self._agreement.edge.peer} was over: expected one Swap after each Pair, and its Wait"
            )
        self.delivery.asked(effect.rate)
        self.peers.drop_former()
        while True:
            agreement = self.pairing.agree(self._offer_due_in_s)
            if agreement is None:
                raise TrainingEnded
            if agreement.gives_state or agreement.takes_state:
                self._transfer_state(agreement)
                continue
            self._note(agreement, effect.rate)
            return agreement.edge.peer

    def _note(self, agreement: Agreement, rate: float) -> None:
        """Note on which exchange we have agreed, and when our next offer is due."""
        if agreement.offered:
            # Half of a worker's exchanges are its own offers. It catches up on at most one that is overdue.
            gap = float(self.offer_rng.standard_exponential()) * 2 / rate
            self._next_offer = max(self._next_offer + gap, self.worker.now - 2 / rate)
        self._agreement = agreement

    def _offer_due_in_s(self) -> float:
        if self.pairing.needs_state:
            return 0.0
        if self.lifecycle.done:
            # It makes no more offers, but still accepts them.
            return float("inf")
        return (self._next_offer - self.worker.now) * (self.worker.step_s or 0.1)

    # Swap

    def swap(self, effect: Swap) -> Any:
        """Exchange vectors with the agreed peer; return the answer to ``effect``, None if there is nothing to merge."""
        agreement, method = self._agreement, self.state.method.name
        if agreement is None or agreement.edge.peer != effect.peer:
            raise MethodError(
                f"background of method {method} yielded Swap with worker {effect.peer}, with which no Pair was agreed: "
                "expected the rank that Pair answered, once"
            )
        try:
            move = self._move if self._links is None else self._move_encoded
            received, scalars, norms, compared = move(agreement.edge, effect)
        except EdgeLost:
            return None
        finally:
            self._agreement = None
        if not self._judge(effect.peer, norms, agreement.offered):
            return None
        self._estimate_consensus(*compared)
        return (received, scalars) if effect.scalars else received

    def _judge(self, peer: int, norms: tuple[float, float], offered: bool) -> bool:
        """Return whether to merge what ``peer`` sent, by the norms of our vector and of the peer's."""
        verdict = self.screening.judge(peer, *norms)
        if verdict is Verdict.MERGE:
            self.metrics.exchanges += 1
            self.delivery.merged(offered)
            self.state.history.touch_half(time.monotonic())
        elif verdict is Verdict.REFUSE:
            self.metrics.refused += 1
            text = f"refused a message of worker {peer}: not finite or absurdly large"
            self.state.events.add(EventKind.REFUSED, text, peer)
        elif verdict is Verdict.ADOPT:
            # The next exchange is a transfer of the peer's state.
            self.state.nonfinite = self.pairing.needs_state = True
        return verdict is Verdict.MERGE

    def _move(self, edge: Edge, effect: Swap) -> Received:
        """Exchange the vectors as they are."""
        sent = self.staging.to_host(effect.vector, "sent")
        received = self.staging.host_buffer("received", sent)
        scalars = self._exchange(edge, sent, received, effect.scalars)
        return self.staging.to_device(received), scalars, (_norm(sent), _norm(received)), (sent, received)

    def _move_encoded(self, edge: Edge, effect: Swap) -> Received:
        """Exchange the vectors as messages of a codec. Blocks that one of the two cannot decode are not exchanged."""
        assert self._links is not None
        link, vector = self._links.to(edge.peer), effect.vector
        with self.staging.on_training_stream():
            answer = torch.empty_like(vector)
            message = link.encode(vector, answer)
        sent = self.staging.to_host(message, "sent")
        received = self.staging.host_buffer("received", sent)
        scalars = self._exchange(edge, sent, received, effect.scalars)
        theirs = self.staging.to_device(received)
        with self.staging.on_training_stream():
            decoded = link.decode(theirs, vector, answer)
        verdict = self.staging.to_host(decoded, "verdict")
        peer_verdict = torch.empty_like(verdict)
        edge.exchange(verdict, peer_verdict, self.max_duration_s)
        self.metrics.bytes_sent += verdict.nbytes
        peer_decoded = self.staging.to_device(peer_verdict)
        with self.staging.on_training_stream():
            self.metrics.void_blocks += link.settle(decoded, peer_decoded, vector, answer)
        return answer, scalars, (link.norm, link.peer_norm), (vector, answer)

    def _estimate_consensus(self, one: Tensor, other: Tensor) -> None:
        # The exchange counts already.
        if len(one) <= CHUNK or self.metrics.exchanges % CONSENSUS_EVERY == 1:
            self.metrics.consensus = distance(one, other) / 2**0.5

    def _exchange(self, edge: Edge, sent: Tensor, received: Tensor, scalars: tuple[float, ...]) -> tuple[float, ...]:
        """Exchange vectors and scalars with a peer; return its scalars."""
        if not edge.open:
            raise EdgeLost
        layout = (float(len(sent)), float(sent.element_size()), float(len(scalars)))
        self._started = started = time.monotonic()
        self._exchanging = edge
        try:
            # Before the first vector: an edge that breaks because lengths differ would not say why.
            if edge.layout is None:
                edge.layout = layout
                words = edge.exchange(torch.zeros(1), torch.zeros(1), self.max_duration_s, layout)
                if tuple(words[:3]) != layout:
                    edge.drop()
                    raise mismatch(self.worker.run_rank, _described(layout), edge.peer, _described(words))
            elif edge.layout != layout:
                raise MethodError(
                    f"background of method {self.state.method.name} yielded {_described(layout)} after "
                    f"{_described(edge.layout)}: expected one length and number of scalars in all Swaps"
                )
            words = edge.exchange(sent, received, self.max_duration_s, scalars)
            self._deadline.observe(time.monotonic() - started)
        finally:
            self._started, self._exchanging = float("inf"), None
        sent_bytes = sent.nbytes + SCALAR_BYTES * len(scalars)
        self.metrics.bytes_sent += sent_bytes
        members, name = (self.worker.run_rank, edge.peer), f"{edge.name}/{edge.num_exchanges}"
        self.worker.recorder.exchanged(members, started, time.monotonic(), sent_bytes, name)
        return tuple(words[: len(scalars)])

    # State transfer

    def _transfer_state(self, agreement: Agreement) -> None:
        """Give our state to the peer, or take over the peer's."""
        nonfinite = self.state.nonfinite
        self._started, self._exchanging = time.monotonic(), agreement.edge
        try:
            self._move_state(agreement.edge, agreement.takes_state)
        except EdgeLost:
            return
        finally:
            self._started, self._exchanging = float("inf"), None
        if agreement.takes_state:
            peer = agreement.edge.peer
            reason = "our weights were not finite or absurdly large" if nonfinite else "joined"
            self.state.events.add(EventKind.TOOK_OVER, f"{reason}: took over the weights of worker {peer}", peer)
            self.pairing.needs_state = False

    def _give_state(self, edge: Edge) -> None:
        """Give our state to the peer in a thread, since the background's may be in an exchange or wait for steps."""

        def give() -> None:
            device = self.state.flat_model.device
            if device.type == "cuda":
                torch.cuda.set_device(device)
            try:
                self._move_state(edge, takes=False)
            except EdgeLost:
                pass
            finally:
                self.pairing.given(edge)

        threading.Thread(target=give, name=f"gossamer-give-{edge.peer}", daemon=True).start()

    def _move_state(self, edge: Edge, takes: bool) -> None:
        def move(tensor: Tensor) -> Tensor:
            tensor = tensor.flatten()
            if takes:
                edge.exchange(None, tensor, self.max_duration_s)
            else:
                edge.exchange(tensor, None, self.max_duration_s)
                self.metrics.bytes_sent += tensor.nbytes
            return tensor

        transfer_state(lambda tensor: move(tensor).view(tensor.shape), self.state, sends=not takes, takes=takes)

    # Maintenance

    def poll(self) -> None:
        """Close the edge of an exchange whose peer is dead. Runs in the heartbeat thread."""
        self.check_delivery()
        edge, stuck = self._exchanging, time.monotonic() - self._started > STUCK_S
        if stuck and edge is not None and self.heartbeats.dead(edge.peer):
            edge.drop()

    def check_delivery(self, ended: bool = False) -> None:
        """Say so if fewer exchanges take place than the method asks for. ``ended``: this worker's training has."""
        if not self.lifecycle.done:
            company = any(peer not in self.heartbeats.lost for peer in self.peers.neighbours)
            self.delivery.poll(self.metrics.steps, company, ended)

    def _counts_as_lost(self) -> bool:
        """Return whether an edge that breaks now is lost: at the end of training all of them are closed."""
        return not self.lifecycle.stopped

    def close(self) -> None:
        self.peers.close()


def _described(layout: Sequence[float]) -> str:
    length, element_bytes, num_scalars = (int(number) for number in layout[:3])
    return f"a Swap of {length} numbers of {element_bytes} bytes and {num_scalars} scalars"


def _norm(vector: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector))
