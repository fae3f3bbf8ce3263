"""Means over a group with a codec: a reduce-scatter and an all-gather of messages.

The vector is cut into as many chunks as the group has members, and each member owns one chunk. On member i of m:

    messages = link.scatter(vector, size, index, out)     row c: chunk c for its owner      out  = s_i − Q(s_i)
    … all-to-all: row j of what arrives is member j's message for our chunk …
    message = link.reduce(received, weights)              Q(M), M = Σ_j w_j Q(s_j) / Σ_j w_j + e
    … all-gather: row c of what arrives is the mean of chunk c …
    valid = link.gather(received)                         out += Q(M), the answer

Each member sends ``2 (m − 1)/m`` times the bytes of a message for the whole vector, as in a ring all-reduce. Its own
part in its own chunk is not encoded.

The answer of member i is ``Q(M) + s_i − Q(s_i)``: up to what ``Q(M)`` loses, the members' displacements sum to zero. The
owner adds that loss ``e`` to its next mean (error feedback), so losses do not accumulate. With ``same`` the answer is
``Q(M)`` itself, equal to the bit on all members.

The owner decodes relative to its own vector, and so learns how far the members are from it. From that it chooses a
reach for ``Q(M)`` that all of them are within. The distances travel along, and are the members' reach for their next
messages. If an owner cannot decode a message, the mean is void. All members learn it, and repeat the three phases at
once. The messages of the repetition are absolute: any receiver can decode them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gossamer.wire.codec import Codec, align, block_max, num_blocks
from gossamer.wire.expectation import Expectation
from gossamer.wire.lattice import MAX_LOG2, MIN_LOG2, log2_above, power_of_two
from gossamer.wire.noise import mix

VALID, VOID = 0, 1


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
    return codec.size_bytes(Layout(num_elements, size).chunk)


def gather_bytes(codec: Codec, num_elements: int, size: int) -> int:
    """Return the length of an owner's message to all members: the mean of its chunk, the distances, the status."""
    chunk = Layout(num_elements, size).chunk
    return align(codec.size_bytes(chunk) + num_blocks(chunk, codec.block) + 1)


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

    @property
    def own(self) -> slice:
        return self.layout.range(self.index)


@dataclass
class MeanLink:
    """One worker's part in the means of one topic. Used by one thread at a time, for one mean at a time."""

    codec: Codec
    seed: int
    count: int = 0
    """Means so far, including void ones."""
    expectations: dict[Layout, list[Expectation]] = field(default_factory=dict)
    """How far the owner of each chunk is expected to be."""
    feedback: dict[tuple[Layout, int], Tensor] = field(default_factory=dict)
    """What the latest mean of a chunk that we own has lost."""
    _round: _Round | None = None

    def scatter(self, vector: Tensor, size: int, index: int, out: Tensor, same: bool = False) -> Tensor:
        """Return the messages to the owners, one per row; our own row is not used.

        ``index`` is our position among the ``size`` members. ``out`` receives the answer at the end; it and ``vector``
        must not change until then.
        """
        codec, layout = self.codec, Layout(len(vector), size)
        self.count += 1
        current = self._round = _Round(vector, layout, index, out, same, mix(self.seed, self.count))
        expectations = self.expect(layout, size)
        length = scatter_bytes(codec, len(vector), size)
        messages = torch.zeros((size, length), dtype=torch.uint8, device=vector.device)
        for owner in range(size):
            chunk = layout.range(owner)
            if owner == index:
                out[chunk].zero_()
                continue
            part = vector[chunk]
            message = messages[owner, : codec.size_bytes(len(part))]
            codec.encode(part, expectations[owner].reach(part), mix(current.seed, owner), message, out[chunk])
        return messages

    def reduce(self, received: Sequence[Tensor] | Tensor, weights: Sequence[float] | None = None) -> Tensor:
        """Return the message to all members, from the messages of all members for our chunk."""
        codec, current = self.codec, self._round
        assert current is not None
        layout, own = current.layout, current.vector[current.own]
        shares = relative_weights(weights, layout.size)
        size, blocks = codec.size_bytes(len(own)), num_blocks(len(own), codec.block)
        message = torch.zeros(
            gather_bytes(codec, layout.num_elements, layout.size), dtype=torch.uint8, device=own.device
        )  # fmt: skip
        mean = own.to(torch.promote_types(own.dtype, torch.float32)) * shares[current.index]
        farthest = torch.zeros(blocks, device=own.device)
        for member, theirs in enumerate(received):
            if member == current.index:
                continue
            seen = codec.decode(theirs[:size], own, mean, shares[member])
            if seen is None:
                message[-1] = VOID
                return message
            torch.maximum(farthest, seen, out=farthest)
        feedback = self.feedback.get((layout, current.index))
        if feedback is not None:
            mean.add_(feedback)
        current.feedback = encode_mean(codec, mean, own, farthest, current.seed, message[:size])
        self._distances(message, own).copy_(log2_above(farthest).clamp_(MIN_LOG2, MAX_LOG2))
        message[-1] = VALID
        return message

    def gather(self, received: Sequence[Tensor] | Tensor) -> bool:
        """Complete ``out`` from the owners' messages. Return False if the mean is void: repeat it."""
        codec, current = self.codec, self._round
        assert current is not None
        self._round, layout = None, current.layout
        expectations = self.expect(layout, layout.size)
        if any(int(message[-1]) == VOID for message in received):
            for expectation in expectations:
                expectation.failures += 1
            return False
        if current.same:
            current.out.zero_()
        for owner, message in enumerate(received):
            chunk = layout.range(owner)
            part = current.vector[chunk]
            if codec.decode(message[: codec.size_bytes(len(part))], part, current.out[chunk]) is None:
                raise RuntimeError(f"wire codec {codec.name} cannot decode a mean that all members are in reach of")
            expectations[owner].observe(power_of_two(self._distances(message, part)))
        if current.feedback is not None:
            self.feedback[layout, current.index] = current.feedback
        return True

    def expect(self, layout: Layout, count: int) -> list[Expectation]:
        return self.expectations.setdefault(layout, [Expectation(self.codec) for _ in range(count)])

    def _distances(self, message: Tensor, part: Tensor) -> Tensor:
        """Return the log2 of the distances of each block, a view of an owner's message."""
        start = self.codec.size_bytes(len(part))
        return message[start : start + num_blocks(len(part), self.codec.block)].view(torch.int8)


def relative_weights(weights: Sequence[float] | None, size: int) -> list[float]:
    """Return the share of each member in the mean: all zero if all weights are."""
    if weights is None:
        return [1 / size] * size
    total = sum(weights)
    return [weight / total if total > 0 else 0.0 for weight in weights]


def encode_mean(codec: Codec, mean: Tensor, own: Tensor, farthest: Tensor, seed: int, message: Tensor) -> Tensor:
    """Encode the mean for all members, who are up to ``farthest`` from ``own``. Return what that loses."""
    lost = torch.empty_like(mean)
    codec.encode(mean, farthest + block_max(mean - own, codec.block).nan_to_num_(0.0, 0.0, 0.0), seed, message, lost)
    return lost.nan_to_num_(0.0, 0.0, 0.0)
