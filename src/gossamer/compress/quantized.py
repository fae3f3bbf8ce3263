"""Sign and Int8: a few bits per element, and one scale per chunk. Messages are gathered, and summed in rank order.

Sign: ``kept = s · sign(v)`` with ``s = mean |v|`` over chunks of 4,096 elements; sign(0) counts as +1. A byte holds
eight signs: about 32 times smaller than float32. ‖v − kept‖² = ‖v‖² − (chunk length) s² in every chunk.

Int8: ``kept = s · round(v / s)`` with ``s = max |v| / 127`` over chunks of 2,048 elements: about 4 times smaller than
float32, with an error of at most ``s/2``.

Reference for Sign: Karimireddy, Rebjock, Stich, Jaggi, "Error feedback fixes SignSGD", ICML 2019.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from gossamer.compress.compressor import Averaging, Part
from gossamer.effects import Gather

if TYPE_CHECKING:
    from gossamer.worker import Worker


@dataclass(frozen=True)
class Sign:
    """One bit per element and one scale per 4,096: about 32 times smaller. The ratio is fixed."""

    name: ClassVar[str] = "sign"
    chunk: ClassVar[int] = 4096

    def average(self, worker: Worker, vector: Tensor, round: int, topic: str) -> Averaging:
        lengths = torch.full((-(-vector.numel() // self.chunk),), self.chunk, device=vector.device)
        lengths[-1] = vector.numel() - self.chunk * (len(lengths) - 1)
        scales = (_norms(vector, self.chunk, 1) / lengths).to(vector.dtype)
        bits = torch.zeros(-(-vector.numel() // 8) * 8, dtype=torch.uint8, device=vector.device)
        torch.ge(vector, 0, out=bits[: vector.numel()])
        bits = bits.view(-1, 8)
        packed = bits[:, 0].clone()
        for position in range(1, 8):
            packed |= bits[:, position] << position

        def decode(scales: Tensor, packed: Tensor) -> Tensor:
            positions = torch.arange(8, dtype=torch.uint8, device=packed.device)
            bits = (packed[:, None] >> positions).bitwise_and_(1)
            signs = bits.view(-1)[: vector.numel()].to(vector.dtype).mul_(2).sub_(1)
            return _multiplied(signs, scales, self.chunk)

        return (yield from _average(vector, scales, packed, decode, round, topic))

    def size_bytes(self, num_elements: int, itemsize: int = 4) -> int:
        return -(-num_elements // self.chunk) * itemsize + -(-num_elements // 8)


@dataclass(frozen=True)
class Int8:
    """One byte per element and one scale per 2,048: about 4 times smaller. The ratio is fixed."""

    name: ClassVar[str] = "int8"
    chunk: ClassVar[int] = 2048

    def average(self, worker: Worker, vector: Tensor, round: int, topic: str) -> Averaging:
        scales = (_norms(vector, self.chunk, math.inf) / 127).to(vector.dtype)
        multiples = vector.clone()
        # Scale 0: all elements are zero, or too small for a scale. Divided by 1 they round to zero.
        for part, scale in _rows(multiples, scales.masked_fill(scales == 0, 1), self.chunk):
            part.div_(scale)
        # A scale that was rounded down can give 127.5. NaN has no int8 value; the scale of the chunk carries it.
        values = multiples.round_().clamp_(-127, 127).nan_to_num_(0).to(torch.int8)

        def decode(scales: Tensor, values: Tensor) -> Tensor:
            return _multiplied(values.to(scales.dtype), scales, self.chunk)

        return (yield from _average(vector, scales, values, decode, round, topic))

    def size_bytes(self, num_elements: int, itemsize: int = 4) -> int:
        return -(-num_elements // self.chunk) * itemsize + num_elements


def _average(
    vector: Tensor, scales: Tensor, codes: Tensor, decode: Callable[[Tensor, Tensor], Tensor], round: int, topic: str
) -> Averaging:
    answers = yield Gather((scales, codes), round, topic)
    mean = torch.zeros_like(vector)
    for their_scales, their_codes in answers:
        mean.add_(decode(their_scales, their_codes))
    return [Part(mean.div_(len(answers)))], Part(decode(scales, codes))


def _parts(vector: Tensor, chunk: int) -> list[Tensor]:
    """Return views with one chunk per row: all full chunks, and the shorter last one if there is one."""
    num_full = vector.numel() // chunk * chunk
    parts = (vector[:num_full].view(-1, chunk), vector[num_full:].view(1, -1))
    return [part for part in parts if part.numel()]


def _norms(vector: Tensor, chunk: int, order: float) -> Tensor:
    """Return the norm of every chunk, accumulated at least in float32."""
    wide = torch.promote_types(vector.dtype, torch.float32)
    return torch.cat([torch.linalg.vector_norm(part, order, dim=1, dtype=wide) for part in _parts(vector, chunk)])


def _rows(vector: Tensor, scales: Tensor, chunk: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield views with one chunk per row, and the scales of these rows as a column."""
    first = 0
    for part in _parts(vector, chunk):
        yield part, scales[first : first + len(part), None]
        first += len(part)


def _multiplied(vector: Tensor, scales: Tensor, chunk: int) -> Tensor:
    for part, scale in _rows(vector, scales, chunk):
        part.mul_(scale)
    return vector
