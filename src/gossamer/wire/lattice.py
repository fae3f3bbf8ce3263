"""Lattice points modulo a power of two: only the bits in which sender and receiver may differ travel.

Each block of a vector has a step ``q``, a power of two. An element ``s`` is rounded at random to one of the two lattice
points next to it, ``k q`` with an integer ``k``, such that it is ``s`` on average. Only the low ``bits`` of ``k``
travel. The receiver takes the lattice point with these low bits that is nearest to its own element. That is the
sender's if the two are less than about ``2^(bits − 1) q`` apart, and ``q`` is chosen for that. A checksum of the high
bits tells whether it was so in the whole block.

If receivers may be farther away than the block's elements are large, ``q`` is so large that ``k`` has no more than
``bits``, and the receiver's own elements do not matter. So whatever happens, rounding moves an element by less than
1/62 (8 bits) or 1/16,382 (16 bits) of the block's largest.

The step is at least the spacing of floating-point numbers at the block's largest element. So lattice points are exact
in floating point, and both ends compute the same numbers to the bit, on CPU and GPU.

A message: for each block 24 bits of checksum and the mode, as int32; the low bits of each ``k``; for each block log2 q,
as int8.

Reference: Lu, De Sa, "Moniqua: Modulo Quantized Communication in Decentralized SGD", ICML 2020. Deviations: a step per
block that is a power of two, chosen by the sender from distances that it has seen; the checksums; absolute blocks.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from gossamer.wire import noise
from gossamer.wire.codec import BLOCK, Buffers, block_max, may_hold, num_blocks, parts

RELATIVE, ABSOLUTE = 0, 1
"""Modes of a block: whether low bits are to be completed from the receiver's own elements."""

_MIN_LOG2, _MAX_LOG2 = -126, 126
NOT_FINITE = -128
"""Instead of the log2 of a step: some element of the block is not finite."""

_MODE_BITS = 8
_CHECK_BYTES = 4
_RESIDUES = {8: torch.int8, 16: torch.int16}


def size_bytes(num_elements: int, bits: int) -> int:
    """Return the length of a message."""
    return num_elements * bits // 8 + num_blocks(num_elements) * (_CHECK_BYTES + 1)


