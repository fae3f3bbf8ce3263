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

A link remembers how far apart the two workers were, and expects the same of the next exchange.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gossamer.wire.codec import Codec, align, copy_blocks, num_blocks
from gossamer.wire.expectation import Expectation
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

    def __init__(self, codec: Codec, seed: int) -> None:
        self.codec, self.seed = codec, seed
        self.count = 0
        """Messages so far."""
        self.expectation = Expectation(codec)
        self.norm = self.peer_norm = 0.0
        """Norms of the two vectors of the latest exchange, the same at both ends. Not finite if a vector is not."""
        self._seen: Tensor | None = None

    def encode(self, vector: Tensor, out: Tensor, message: Tensor | None = None) -> Tensor:
        """Return the message for ``vector``, and write into ``out`` what it loses.

        It is written into ``message`` if that is given: uint8, ``message_bytes`` long.
        """
        size = self.codec.size_bytes(len(vector))
        if message is None:
            message = torch.empty(message_bytes(self.codec, len(vector)), dtype=torch.uint8, device=vector.device)
        self.count += 1
        reach = self.expectation.reach(vector)
        self.codec.encode(vector, reach, mix(self.seed, self.count), message[:size], out)
        norm = torch.linalg.vector_norm(vector, dtype=torch.promote_types(vector.dtype, torch.float32)).double()
        message[-NORM_BYTES:] = norm.view(1).view(torch.uint8)
        self.norm = float(norm)
        return message

    def decode(self, message: Tensor, vector: Tensor, out: Tensor) -> Tensor:
        """Add the peer's values to ``out``. Return which blocks of its message could be decoded, as uint8 0 or 1.

        ``vector`` and ``out`` are as ``encode`` left them.
        """
        self.peer_norm = float(message[-NORM_BYTES:].view(torch.float64))
        self._seen = self.codec.decode(message[: self.codec.size_bytes(len(vector))], vector, out)
        return (self._seen != torch.inf).to(torch.uint8)

    def settle(self, decoded: Tensor, peer_decoded: Tensor, vector: Tensor, out: Tensor) -> int:
        """Void the blocks that one of the two could not decode: ``out`` is ``vector`` there. Return their number."""
        assert self._seen is not None
        self.expectation.observe(self._seen)
        num_void = len(decoded) - int((decoded & peer_decoded).sum())
        if num_void:
            self.expectation.grow((decoded | peer_decoded) == 0, vector)
            copy_blocks(out, vector, (decoded & peer_decoded) == 0, self.codec.block)
        self._seen = None
        return num_void


class Links:
    """All links of one worker.

    A link expects its peer to be at least as far away as the peer of the latest exchange was: an edge that is rarely
    used knows only how far apart the two were long ago.
    """

    def __init__(self, codec: Codec, seed: int, rank: int) -> None:
        self.codec, self.seed = codec, mix(seed, rank)
        self._links: dict[int, Link] = {}
        self._latest: Link | None = None

    def to(self, peer: int) -> Link:
        """Return the link to worker ``peer``, for an exchange that begins."""
        link = self._links.get(peer)
        if link is None:
            link = self._links[peer] = Link(self.codec, mix(self.seed, peer))
        if self._latest is not None and self._latest is not link:
            link.expectation.raise_to(self._latest.expectation)
        self._latest = link
        return link

    def forget(self, peer: int) -> None:
        """Expect nothing of worker ``peer``, for instance because it takes over another state."""
        if self._links.pop(peer, None) is self._latest:
            self._latest = None

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs: counts and tensors by peer, the latest peer last."""
        links = sorted(self._links.items(), key=lambda item: item[1] is self._latest)
        return {str(peer): {"count": link.count, **link.expectation.state_dict()} for peer, link in links}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._links, self._latest = {}, None
        for peer, saved in state.items():
            link = self.to(int(peer))
            link.count = saved["count"]
            link.expectation.load_state_dict(saved)
