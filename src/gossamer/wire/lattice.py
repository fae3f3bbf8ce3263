"""Lattice points modulo a power of two: only the bits in which sender and receiver may differ travel.

Each block of a vector has a step ``q``, a power of two. An element ``s`` is rounded at random to one of the two lattice
points next to it, ``k q`` with an integer ``k``, such that it is ``s`` on average. Only the low ``bits`` of ``k``
travel. The receiver takes the lattice point with these low bits that is nearest to its own element. That is the
sender's if the two are less than about ``2^(bits − 1) q`` apart, and ``q`` is chosen for that. A checksum of the high
bits tells whether it was so everywhere.

If nothing is known about the receiver, ``q`` is so large that ``k`` itself has no more than ``bits``.

The step is at least the spacing of floating-point numbers at the block's largest element. So lattice points are exact
in floating point, and both ends compute the same numbers to the bit, on CPU and GPU.

A message: the low bits of each ``k``; log2 q of each block, as int8; the checksum; the mode, absolute or relative.

Reference: Lu, De Sa, "Moniqua: Modulo Quantized Communication in Decentralized SGD", ICML 2020. Deviations: a step per
block that is a power of two, chosen by the sender from distances that it has seen; the checksum.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from gossamer.wire import noise
from gossamer.wire.codec import SEGMENT, Buffers, Part, align, block_max, num_blocks, parts

ABSOLUTE, RELATIVE = 0, 1
"""Modes of a message: whether elements are to be completed from the receiver's own."""

NOT_FINITE = -128
"""Instead of the log2 of a step: some element of the block is not finite."""

MIN_LOG2, MAX_LOG2 = -126, 126
_CHECKSUM_BYTES = 4
_CHECKSUM_BASE = 0x9E3779B1
_RESIDUES = {8: torch.int8, 16: torch.int16}


