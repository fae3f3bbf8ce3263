"""Links: the ends of a connection over which two workers exchange vectors with a codec.

An exchange, on each of the two workers:

    message = link.encode(vector, out)             out  = s − Q(s)      what our own message loses
    … send message, receive theirs …
    decoded = link.decode(theirs, vector, out)     out += Q(s')         the answer
    … tell the peer whether we could decode, and learn whether it could …
    valid = link.settle(decoded, peer_decoded)     valid if both could; else the exchange is void on both sides

The answer is ``Q(s') + s − Q(s)``, so ``answer − s = Q(s') − Q(s)``: the displacements that the two workers compute from
their answers sum to zero, whatever the codec lost.

A link remembers how far apart the two workers were. The first message to a peer, and every message after one that the
peer could not decode, is absolute: any receiver can decode it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gossamer.wire.codec import Codec
from gossamer.wire.expectation import Expectation
from gossamer.wire.noise import mix

NORM_BYTES = 8
"""Behind the codec's part of a message: the norm of the vector in float64."""


def message_bytes(codec: Codec, num_elements: int) -> int:
    """Return the length of the messages of a link."""
    return codec.size_bytes(num_elements) + NORM_BYTES


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
        """Return the message for ``vector``, in ``message`` if given, and write into ``out`` what it loses."""
        size = self.codec.size_bytes(len(vector))
        if message is None:
            message = torch.empty(size + NORM_BYTES, dtype=torch.uint8, device=vector.device)
        self.count += 1
        reach = self.expectation.reach(vector)
        self.codec.encode(vector, reach, mix(self.seed, self.count), message[:size], out)
        norm = torch.linalg.vector_norm(vector, dtype=torch.promote_types(vector.dtype, torch.float32)).double()
        message[size:] = norm.view(1).view(torch.uint8)
        self.norm = float(norm)
        return message

    def decode(self, message: Tensor, vector: Tensor, out: Tensor) -> bool:
        """Add the peer's values to ``out`` and return whether its message could be decoded.

        ``vector`` and ``out`` are as ``encode`` left them.
        """
        size = self.codec.size_bytes(len(vector))
        self.peer_norm = float(message[size:].view(torch.float64))
        self._seen = self.codec.decode(message[:size], vector, out)
        return self._seen is not None

    def settle(self, decoded: bool, peer_decoded: bool) -> bool:
        """Return whether the exchange is valid: both ends could decode."""
        if decoded:
            assert self._seen is not None
            self.expectation.observe(self._seen)
        elif not peer_decoded:
            self.expectation.failures += 1
        return decoded and peer_decoded


class Links:
    """All links of one worker. A new link expects the distances of the one that was used last."""

    def __init__(self, codec: Codec, seed: int, rank: int) -> None:
        self.codec, self.seed = codec, mix(seed, rank)
        self._links: dict[int, Link] = {}
        self._latest: Link | None = None

    def to(self, peer: int) -> Link:
        """Return the link to worker ``peer``, for an exchange that begins."""
        link = self._links.get(peer)
        if link is None:
            link = self._links[peer] = Link(self.codec, mix(self.seed, peer))
            if self._latest is not None:
                link.expectation.distances = self._latest.expectation.distances
        self._latest = link
        return link

    def forget(self, peer: int) -> None:
        """Expect nothing of worker ``peer``: it starts anew, or takes over another state."""
        self._links.pop(peer, None)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs, by peer: counts and tensors."""
        return {
            str(peer): {"count": link.count, "expectation": link.expectation.state_dict()}
            for peer, link in self._links.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._links, self._latest = {}, None
        for peer, saved in state.items():
            link = self.to(int(peer))
            link.count = saved["count"]
            link.expectation.load_state_dict(saved["expectation"])
