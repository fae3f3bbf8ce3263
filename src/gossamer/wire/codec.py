"""The interface of a codec, and how codecs go through a vector."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Codec(Protocol):
    """Encodes a vector as bytes, for a receiver that has a vector of its own nearby.

    A codec keeps no state: ``Link`` and ``MeanLink`` remember how far apart workers were and pass it as ``reach``. Both
    ends of a message have the same codec, length and floating-point dtype.
    """

    @property
    def name(self) -> str:
        """Its name, for people."""

    @property
    def block(self) -> int:
        """Elements per block. There is one reach and one distance for each block; the last block may be shorter."""

    @property
    def headroom(self) -> float:
        """How many times farther apart than of late two workers may be and still decode each other's messages."""

    def size_bytes(self, num_elements: int) -> int:
        """Return the length of a message. It depends on nothing else."""

    def first_reach(self, vector: Tensor) -> Tensor | None:
        """Return the reach to try if nothing is known about the receiver; ``None``: send for any receiver."""

    def encode(
        self, vector: Tensor, reach: Tensor | None, seed: int, message: Tensor, lost: Tensor | None = None
    ) -> None:
        """Write ``vector`` into ``message``, a uint8 tensor of ``size_bytes`` that begins at a multiple of 4 bytes.

        A receiver can decode a block if no element of its own vector is farther than ``reach`` from ours. If ``reach``
        is ``None``, any receiver can. ``lost``, if given, receives ``vector`` minus the decoded values, on average
        zero. ``seed`` decides how numbers are rounded. Elements that are not finite, or the whole blocks that they are
        in, are decoded as not finite.
        """

    def decode(self, message: Tensor, reference: Tensor, out: Tensor, weight: float = 1.0) -> Tensor:
        """Add ``weight`` times the decoded values to ``out``; not in blocks that cannot be decoded.

        ``reference`` is the receiver's own vector. The decoded values do not depend on it. Return for each block a
        bound on the distance between the sender's elements and ``reference``: inf if it cannot be decoded, NaN if some
        element is not finite.
        """


BLOCK = 1024
"""Elements per block of our codecs."""

SEGMENT = 1 << 16
"""Elements that a CPU works on at a time: so few that intermediate results stay in a core's cache."""


def segments_at_a_time(device: torch.device) -> int:
    """Return how many segments are worked on together: many on a GPU, where every call costs time."""
    return 1 if device.type == "cpu" else 128


def may_hold(mask: Tensor) -> bool:
    """Return whether some element of ``mask`` may be true: on a GPU always, since to look would mean to wait for it.

    What follows has to do nothing where the mask is false.
    """
    return mask.device.type != "cpu" or bool(mask.any())


@dataclass(frozen=True, slots=True)
class Part:
    """A range of elements that is worked on at a time: whole segments, or the rest behind them."""

    index: int
    """The number of its first segment."""
    start: int
    stop: int

    @property
    def blocks(self) -> slice:
        return slice(self.start // BLOCK, num_blocks(self.stop))

    @property
    def size(self) -> int:
        """Number of elements, rounded up to whole blocks."""
        return num_blocks(self.stop - self.start) * BLOCK

    def of(self, vector: Tensor) -> Tensor:
        """Return the elements, a view."""
        return vector[self.start : self.stop]

    def rows(self, vector: Tensor) -> Tensor:
        """Return the elements with one block per row: a view, or a copy if the last block is to be filled with 0."""
        elements, missing = self.of(vector), self.start + self.size - self.stop
        if missing:
            elements = torch.nn.functional.pad(elements, (0, missing))
        return elements.view(-1, BLOCK)

    def cut(self, rows: Tensor) -> Tensor:
        """Return the elements of ``rows`` without what fills the last block, a view."""
        return rows.view(-1)[: self.stop - self.start]


def parts(vector: Tensor) -> Iterator[Part]:
    """Yield the parts of a vector, in order."""
    length, step = len(vector), SEGMENT * segments_at_a_time(vector.device)
    whole = length - length % SEGMENT
    for start in range(0, whole, step):
        yield Part(start // SEGMENT, start, min(start + step, whole))
    if whole < length:
        yield Part(whole // SEGMENT, whole, length)


class Buffers:
    """Memory for intermediate results of one part at a time, one block per row."""

    def __init__(self, vector: Tensor, *dtypes: torch.dtype) -> None:
        size = max((part.size for part in parts(vector)), default=0)
        self._memory = [torch.empty(size, dtype=dtype, device=vector.device) for dtype in dtypes]

    def rows(self, part: Part) -> tuple[Tensor, ...]:
        """Return the buffers, as long as ``part``."""
        return tuple(each[: part.size].view(-1, BLOCK) for each in self._memory)


def num_blocks(num_elements: int, block: int = BLOCK) -> int:
    return -(-num_elements // block)


def align(size_bytes: int, to: int = 4) -> int:
    """Round up, so that parts of a message can be viewed as integers of ``to`` bytes."""
    return -(-size_bytes // to) * to


def block_max(vector: Tensor, block: int = BLOCK) -> Tensor:
    """Return max |element| of each block in float32; not finite where some element is not."""
    whole = len(vector) - len(vector) % block
    rows = [vector[:whole].view(-1, block)] if whole else []
    if whole < len(vector):
        rows.append(vector[whole:].view(1, -1))
    found = [torch.maximum(each.amax(1), -each.amin(1)).float() for each in rows]
    return torch.cat(found) if len(found) > 1 else found[0] if found else torch.zeros(0, device=vector.device)


def copy_blocks(target: Tensor, source: Tensor, chosen: Tensor, block: int = BLOCK) -> None:
    """Copy the ``chosen`` blocks of a vector, a mask, to another."""
    whole = len(target) // block
    if bool(chosen[:whole].any()):
        rows = target[: whole * block].view(-1, block), source[: whole * block].view(-1, block)
        rows[0][chosen[:whole]] = rows[1][chosen[:whole]]
    if whole < len(chosen) and bool(chosen[whole]):
        target[whole * block :].copy_(source[whole * block :])