def size_bytes(num_elements: int, bits: int) -> int:
    """Return the length of a message."""
    return align(num_elements * bits // 8 + num_blocks(num_elements) + _CHECKSUM_BYTES + 1)


def sections(message: Tensor, num_elements: int, bits: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the low bits of each element, the log2 of each step, the checksum and the mode, as views of a message."""
    ends = [num_elements * bits // 8]
    for length in (num_blocks(num_elements), _CHECKSUM_BYTES, 1):
        ends.append(ends[-1] + length)
    residues, logs, checksum, mode = (
        message[start:end] for start, end in zip((0, *ends[:-1]), ends, strict=True)
    )  # fmt: skip
    return residues.view(_RESIDUES[bits]), logs.view(torch.int8), checksum, mode


def encode(vector: Tensor, reach: Tensor | None, seed: int, bits: int, message: Tensor, lost: Tensor | None) -> None:
    """Write ``vector`` into ``message``, for receivers within ``reach`` (``Codec.encode``)."""
    floats, integers = _dtypes(vector)
    residues, logs, checksum, mode = sections(message, len(vector), bits)
    mode.fill_(ABSOLUTE if reach is None else RELATIVE)
    largest = block_max(vector)
    logs.copy_(_choose_log2(largest, largest if reach is None else reach, bits, floats))
    steps, inverses, not_finite = _powers(logs, floats)
    buffers, total = Buffers(vector, floats, floats, floats, integers), 0
    for part in parts(vector):
        t, floor, up, k = buffers.rows(part)
        torch.mul(part.rows(vector), inverses[part.blocks], out=t)
        if not_finite is not None:
            t.nan_to_num_(0.0, 0.0, 0.0)
        torch.floor(t, out=floor)
        t.sub_(floor)
        torch.gt(t, noise.uniform(seed, part, vector.device), out=up)
        k.copy_(floor.add_(up))
        # The conversion to a narrower integer keeps the low bits.
        part.of(residues).copy_(part.cut(k))
        if lost is not None:
            part.of(lost).copy_(part.cut(t.sub_(up).mul_(steps[part.blocks])))
        total += _checksum(k, part, bits)
    checksum.copy_(_as_bytes(total))


def decode(message: Tensor, reference: Tensor, out: Tensor, bits: int, weight: float) -> Tensor | None:
    """Add ``weight`` times the decoded values to ``out`` and return the distances (``Codec.decode``)."""
    floats, integers = _dtypes(reference)
    residues, logs, checksum, mode = sections(message, len(reference), bits)
    relative = int(mode) == RELATIVE
    steps, inverses, not_finite = _powers(logs, floats)
    farthest = torch.zeros(len(logs), device=reference.device)
    buffers, total = Buffers(reference, floats, integers, residues.dtype), 0
    for part in parts(reference):
        t, k, low = buffers.rows(part)
        torch.mul(part.rows(reference), inverses[part.blocks], out=t)
        if relative:
            if not_finite is not None:
                t.masked_fill_(not_finite[part.blocks], 0.0)
            # From our own lattice point to the nearest with the sender's low bits: narrow integers wrap around.
            k.copy_(t.round_())
            torch.sub(part.rows(residues), low.copy_(k), out=low)
            k.add_(low)
            t.copy_(k)
            farthest[part.blocks] = torch.maximum(low.amax(1).float(), -low.amin(1).float())
            total += _checksum(k, part, bits)
        else:
            points = part.rows(residues)
            farthest[part.blocks] = t.sub_(points).abs_().amax(1).float()
            t.copy_(points)
        part.of(out).add_(part.cut(t.mul_(steps[part.blocks])), alpha=weight)
    if relative and not torch.equal(checksum.cpu(), _as_bytes(total)):
        return None
    # Our element is up to half a step from our lattice point, the sender's up to one step from its own.
    return farthest.add_(1.5).mul_(steps.view(-1)).nan_to_num_(0.0, 0.0, 0.0)


def _dtypes(vector: Tensor) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes to compute in: floats, and integers that hold every lattice point."""
    if vector.dtype == torch.float64:
        return torch.float64, torch.int64
    return torch.float32, torch.int32


def _choose_log2(largest: Tensor, reach: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Return log2 of the step of each block, from its largest element and from how far receivers may be."""
    mantissa_bits = 53 if dtype == torch.float64 else 24
    # Rounding at both ends, and the asymmetry of signed integers, take less than three steps of the range.
    log2 = torch.maximum(log2_above(reach / (2 ** (bits - 1) - 3)), log2_above(largest) - mantissa_bits)
    return log2.clamp_(MIN_LOG2, MAX_LOG2).masked_fill_(~torch.isfinite(largest), NOT_FINITE)


def log2_above(values: Tensor) -> Tensor:
    """Return the least integer whose power of two is greater than each value: float32, not negative."""
    return (values.view(torch.int32) >> 23) - 126


def power_of_two(log2: Tensor) -> Tensor:
    """Return 2^log2 in float32, exactly."""
    return (log2.to(torch.int32) + 127 << 23).view(torch.float32)


def _powers(log2: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return 2^log2 and 2^−log2 as columns, and which blocks are not finite, if any are.

    These have step NaN and inverse 0.
    """
    wide = log2.to(torch.int32)[:, None]
    steps, inverses = power_of_two(wide), power_of_two(-wide)
    not_finite = wide == NOT_FINITE
    if not bool(not_finite.any()):
        return steps.to(dtype), inverses.to(dtype), None
    return (
        steps.masked_fill_(not_finite, torch.nan).to(dtype),
        inverses.masked_fill_(not_finite, 0).to(dtype),
        not_finite,
    )


@lru_cache(maxsize=16)
def _checksum_weights(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return odd numbers: an odd multiple of a change that is not zero is not zero, whatever the width."""
    random = torch.randint(1 << 30, (SEGMENT,), generator=torch.Generator().manual_seed(1), dtype=dtype)
    return (2 * random + 1).to(device)


def _checksum(k: Tensor, part: Part, bits: int) -> int:
    """Return what ``part`` adds to the checksum of the high bits. Destroys ``k``."""
    high = k.bitwise_right_shift_(bits).view(-1, min(SEGMENT, k.numel()))
    products = high.mul_(_checksum_weights(k.dtype, k.device)[: high.shape[1]])
    sums = products.sum(1, dtype=k.dtype).tolist()
    return sum(each * pow(_CHECKSUM_BASE, part.index + at, 1 << 32) for at, each in enumerate(sums))


def _as_bytes(total: int) -> Tensor:
    return torch.tensor(list((total % (1 << 32)).to_bytes(_CHECKSUM_BYTES, "little")), dtype=torch.uint8)
