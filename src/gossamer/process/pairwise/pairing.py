"""Pairing: two neighbours agree on an exchange between themselves, without a coordinator.

A worker whose exchange is due offers one to a random neighbour. A neighbour that is in another exchange declines; any
other accepts at once, also when two offers cross. Each worker makes half of its exchanges by offering and half by
accepting, so an edge is used at rate (r/2)(1/d_i + 1/d_j), as A²CiD²'s constants assume.

A worker that needs a state does not wait until a neighbour looks for an exchange, which with a long period may take
minutes: any neighbour that has a state accepts, and gives it in a thread of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gossamer.process.deadline import Deadline
from gossamer.process.lifecycle import Lifecycle
from gossamer.process.pairwise.edge import Edge, EdgeLost
from gossamer.process.pairwise.peer_connections import PeerConnections

OFFER, ACCEPT, DECLINE = 1, 2, 3
POLL_S = 0.05


@dataclass
class Agreement:
    edge: Edge
    """This edge, not one that replaces it: the peer has agreed on this one only."""
    gives_state: bool
    """The peer has no state of the run, or a bad one, and takes over ours."""
    takes_state: bool
    """We take over the peer's state."""
    offered: bool
    """It was our offer."""


class Pairing:
    def __init__(
        self,
        peers: PeerConnections,
        rng: np.random.Generator,
        lifecycle: Lifecycle,
        may_give: Callable[[], bool],
        give_state: Callable[[Edge], None],
    ) -> None:
        """``may_give()``: this worker has a state of the run. ``give_state``: starts to give it over an edge, whatever
        else this worker does; ``given`` is called at the end of that."""
        self.peers, self.rng, self.lifecycle = peers, rng, lifecycle
        self._may_give, self._give_state = may_give, give_state
        self._giving: set[Edge] = set()
        """The edges over which a thread gives our state."""
        self.reply_deadline = Deadline(initial_s=2.0, min_s=1.0)
        self.needs_state = False
        """This worker has just joined, or its weights are not finite: it takes over a peer's state first."""
        self._changed = threading.Condition()
        self._available = False
        self._offered: tuple[Edge, int] | None = None
        """The edge and the number of our open offer."""
        self._agreed: Agreement | None = None
        self._taken: Agreement | None = None
        """What ``agree`` returned last: its exchange may be in progress until ``agree`` is called again."""
        self._num_offers = 0
        self._offered_needs_state = False
        """What our open offer says about ``needs_state``."""

    def agree(self, due_in_s: Callable[[], float]) -> Agreement | None:
        """Return the next exchange; offer one once ``due_in_s()`` is 0. None when training has stopped."""
        with self._changed:
            self._available, self._taken = True, None
        agreement = None
        while agreement is None and not self.lifecycle.stopped:
            with self._changed:
                remaining = due_in_s()
                if self._agreed is None and remaining > 0:
                    self._changed.wait(min(remaining, POLL_S))
                agreement = self._take()
            if agreement is None and remaining <= 0:
                agreement = self._offer_to_neighbours()
                if agreement is None:
                    time.sleep(float(self.rng.uniform(0.001, 0.02)))
        with self._changed:
            # An agreement of the last moment counts: the peer relies on it.
            self._available = False
            return agreement or self._take()

    def _offer_to_neighbours(self) -> Agreement | None:
        """Offer to neighbours in random order until one accepts, or one of them offers to us."""
        ranks = self.peers.connected()
        self.rng.shuffle(ranks)
        for rank in ranks:
            edge = self.peers.edge(rank)
            if edge is None or edge in self._giving:
                continue
            with self._changed:
                agreement = self._take()
                if agreement is not None:
                    return agreement
                self._num_offers += 1
                self._offered, self._offered_needs_state = (edge, self._num_offers), self.needs_state
            began = time.monotonic()
            try:
                edge.send(OFFER, self._num_offers, int(self._offered_needs_state), edge.num_exchanges)
            except EdgeLost:
                with self._changed:
                    self._offered = None
                continue
            with self._changed:
                until = began + self.reply_deadline.seconds
                while self._awaiting_reply() and time.monotonic() < until and edge.open:
                    self._changed.wait(min(POLL_S, max(0.001, until - time.monotonic())))
                replied, self._offered = not self._awaiting_reply(), None
                agreement = self._take()
            if agreement is not None:
                self.reply_deadline.observe(time.monotonic() - began)
                return agreement
            if not replied:
                # The peer may still accept the offer that we have given up: only a new edge is safe.
                edge.drop()
        return None

    def _awaiting_reply(self) -> bool:
        return self._offered is not None and self._agreed is None

    def _take(self) -> Agreement | None:
        """Return the agreement that was reached, if any, and be unavailable for others."""
        agreed, self._agreed = self._agreed, None
        if agreed is not None:
            self._available, self._taken = False, agreed
        return agreed

    def on_message(self, edge: Edge, message: tuple[int, ...]) -> None:
        """Handle a message over ``edge``. Runs in the thread that receives from it, and does not block it."""
        kind, number, peer_needs_state, num_exchanges = message
        reply, needs_state, gives = None, False, False
        with self._changed:
            if kind == OFFER:
                crossing = self._offered is not None and self._offered[0] is edge
                # Both ends must judge by the same: with crossing offers by what these say.
                needs_state = self._offered_needs_state if crossing else self.needs_state
                free = self._available and self._agreed is None and (self._offered is None or crossing)
                # A crossing offer may be received only after the exchange that our own offer led to.
                free &= num_exchanges == edge.num_exchanges and edge.peer in self.peers.neighbours
                if free and not (peer_needs_state and needs_state):
                    # Accept a crossing offer too: the peer may already have declined ours.
                    self._offered = None
                    self._agreed = Agreement(edge, bool(peer_needs_state), needs_state, offered=crossing)
                    reply = ACCEPT
                elif peer_needs_state and self._is_idle(edge, num_exchanges) and self._may_give():
                    self._giving.add(edge)
                    gives, reply = True, ACCEPT
                else:
                    reply = DECLINE
            elif kind == ACCEPT and self._offered == (edge, number):
                self._offered = None
                self._agreed = Agreement(edge, bool(peer_needs_state), self._offered_needs_state, offered=True)
            elif kind == DECLINE and self._offered == (edge, number):
                self._offered = None
            self._changed.notify_all()
        if reply is not None:
            try:
                edge.send(reply, number, int(needs_state))
            except EdgeLost:
                with self._changed:
                    self._giving.discard(edge)
                    if self._agreed is not None and self._agreed.edge is edge:
                        self._agreed = None
                return
        if gives:
            self._give_state(edge)

    def _is_idle(self, edge: Edge, num_exchanges: int) -> bool:
        """Return whether this worker neither uses ``edge`` nor is about to, nor needs a state itself."""
        if self.needs_state or self.lifecycle.stopped or edge in self._giving or num_exchanges != edge.num_exchanges:
            return False
        offered = self._offered is not None and self._offered[0] is edge
        return not offered and all(used is None or used.edge is not edge for used in (self._agreed, self._taken))

    def giving(self, edge: Edge) -> None:
        """Our state is to be given over ``edge``, which makes no exchanges until then."""
        with self._changed:
            self._giving.add(edge)

    def given(self, edge: Edge) -> None:
        """Our state was given over ``edge``, or could not be."""
        with self._changed:
            self._giving.discard(edge)
