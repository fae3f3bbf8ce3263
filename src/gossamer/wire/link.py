"""Links: the ends of a connection over which two workers exchange vectors with a codec.

An exchange, on each of the two workers:

    message = link.encode(vector, out)             out  = s − Q(s)      what our own message loses
    … send message, receive theirs …
    decoded = link.decode(theirs, vector, out)     out += Q(s')         the answer
    … tell the peer which blocks we could decode, and learn which it could …
    link.settle(decoded, peer_decoded, vector, out)

The answer is ``Q(s') + s − Q(s)``, so ``answer − s = Q(s') − Q(s)``: the displacements that the two workers compute
from their answers sum to zero, whatever the codec lost. Blocks that one of the two could not decode are void on both
sides: the answer is ``s`` there.

A worker expects its peers to be as far away as those of its latest exchanges were. A link remembers how many times
farther away its own peer is than others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gossamer.wire.codec import Codec, align, copy_blocks, num_blocks
from gossamer.wire.expectation import DECAY, GROWTH, Expectation
from gossamer.wire.noise import mix

NORM_BYTES = 8
"""Behind the codec's part of a message: the norm of the vector in float64."""


def message_bytes(codec: Codec, num_elements: int) -> int:
    """Return the length of the message that ``Link.encode`` returns."""
    return align(codec.size_bytes(num_elements), NORM_BYTES) + NORM_BYTES


def verdict_bytes(codec: Codec, num_elements: int) -> int:
    """Return the length of what ``Link.decode`` returns for the peer."""
    return num_blocks(num_elements, codec.block)


class Link:
    """One worker's end of a connection. Used by one thread at a time."""

    def __init__(self, codec: Codec, seed: int, expectation: Expectation | None = None) -> None:
        """``expectation``: what the worker expects of any peer; other links may share it."""
        self.codec, self.seed, self.expectation = codec, seed, expectation or Expectation(codec)
        self.count = 0
        """Messages so far."""
        self.ratio: Tensor | None = None
        """How many times farther away than expected of any peer this one is, per block; at least 1."""
        self._norm = self._peer_norm = torch.zeros(1, dtype=torch.float64)
        self._seen: Tensor | None = None

    # The norms of the two vectors of the latest exchange are the same at both ends, and not finite if a vector is not.
    # They are read when they are asked for: to read a number from a GPU means to wait for it.

    @property
    def norm(self) -> float:
        return float(self._norm)

    @property
    def peer_norm(self) -> float:
        return float(self._peer_norm)

    def encode(self, vector: Tensor, out: Tensor, message: Tensor | None = None) -> Tensor:
        """Return the message for ``vector``, and write into ``out`` what it loses.

        It is written into ``message`` if that is given: uint8, ``message_bytes`` long.
        """
        size = self.codec.size_bytes(len(vector))
        if message is None:
            message = torch.empty(message_bytes(self.codec, len(vector)), dtype=torch.uint8, device=vector.device)
        self.count += 1
        reach = self.expectation.reach(vector)
        if reach is not None and self.ratio is not None and len(self.ratio) == len(reach):
            reach = reach * self.ratio
        self.codec.encode(vector, reach, mix(self.seed, self.count), message[:size], out)
        norm = torch.linalg.vector_norm(vector, dtype=torch.promote_types(vector.dtype, torch.float32)).double()
        self._norm = norm.view(1)
        message[-NORM_BYTES:] = self._norm.view(torch.uint8)
        return message

    def decode(self, message: Tensor, vector: Tensor, out: Tensor) -> Tensor:
        """Add the peer's values to ``out``. Return which blocks of its message could be decoded, as uint8 0 or 1.

        ``vector`` and ``out`` are as ``encode`` left them.
        """
        self._peer_norm = message[-NORM_BYTES:].view(torch.float64).clone()
        self._seen = self.codec.decode(message[: self.codec.size_bytes(len(vector))], vector, out)
        return (self._seen != torch.inf).to(torch.uint8)

    def settle(self, decoded: Tensor, peer_decoded: Tensor, vector: Tensor, out: Tensor) -> int:
        """Void the blocks that one of the two could not decode: ``out`` is ``vector`` there. Return their number."""
        num_void = len(decoded) - int((decoded & peer_decoded).sum())
        self._learn((decoded | peer_decoded) == 0, num_void > 0, vector)
        if num_void:
            copy_blocks(out, vector, (decoded & peer_decoded) == 0, self.codec.block)
        return num_void

    def _learn(self, too_far: Tensor, any_void: bool, vector: Tensor) -> None:
        """Learn from the distances of the peer's message, and from the blocks that neither end could decode."""
        seen, self._seen, expectation = self._seen, None, self.expectation
        assert seen is not None
        # One peer that is far away must not make all others seem so: much of the growth is the link's own.
        expectation.observe(seen, GROWTH)
        if any_void and bool(too_far.any()):
            expectation.grow(too_far, vector, GROWTH**0.5)
        assert expectation.distances is not None
        ratio = torch.where(seen < torch.inf, seen / expectation.distances, 1.0).clamp_(min=1.0)
        known = ratio if self.ratio is None or len(self.ratio) != len(ratio) else self.ratio
        self.ratio = torch.where(too_far, GROWTH**0.5 * known, torch.maximum(ratio, DECAY * known))


class Links:
    """All links of one worker."""

    def __init__(self, codec: Codec, seed: int, rank: int) -> None:
        self.codec, self.seed, self.expectation = codec, mix(seed, rank), Expectation(codec)
        self._links: dict[int, Link] = {}

    def to(self, peer: int) -> Link:
        """Return the link to worker ``peer``."""
        if peer not in self._links:
            self._links[peer] = Link(self.codec, mix(self.seed, peer), self.expectation)
        return self._links[peer]

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs: counts and tensors."""
        links: dict[str, Any] = {}
        for peer, link in self._links.items():
            links[str(peer)] = {"count": link.count} | ({} if link.ratio is None else {"ratio": link.ratio})
        return {"expectation": self.expectation.state_dict(), "links": links}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.expectation.load_state_dict(state["expectation"])
        self._links = {}
        for peer, saved in state["links"].items():
            link = self.to(int(peer))
            link.count, link.ratio = saved["count"], saved.get("ratio")
