"""Means over a group with a codec: a reduce-scatter and an all-gather of messages.

The vector is cut into as many chunks as the group has members, and each member owns one chunk. On member i of m:

    messages = link.scatter(vector, size, index, out)     row c: chunk c for its owner      out  = s_i − Q(s_i)
    … all-to-all: row j of what arrives is member j's message for our chunk …
    message = link.reduce(received, weights)              Q(M), M = Σ_j w_j Q(s_j) / Σ_j w_j + e
    … all-gather: row c of what arrives is the mean of chunk c …
    done = link.gather(received)                          out += Q(M), the answer

Each member sends ``2 (m − 1)/m`` times the bytes of a message for the whole vector, as in a ring all-reduce. Its own
part in its own chunk is not encoded.

The answer of member i is ``Q(M) + s_i − Q(s_i)``: up to what ``Q(M)`` loses, the members' displacements sum to zero.
The owner adds that loss ``e`` to its next mean (error feedback), so losses do not accumulate. With ``same`` the answer
is ``Q(M)`` itself, equal to the bit on all members.

The owner decodes relative to its own vector, and so learns how far the members are from it. From that it chooses a
reach for ``Q(M)`` that all of them are within. The distances travel along, and are what members expect at their next
mean. A block of some member that the owner cannot decode is void: all members keep what they have, so displacements
still sum to zero. With ``same`` that is not possible; the members repeat the mean at once, with messages that any
receiver can decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gossamer.wire.codec import Codec, align, block_max, copy_blocks, num_blocks
from gossamer.wire.expectation import MEAN_DECAY, MEAN_HEADROOM, Expectation
from gossamer.wire.noise import mix

VOID = -128
"""Instead of a distance: the block is void."""

_CODES = (-126, 126)
"""Least and greatest code of a distance d: 2 log2 d, rounded up."""


@dataclass(frozen=True)
class Layout:
    """How a vector is cut into chunks, one for each member."""

    num_elements: int
    size: int
    """Number of members."""

    @property
    def chunk(self) -> int:
        """Elements of a chunk. The last chunks can be shorter, or empty."""
        return -(-self.num_elements // self.size)

    def range(self, owner: int) -> slice:
        start, stop = (min(member * self.chunk, self.num_elements) for member in (owner, owner + 1))
        return slice(start, stop)


def scatter_bytes(codec: Codec, num_elements: int, size: int) -> int:
    """Return the length of a message to the owner of a chunk."""
    return align(codec.size_bytes(Layout(num_elements, size).chunk))


def gather_bytes(codec: Codec, num_elements: int, size: int) -> int:
    """Return the length of an owner's message to all members: the mean of its chunk, and distances."""
    chunk = Layout(num_elements, size).chunk
    return align(codec.size_bytes(chunk) + num_blocks(chunk, codec.block))


@dataclass
class _Round:
    """A mean in progress."""

    vector: Tensor
    layout: Layout
    index: int
    out: Tensor
    same: bool
    seed: int
    feedback: Tensor | None = None
    """What the encoded mean of our chunk loses."""


