"""Exchanges and means of workers that are all in one process."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.wire.codec import copy_blocks, num_blocks
from gossamer.wire.link import Link
from gossamer.wire.mean import VOID, Layout, MeanLink, encode_mean, relative_weights


def exchange(links: tuple[Link, Link], vectors: tuple[Tensor, Tensor], outs: tuple[Tensor, Tensor]) -> int:
    """Exchange two vectors over the two ends of a connection; ``outs`` receive the answers.

    Return the number of blocks that could not be decoded. In these the answers are the vectors themselves.
    """
    ends = tuple(zip(links, vectors, outs, strict=True))
    messages = [link.encode(vector, out) for link, vector, out in ends]
    verdicts = [link.decode(messages[1 - at], vector, out) for at, (link, vector, out) in enumerate(ends)]
    voids = [link.settle(verdicts[at], verdicts[1 - at], vector, out) for at, (link, vector, out) in enumerate(ends)]
    return voids[0]


def average(
    links: Sequence[MeanLink],
    vectors: Sequence[Tensor],
    outs: Sequence[Tensor],
    weights: Sequence[float] | None = None,
    same: bool = False,
) -> int:
    """Compute the mean of a group, one link and one vector per member; ``outs`` receive the answers.

    It is what ``scatter``, ``reduce`` and ``gather`` compute, but each member encodes its whole vector in one message,
    which takes far fewer calls. Return how often messages were sent: 2 if the mean had to be repeated, else 1.
    """
    codec, layout, whole = links[0].codec, Layout(len(vectors[0]), len(vectors)), Layout(len(vectors[0]), 1)
    ranges = [layout.range(index) for index in range(layout.size)]
    shares = relative_weights(weights, layout.size)
    owned = torch.cat([vector[own] for vector, own in zip(vectors, ranges, strict=True)])
    mean = torch.zeros_like(owned, dtype=torch.promote_types(owned.dtype, torch.float32))
    message = torch.empty(codec.size_bytes(len(owned)), dtype=torch.uint8, device=owned.device)
    stored = torch.empty(num_blocks(len(owned), codec.block), dtype=torch.int8, device=owned.device)
    seen = []
    for link, vector, out, own, share in zip(links, vectors, outs, ranges, shares, strict=True):
        codec.encode(vector, link.reach(vector, whole, 0), link.next_seed(), message, out)
        seen.append(codec.decode(message, owned, mean, share))
        # A member's part in its own chunk is not encoded.
        mean[own].add_(out[own], alpha=share)
        out[own].zero_()
    feedback = _feedback(links, layout, ranges, mean)
    lost = encode_mean(codec, mean, owned, seen, feedback, links[0].next_seed(), message, stored)
    for link, vector in zip(links, vectors, strict=True):
        link.observe(stored, vector, whole, 0)
        link.repeating = same and bool((stored == VOID).any())
    if links[0].repeating:
        return 1 + average(links, vectors, outs, weights, same)
    for index, (link, own) in enumerate(zip(links, ranges, strict=True)):
        link.feedback[layout, index] = lost[own]
    decoded = torch.zeros_like(mean)
    codec.decode(message, owned, decoded)
    for vector, out in zip(vectors, outs, strict=True):
        if same:
            out.copy_(decoded)
        else:
            copy_blocks(out.add_(decoded), vector, stored == VOID, codec.block)
    return 1


def _feedback(links: Sequence[MeanLink], layout: Layout, ranges: Sequence[slice], like: Tensor) -> Tensor:
    """Return what the owners' latest means have lost, as one vector."""
    feedback = torch.zeros_like(like)
    for index, (link, own) in enumerate(zip(links, ranges, strict=True)):
        kept = link.feedback.get((layout, index))
        if kept is not None:
            feedback[own] = kept
    return feedback
