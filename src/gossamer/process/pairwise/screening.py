"""Screening of received vectors: nothing that is not finite or absurdly large is merged.

The two peers of an exchange judge by the same two norms, so that they agree: a vector that one refuses is not merged
by the other either, and the mean of all workers stays where it was.
"""

from __future__ import annotations

from enum import Enum

ABSURD_RATIO = 1e3
"""A vector whose norm is this many times larger than our own is refused."""

NUM_VOTES = 2
"""Once this many peers in a row refuse our vector, ours is the absurd one."""


class Verdict(Enum):
    """What to do with a received vector."""

    MERGE = "merge"
    REFUSE = "refuse"
    """It is not finite, or absurdly large beside ours."""
    SKIP = "skip"
    """The peer refuses ours, so we do not merge either."""
    ADOPT = "adopt"
    """Ours is not finite or outvoted: take the peer's weights."""


class Screening:
    def __init__(self) -> None:
        self._refused_by: set[int] = set()

    def judge(self, peer: int, own_norm: float, peer_norm: float) -> Verdict:
        """Judge the vector of ``peer`` by its norm and that of the vector that we sent."""
        own_is_finite = own_norm < float("inf")
        if absurd(peer_norm, own_norm) and (own_is_finite or not peer_norm < float("inf")):
            return Verdict.REFUSE
        if own_is_finite and absurd(own_norm, peer_norm):
            self._refused_by.add(peer)
            if len(self._refused_by) < NUM_VOTES:
                return Verdict.SKIP
            own_is_finite = False
        self._refused_by.clear()
        return Verdict.MERGE if own_is_finite else Verdict.ADOPT


def absurd(norm: float, beside: float) -> bool:
    """Return whether a norm is not finite, or absurdly large beside another."""
    return not norm <= ABSURD_RATIO * (beside + 1.0)