@dataclass
class MeanLink:
    """One worker's part in the means of one topic. Used by one thread at a time, for one mean at a time."""

    codec: Codec
    seed: int
    count: int = 0
    """Means so far, including repetitions."""
    repeating: bool = False
    """The next mean repeats a void one: messages are for any receiver."""
    expectations: dict[tuple[Layout, int], Expectation] = field(default_factory=dict)
    """How far the owner of each chunk is expected to be."""
    feedback: dict[tuple[Layout, int], Tensor] = field(default_factory=dict)
    """What the latest mean of a chunk that we own has lost."""
    _round: _Round | None = None

    def scatter(self, vector: Tensor, size: int, index: int, out: Tensor, same: bool = False) -> Tensor:
        """Return the messages to the owners, one per row; our own row is not used.

        ``index`` is our position among the ``size`` members. ``out`` has the answer when ``gather`` returns; until then
        neither it nor ``vector`` may change.
        """
        codec, layout = self.codec, Layout(len(vector), size)
        current = self._round = _Round(vector, layout, index, out, same, self.next_seed())
        length = scatter_bytes(codec, len(vector), size)
        messages = torch.zeros((size, length), dtype=torch.uint8, device=vector.device)
        for owner in range(size):
            chunk = layout.range(owner)
            if owner == index:
                out[chunk].zero_()
                continue
            part = vector[chunk]
            message = messages[owner, : codec.size_bytes(len(part))]
            codec.encode(part, self.reach(part, layout, owner), mix(current.seed, owner), message, out[chunk])
        return messages

    def reduce(self, received: Sequence[Tensor] | Tensor, weights: Sequence[float] | None = None) -> Tensor:
        """Return the message to all members, from the messages of all members for our chunk."""
        codec, current = self.codec, self._round
        assert current is not None
        layout, index = current.layout, current.index
        own = current.vector[layout.range(index)]
        shares = relative_weights(weights, layout.size)
        size = codec.size_bytes(len(own))
        mean = own.to(torch.promote_types(own.dtype, torch.float32)) * shares[index]
        seen = [
            codec.decode(theirs[:size], own, mean, shares[member])
            for member, theirs in enumerate(received)
            if member != index
        ]
        message = torch.zeros(
            gather_bytes(codec, layout.num_elements, layout.size), dtype=torch.uint8, device=own.device
        )
        stored = self._distances(message, own)
        current.feedback = encode_mean(
            codec, mean, own, seen, self.feedback.get((layout, index)), mix(current.seed, index), message[:size], stored
        )
        return message

    def gather(self, received: Sequence[Tensor] | Tensor) -> bool:
        """Complete ``out`` from the owners' messages. Return False if the mean has to be repeated."""
        codec, current = self.codec, self._round
        assert current is not None
        self._round, layout = None, current.layout
        parts = [current.vector[layout.range(owner)] for owner in range(layout.size)]
        stored = [self._distances(message, part) for message, part in zip(received, parts, strict=True)]
        self.repeating = current.same and any(bool((each == VOID).any()) for each in stored)
        if current.same:
            current.out.zero_()
        for owner, (message, part) in enumerate(zip(received, parts, strict=True)):
            self.observe(stored[owner], part, layout, owner)
            if self.repeating:
                continue
            out = current.out[layout.range(owner)]
            codec.decode(message[: codec.size_bytes(len(part))], part, out)
            copy_blocks(out, part, stored[owner] == VOID, codec.block)
        if current.feedback is not None and not self.repeating:
            self.feedback[layout, current.index] = current.feedback
        return not self.repeating

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs: a count, and tensors by the layout and the number of their chunk."""
        return {
            "count": self.count,
            "expectations": {_key(*at): each.state_dict() for at, each in self.expectations.items()},
            "feedback": {_key(*at): each for at, each in self.feedback.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.repeating = state["count"], False
        self.feedback = {_from_key(key): each for key, each in state["feedback"].items()}
        self.expectations = {
            _from_key(key): Expectation(self.codec, MEAN_DECAY, MEAN_HEADROOM) for key in state["expectations"]
        }
        for key, each in state["expectations"].items():
            self.expectations[_from_key(key)].load_state_dict(each)

    def next_seed(self) -> int:
        self.count += 1
        return mix(self.seed, self.count)

    def reach(self, part: Tensor, layout: Layout, owner: int) -> Tensor | None:
        """Return the reach for a message to the owner of a chunk."""
        return None if self.repeating else self._expectation(layout, owner).reach(part)

    def observe(self, stored: Tensor, part: Tensor, layout: Layout, owner: int) -> None:
        """Learn how far members were from the owner of a chunk."""
        expectation, void = self._expectation(layout, owner), stored == VOID
        expectation.observe(torch.exp2(stored / 2).masked_fill_(void, torch.inf))
        if bool(void.any()):
            expectation.grow(void, part)

    def _expectation(self, layout: Layout, owner: int) -> Expectation:
        return self.expectations.setdefault((layout, owner), Expectation(self.codec, MEAN_DECAY, MEAN_HEADROOM))

    def _distances(self, message: Tensor, part: Tensor) -> Tensor:
        """Return the code of the distance of each block, a view of an owner's message."""
        start = self.codec.size_bytes(len(part))
        return message[start : start + num_blocks(len(part), self.codec.block)].view(torch.int8)


def _key(layout: Layout, owner: int) -> str:
    return f"{layout.num_elements}/{layout.size}/{owner}"


def _from_key(key: str) -> tuple[Layout, int]:
    num_elements, size, owner = map(int, key.split("/"))
    return Layout(num_elements, size), owner


def relative_weights(weights: Sequence[float] | None, size: int) -> list[float]:
    """Return the share of each member in the mean: all zero if all weights are."""
    if weights is None:
        return [1 / size] * size
    total = sum(weights)
    return [weight / total if total > 0 else 0.0 for weight in weights]


def encode_mean(
    codec: Codec,
    mean: Tensor,
    own: Tensor,
    seen: Sequence[Tensor],
    feedback: Tensor | None,
    seed: int,
    message: Tensor,
    stored: Tensor,
) -> Tensor:
    """Write ``mean + feedback`` into ``message``, for all members, and their distances into ``stored``.

    ``seen`` are the distances of the members from ``own``. Return the next feedback.
    """
    farthest = torch.zeros(len(stored), device=own.device)
    for each in seen:
        torch.maximum(farthest, each.nan_to_num(0.0, posinf=torch.inf), out=farthest)
    void = farthest == torch.inf
    if bool(void.any()):
        # Beside an element of the owner that is not finite nothing can be decoded: then all members are to see it.
        void &= torch.isfinite(block_max(own, codec.block))
        copy_blocks(mean, own, void, codec.block)
    if feedback is not None:
        mean.add_(feedback)
    lost = torch.empty_like(mean)
    to_mean = block_max(mean - own, codec.block).nan_to_num_(0.0, 0.0)
    farthest.nan_to_num_(posinf=0.0)
    codec.encode(mean, farthest + to_mean, seed, message, lost)
    stored.copy_(torch.log2(farthest).mul_(2).ceil_().clamp_(*_CODES).masked_fill_(void, VOID))
    if bool(void.any()):
        copy_blocks(lost, torch.zeros_like(lost) if feedback is None else feedback, void, codec.block)
    return lost.nan_to_num_(0.0, 0.0, 0.0)
