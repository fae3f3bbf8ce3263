"""Stochastic rounding: right on average, known bit patterns, nothing that is not finite becomes finite."""

import struct

import pytest
import torch

from gossamer import wire
from gossamer.wire import noise
from gossamer.wire.bfloat16 import round_bits
from gossamer.wire.codec import BLOCK, SEGMENT, Part, num_blocks

ALL_BITS = torch.arange(1 << 16, dtype=torch.int32)
CODECS = ("bfloat16", "int8")


def from_bits(bits):
    return struct.unpack("f", struct.pack("I", bits))[0]


def rounded(value_bits, finite=True):
    """The float32 number with these bits, rounded with each of the 65,536 random numbers: bfloat16 bits."""
    x = torch.full((1 << 16,), value_bits - (1 << 32 if value_bits >> 31 else 0), dtype=torch.int32).view(torch.float32)
    out = torch.empty(1 << 16, dtype=torch.int32)
    round_bits(x, ALL_BITS, finite, out)
    return out.bitwise_right_shift(16) & 0xFFFF


@pytest.mark.parametrize("bits", [0x3F800000, 0x3F800001, 0x3F808000, 0xBF80FFFF, 0x00000001, 0x7F7E1234, 0xC2F6E979])
def test_bfloat16_is_exactly_right_on_average(bits):
    upper, counts = rounded(bits).unique(return_counts=True)
    lower_half = bits & 0xFFFF
    expected = {bits >> 16: (1 << 16) - lower_half, (bits >> 16) + 1: lower_half}
    assert dict(zip(upper.tolist(), counts.tolist(), strict=True)) == {k: v for k, v in expected.items() if v}


@pytest.mark.parametrize("bits", [0x7F800000, 0xFF800000])
def test_infinity_stays_infinity(bits):
    assert set(rounded(bits, finite=False).tolist()) == {bits >> 16}


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF])
def test_nan_stays_nan(bits):
    assert torch.isnan(rounded(bits, finite=False).to(torch.int16).view(torch.bfloat16)).all()


@pytest.mark.parametrize("position", [0, 1, 777])
def test_every_element_meets_every_random_number_equally_often(position):
    part = Part(0, 0, BLOCK)
    table = noise._table(torch.device("cpu"), False)
    met = table.as_strided((noise.TABLE_SIZE,), (1,), position)
    assert torch.equal(met.sort().values, (torch.arange(noise.TABLE_SIZE) + 0.5) / noise.TABLE_SIZE)
    met = noise._table(torch.device("cpu"), True).as_strided((noise.TABLE_SIZE,), (1,), position)
    assert torch.equal(met.bincount(), torch.full((1 << 16,), noise.TABLE_SIZE >> 16))
    assert noise.uniform(3, part, table.device).shape == (1, BLOCK)


def test_random_positions_are_spread_over_the_table():
    positions = torch.tensor([noise.mix(seed, part) % noise.TABLE_SIZE for seed in range(64) for part in range(64)])
    counts = (positions // (noise.TABLE_SIZE // 64)).bincount(minlength=64)
    assert counts.sum() == 4096
    assert ((counts - 64) ** 2).sum() / 64 < 100  # χ² with 63 degrees of freedom


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_a_message_loses_is_zero_on_average(name, known, dtype):
    codec, runs = wire.find(name), 400
    vector = torch.linspace(-1, 1, 3000, dtype=dtype) ** 3
    reach = torch.full((num_blocks(3000),), 0.01) if known else None
    message, lost = torch.empty(codec.size_bytes(3000), dtype=torch.uint8), torch.empty_like(vector)
    losses = []
    for seed in range(runs):
        codec.encode(vector, reach, seed, message, lost)
        losses.append(lost.double().clone())
    losses = torch.stack(losses)
    deviation = losses.std(0) / runs**0.5
    inexact = deviation > 0
    assert inexact.double().mean() > 0.9
    scores = losses.mean(0)[inexact] / deviation[inexact]
    # A mean of 400 is nearly normal, except where one neighbour is hardly ever chosen.
    assert scores.abs().quantile(0.99) < 3.5
    assert abs(float(scores.mean())) < 0.3


@pytest.mark.parametrize("name", CODECS)
def test_a_seed_decides_the_rounding(name):
    codec, vector = wire.find(name), torch.randn(SEGMENT + 5000, generator=torch.Generator().manual_seed(0))
    messages = torch.empty((3, codec.size_bytes(len(vector)) // 4 * 4 + 4), dtype=torch.uint8).zero_()
    for row, seed in enumerate((1, 1, 2)):
        codec.encode(vector, None, seed, messages[row, : codec.size_bytes(len(vector))])
    assert torch.equal(messages[0], messages[1])
    assert not torch.equal(messages[0], messages[2])