def sections(message: Tensor, num_elements: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return checksums with modes, low bits, and the log2 of steps, as views of a message."""
    blocks = num_blocks(num_elements)
    low_start = blocks * _CHECK_BYTES
    log2_start = low_start + num_elements * bits // 8
    return (
        message[:low_start].view(torch.int32),
        message[low_start:log2_start].view(_RESIDUES[bits]),
        message[log2_start : log2_start + blocks].view(torch.int8),
    )


def modes(checks: Tensor) -> Tensor:
    return checks & (1 << _MODE_BITS) - 1


def encode(vector: Tensor, reach: Tensor | None, seed: int, bits: int, message: Tensor, lost: Tensor | None) -> None:
    """Write ``vector`` into ``message``, for receivers within ``reach`` (``Codec.encode``)."""
    floats, integers = _dtypes(vector)
    checks, residues, logs = sections(message, len(vector), bits)
    log2, absolute = _choose_steps(block_max(vector), reach, bits, floats)
    logs.copy_(log2)
    steps, inverses, not_finite = _powers(log2, floats)
    buffers = Buffers(vector, floats, floats, floats, integers)
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
        checks[part.blocks] = _checksums(k, bits)
    checks.bitwise_or_(absolute)


def decode(message: Tensor, reference: Tensor, out: Tensor, bits: int, weight: float) -> Tensor:
    """Add ``weight`` times the decoded values to ``out`` and return the distances (``Codec.decode``)."""
    floats, integers = _dtypes(reference)
    checks, residues, logs = sections(message, len(reference), bits)
    steps, inverses, not_finite = _powers(logs, floats)
    absolute = modes(checks) == ABSOLUTE
    alone = absolute[:, None] if not_finite is None else absolute[:, None] | not_finite
    any_alone = may_hold(alone)
    distances = torch.empty(len(logs), device=reference.device)
    buffers = Buffers(reference, floats, floats, integers, residues.dtype)
    for part in parts(reference):
        t, difference, k, low = buffers.rows(part)
        own, step = part.rows(reference), steps[part.blocks]
        torch.mul(own, inverses[part.blocks], out=t)
        if any_alone:
            # Next to 0 the low bits of an absolute block are all bits.
            t.masked_fill_(alone[part.blocks], 0.0)
        # From our own lattice point to the nearest with the sender's low bits: narrow integers wrap around.
        k.copy_(t.round_())
        torch.sub(part.rows(residues), low.copy_(k), out=low)
        t.copy_(k.add_(low)).mul_(step)
        # Our element is up to half a step from our lattice point, the sender's up to one step from its own.
        farthest = torch.maximum(low.amax(1).float(), -low.amin(1).float()).add_(1.5).mul_(step.view(-1).float())
        if any_alone:
            apart = torch.sub(own, t, out=difference).abs_().amax(1) + step.view(-1)
            farthest = torch.where(absolute[part.blocks], apart.float(), farthest)
        wrong = (_checksums(k, bits) ^ checks[part.blocks]) >> _MODE_BITS != 0
        if may_hold(wrong):
            t.masked_fill_(wrong[:, None], 0.0)
            farthest.masked_fill_(wrong, torch.inf)
        part.of(out).add_(part.cut(t), alpha=weight)
        distances[part.blocks] = farthest
    return distances


def _log2_above(values: Tensor) -> Tensor:
    """Return the least integer whose power of two is greater than |value|, for float32; 129 if it is not finite."""
    return (values.view(torch.int32) >> 23 & 255) - 126


def _power_of_two(log2: Tensor) -> Tensor:
    """Return 2^log2 in float32, exactly, for int32 from −126 to 127."""
    return (log2 + 127 << 23).view(torch.float32)


def _choose_steps(largest: Tensor, reach: Tensor | None, bits: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return log2 of the step of each block and its mode, from its largest element and from the reach."""
    # Rounding at both ends, and the asymmetry of signed integers, take less than three steps of the range.
    limit = 2 ** (bits - 1) - 3
    own = _log2_above(largest / limit)
    if reach is None:
        log2, absolute = own.clamp(_MIN_LOG2, _MAX_LOG2), torch.ones_like(own)
    else:
        spacing = _log2_above(largest) - (53 if dtype == torch.float64 else 24)
        relative = torch.maximum(_log2_above(reach / limit), spacing)
        log2, absolute = torch.minimum(own, relative).clamp_(_MIN_LOG2, _MAX_LOG2), (own <= relative).int()
    return log2.masked_fill_(own == 129, NOT_FINITE), absolute


def _powers(log2: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return 2^log2 and 2^−log2 as columns, and which blocks are not finite, if any may be: those have step NaN."""
    column = log2.int()[:, None]
    steps, inverses = _power_of_two(column).to(dtype), _power_of_two(-column).to(dtype)
    not_finite = column == NOT_FINITE
    if not may_hold(not_finite):
        return steps, inverses, None
    return steps.masked_fill_(not_finite, torch.nan), inverses, not_finite


def _dtypes(vector: Tensor) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes to compute in: floats, and integers that hold every lattice point."""
    if vector.dtype == torch.float64:
        return torch.float64, torch.int64
    return torch.float32, torch.int32


@lru_cache(maxsize=16)
def _weights(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return odd numbers, so that each single change shows in the sum."""
    generator = torch.Generator().manual_seed(1)
    return (2 * torch.randint(1 << 20, 1 << 30, (BLOCK,), generator=generator, dtype=dtype) + 1).to(device)


def _checksums(k: Tensor, bits: int) -> Tensor:
    """Return the checksum of the high bits of each row, in the upper 24 bits of int32. Destroys ``k``."""
    products = k.bitwise_right_shift_(bits).mul_(_weights(k.dtype, k.device))
    return products.sum(1, dtype=k.dtype).to(torch.int32).bitwise_and_(-1 << _MODE_BITS)
