"""Who exchanges with whom, agreed between two neighbours and nobody else.

A worker that is due offers an exchange to a neighbour picked at random; one that is in the middle of another
declines, any other accepts at once, also when offers cross. Each worker makes half of its exchanges by offering and
half by accepting, so an edge is used at rate (r/2)(1/d_i + 1/d_j): what A²CiD²'s constants assume.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gossamer.process.deadline import Deadline
from gossamer.process.pairwise.edge import Edge, Lost
from gossamer.process.pairwise.peer_connections import PeerConnections

OFFER, ACCEPT, DECLINE = 1, 2, 3
POLL_S = 0.05


@dataclass
class Agreement:
    """Both have agreed to exchange."""

    edge: Edge
    """This one, and not one that has taken its place: the peer knows of it only here."""
    taken_from: bool
    """The peer is new: it takes our vector and has none to give."""
    offered: bool
    """It was our offer."""


class Pairing:
    """The exchanges of one worker."""

    def __init__(self, peers: PeerConnections, rng: np.random.Generator, stopped: Callable[[], bool]) -> None:
        self.peers, self.rng, self.stopped = peers, rng, stopped
        self.reply = Deadline(first_s=2.0, least_s=1.0)
        self.needs_state = False
        """This worker is new and wants a peer's weights before it gives any."""
        self._changed = threading.Condition()
        self._willing = False
        self._offered: tuple[Edge, int] | None = None
        self._agreed: Agreement | None = None
        self._offers = 0

    def agree(self, wait_s: Callable[[], float]) -> Agreement | None:
        """The next exchange; an offer is made once ``wait_s()`` has come down to 0. None when training has stopped."""
        with self._changed:
            self._willing = True
        agreement = None
        while agreement is None and not self.stopped():
            with self._changed:
                left = wait_s()
                if self._agreed is None and left > 0:
                    self._changed.wait(min(left, POLL_S))
                agreement = self._take()
            if agreement is None and left <= 0:
                agreement = self._offer_around()
                if agreement is None:
                    time.sleep(float(self.rng.uniform(0.001, 0.02)))
        with self._changed:
            # What was agreed on at the last moment counts: the peer relies on it.
            self._willing = False
            return agreement or self._take()

    def _offer_around(self) -> Agreement | None:
        """Offer to neighbours in random order until one accepts, or one of them offers to us."""
        peers = self.peers.open()
        self.rng.shuffle(peers)
        for peer in peers:
            edge = self.peers.edge(peer)
            if edge is None:
                continue
            with self._changed:
                agreement = self._take()
                if agreement is not None:
                    return agreement
                self._offers += 1
                self._offered = (edge, self._offers)
            began = time.monotonic()
            try:
                edge.tell(OFFER, self._offers, int(self.needs_state), edge.num_swaps, within_s=self.reply.seconds)
            except Lost:
                with self._changed:
                    self._offered = None
                continue
            with self._changed:
                until = began + self.reply.seconds
                while self._waiting() and time.monotonic() < until and edge.open:
                    self._changed.wait(min(POLL_S, max(0.001, until - time.monotonic())))
                answered, self._offered = not self._waiting(), None
                agreement = self._take()
            if agreement is not None:
                self.reply.observe(time.monotonic() - began)
                return agreement
            if not answered:
                # It may still accept what we have given up on: only a new edge is safe.
                edge.drop()
        return None

    def _waiting(self) -> bool:
        """Whether our offer has no answer yet."""
        return self._offered is not None and self._agreed is None

    def _take(self) -> Agreement | None:
        """What has been agreed on, if anything."""
        agreed, self._agreed = self._agreed, None
        if agreed is not None:
            self._willing = False
        return agreed

    def hear(self, edge: Edge, words: tuple[int, ...]) -> None:
        """A message over ``edge``; called by the thread that listens to it."""
        kind, number, fresh, swaps_before = words
        answer = None
        with self._changed:
            if kind == OFFER:
                crossing = self._offered is not None and self._offered[0] is edge
                free = self._willing and self._agreed is None and (self._offered is None or crossing)
                # One that crossed ours may have come to be heard only after the exchange that ours has led to.
                free &= swaps_before == edge.num_swaps
                if free and not (fresh and self.needs_state):
                    # An offer that crosses ours is accepted all the same: ours may have been declined already.
                    self._offered, self._agreed = None, Agreement(edge, bool(fresh), offered=crossing)
                    answer = ACCEPT
                else:
                    answer = DECLINE
            elif kind == ACCEPT and self._offered == (edge, number):
                self._offered, self._agreed = None, Agreement(edge, bool(fresh), offered=True)
            elif kind == DECLINE and self._offered == (edge, number):
                self._offered = None
            self._changed.notify_all()
        if answer is not None:
            try:
                edge.tell(answer, number, int(self.needs_state), within_s=self.reply.seconds)
            except Lost:
                with self._changed:
                    if self._agreed is not None and self._agreed.edge is edge:
                        self._agreed = None
