"""Exchanges and means of workers that are all in one process."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.wire.codec import num_blocks
from gossamer.wire.expectation import MAX_FAILURES
from gossamer.wire.link import Link
from gossamer.wire.mean import Layout, MeanLink, encode_mean, relative_weights
from gossamer.wire.noise import mix


def exchange(links: tuple[Link, Link], vectors: tuple[Tensor, Tensor], outs: tuple[Tensor, Tensor]) -> bool:
    """Exchange two vectors over the two ends of a connection. Return whether it is valid.

    ``outs`` receive the answers; if the exchange is void, the vectors themselves: displacement zero.
    """
    messages = [link.encode(vector, out) for link, vector, out in zip(links, vectors, outs, strict=True)]
    decoded = [
        link.decode(message, vector, out)
        for link, message, vector, out in zip(links, reversed(messages), vectors, outs, strict=True)
    ]
    valid = [links[0].settle(*decoded), links[1].settle(*reversed(decoded))]
    if not all(valid):
        for vector, out in zip(vectors, outs, strict=True):
            out.copy_(vector)
    return all(valid)


def average(
    links: Sequence[MeanLink],
    vectors: Sequence[Tensor],
    outs: Sequence[Tensor],
    weights: Sequence[float] | None = None,
    same: bool = False,
) -> int:
    """Compute the mean of a group, one link and one vector per member. Return the number of attempts, usually 1.

    ``outs`` receive the answers. It is what ``scatter``, ``reduce`` and ``gather`` compute, but a member encodes its
    vector in one message instead of one for each owner, which takes far fewer calls. The distances that links remember
    differ in their blocks, so a link is for one of the two.
    """
    for attempt in range(1, MAX_FAILURES + 3):
        mean = _reduce(links, vectors, outs, relative_weights(weights, len(vectors)))
        if mean is not None:
            for out in outs:
                out.copy_(mean) if same else out.add_(mean)
            return attempt
    raise RuntimeError(f"wire codec {links[0].codec.name} cannot decode an absolute message")


def _reduce(
    links: Sequence[MeanLink], vectors: Sequence[Tensor], outs: Sequence[Tensor], shares: Sequence[float]
) -> Tensor | None:
    """Return the decoded mean, and leave in ``outs`` what each member's message lost. None if the mean is void."""
    codec, layout = links[0].codec, Layout(len(vectors[0]), len(vectors))
    whole, ranges = Layout(layout.num_elements, 1), [layout.range(index) for index in range(layout.size)]
    owned = torch.cat([vector[own] for vector, own in zip(vectors, ranges, strict=True)])
    message = torch.empty(codec.size_bytes(len(owned)), dtype=torch.uint8, device=owned.device)
    mean = torch.zeros_like(owned, dtype=torch.promote_types(owned.dtype, torch.float32))
    farthest = torch.zeros(num_blocks(len(owned), codec.block), device=owned.device)
    valid = True
    for link, vector, out, own, share in zip(links, vectors, outs, ranges, shares, strict=True):
        link.count += 1
        codec.encode(vector, link.expect(whole, 1)[0].reach(vector), mix(link.seed, link.count), message, out)
        seen = codec.decode(message, owned, mean, share)
        valid = valid and seen is not None
        if seen is not None:
            torch.maximum(farthest, seen, out=farthest)
        # A member's part in its own chunk is exact.
        mean[own].add_(out[own], alpha=share)
        out[own].zero_()
    if not valid:
        for link in links:
            link.expect(whole, 1)[0].failures += 1
        return None
    feedback = [link.feedback.get((layout, index)) for index, link in enumerate(links)]
    for own, each in zip(ranges, feedback, strict=True):
        if each is not None:
            mean[own].add_(each)
    lost = encode_mean(codec, mean, owned, farthest, mix(links[0].seed, links[0].count, 1), message)
    for index, (link, own) in enumerate(zip(links, ranges, strict=True)):
        link.feedback[layout, index] = lost[own]
        link.expect(whole, 1)[0].observe(farthest)
    decoded = torch.zeros_like(mean)
    codec.decode(message, owned, decoded)
    return decoded
