"""BFloat16: two bytes per element.

A receiver about which nothing is known gets bfloat16: the upper half of float32, rounded at random to one of the two
neighbours such that it is right on average. Bfloat16 has 8 significant bits. Two workers that are closer than that
could not come closer by such messages: rounded to the nearest, both would send the same numbers; rounded at random,
each message would add noise of that size. So once the distance is known, the same two bytes carry the 16 bits in which
the two may differ (``gossamer.wire.lattice``). With 64-fold headroom the step is between 1/512 and 1/256 of the largest
distance in the block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gossamer.wire import lattice, noise
from gossamer.wire.codec import BLOCK, Buffers, parts

BITS = 16
PLAIN = 2
"""Mode of the blocks of a message in bfloat16, beside those of ``gossamer.wire.lattice``."""

NAN = 0x7FC00000
"""The bits of a float32 that is not a number."""


@dataclass(frozen=True)
class BFloat16:
    """Two bytes per element: bfloat16 at first, then relative to how far apart the two ends are."""

    name: ClassVar[str] = "bfloat16"
    block: ClassVar[int] = BLOCK
    headroom: ClassVar[float] = 64.0

    def size_bytes(self, num_elements: int) -> int:
        return lattice.size_bytes(num_elements, BITS)

    def first_reach(self, vector: Tensor) -> None:
        return None

    def encode(
        self, vector: Tensor, reach: Tensor | None, seed: int, message: Tensor, lost: Tensor | None = None
    ) -> None:
        if reach is not None:
            lattice.encode(vector, reach, seed, BITS, message, lost)
            return
        checks, halves, _ = lattice.sections(message, len(vector), BITS)
        checks.fill_(PLAIN)
        finite = bool(torch.isfinite(vector.sum()))
        buffers = Buffers(vector, torch.int32, torch.int32)
        for part in parts(vector):
            bits, upper = buffers.rows(part)
            round_bits(part.rows(vector).float(), noise.bits16(seed, part, vector.device), finite, bits)
            part.of(halves).copy_(part.cut(torch.bitwise_right_shift(bits, 16, out=upper)))
            if lost is not None:
                decoded = part.cut(bits.bitwise_and_(-1 << 16)).view(torch.float32)
                torch.sub(part.of(vector), decoded, out=part.of(lost))

    def decode(self, message: Tensor, reference: Tensor, out: Tensor, weight: float = 1.0) -> Tensor:
        checks, halves, _ = lattice.sections(message, len(reference), BITS)
        if not len(checks) or int(lattice.modes(checks[0])) != PLAIN:
            return lattice.decode(message, reference, out, BITS, weight)
        distances = torch.empty(len(checks), device=reference.device)
        buffers = Buffers(reference, torch.float32, torch.promote_types(reference.dtype, torch.float32))
        for part in parts(reference):
            decoded, difference = buffers.rows(part)
            decoded.copy_(part.rows(halves.view(torch.bfloat16)))
            part.of(out).add_(part.cut(decoded), alpha=weight)
            torch.sub(part.rows(reference), decoded, out=difference)
            # Rounding has moved an element by up to 1/128 of its size.
            distances[part.blocks] = difference.abs_().amax(1).float() + decoded.abs_().amax(1) / 128
        return distances.masked_fill_(distances == torch.inf, torch.nan)


def round_bits(x: Tensor, random: Tensor, finite: bool, out: Tensor) -> None:
    """Round float32 numbers at random: the upper halves of ``out``, int32, are the bits of bfloat16 numbers.

    ``random`` are integers from 0 to 65,535. Added to the bits of a number, they carry into its upper half with the
    probability that its lower half gives. Numbers that are not finite stay what they are; ``finite``: there are none.
    """
    torch.add(x.view(torch.int32), random, out=out)
    if not finite:
        # A carry could make infinity of NaN, or zero. The same bits on every device, which torch's conversion has not.
        kept = torch.where(torch.isnan(x), NAN, x.view(torch.int32))
        out.copy_(torch.where(torch.isfinite(x), out, kept))
