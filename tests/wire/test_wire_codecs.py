"""What holds for the messages of each codec."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer import wire
from gossamer.errors import InputError
from gossamer.wire.codec import BLOCK, SEGMENT, block_max, copy_blocks, num_blocks

CODECS = ("bfloat16", "int8")
LENGTHS = (1, 5, BLOCK - 1, BLOCK, BLOCK + 1, 5018, SEGMENT, 2 * SEGMENT + 3 * BLOCK + 7)


def random(count, seed=0, dtype=torch.float32):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def encode(codec, vector, reach, seed=0):
    message = torch.empty(codec.size_bytes(len(vector)), dtype=torch.uint8)
    lost = torch.full_like(vector, torch.nan)
    codec.encode(vector, reach, seed, message, lost)
    return message, lost


def decode(codec, message, reference):
    out = torch.zeros_like(reference)
    return out, codec.decode(message, reference, out)


def same(out, vector, lost):
    """Whether the decoded values are what the sender thinks they are, to the rounding of a sum."""
    largest = block_max(vector).repeat_interleave(BLOCK)[: len(vector)]
    return bool(((out - (vector - lost)).abs() <= torch.finfo(vector.dtype).eps * largest).all())


def constant_reach(vector, value):
    return torch.full((num_blocks(len(vector)),), float(value))


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", LENGTHS)
def test_every_receiver_in_reach_decodes_the_same_bits(name, dtype, length):
    codec, vector, reach = wire.find(name), random(length, dtype=dtype), 0.02
    message, lost = encode(codec, vector, constant_reach(vector, reach))
    decoded, _ = decode(codec, message, vector)
    assert same(decoded, vector, lost)
    for seed in (1, 2):
        away = 2 * torch.rand(length, generator=torch.Generator().manual_seed(seed), dtype=dtype) - 1
        reference = vector + (1 - 1e-6) * reach * away
        out, distances = decode(codec, message, reference)
        assert torch.equal(out, decoded)
        assert (distances >= block_max(vector - reference)).all()
        assert (distances <= 3 * reach).all()


@pytest.mark.parametrize(("name", "steps"), [("bfloat16", 16_382), ("int8", 62)])
def test_a_message_for_any_receiver(name, steps):
    codec, vector = wire.find(name), random(5018)
    message, lost = encode(codec, vector, None)
    for reference in (torch.zeros_like(vector), 1e6 * random(5018, seed=1)):
        out, distances = decode(codec, message, reference)
        assert same(out, vector, lost)
        assert (distances >= (1 - 1e-6) * block_max(vector - reference)).all()
    # Rounding moves an element by less than one step. Bfloat16 has 8 significant bits.
    bound = vector.abs() / 128 if name == "bfloat16" else block_max(vector).repeat_interleave(BLOCK)[:5018] / steps
    assert (lost.abs() < bound).all()
    # The same bound holds when the expected distance is absurd.
    _, lost = encode(codec, vector, constant_reach(vector, 1e30))
    assert (lost.abs() < block_max(vector).repeat_interleave(BLOCK)[:5018] / steps).all()


@pytest.mark.parametrize(("name", "steps"), [("bfloat16", 16_382), ("int8", 62)])
def test_rounding_is_small_beside_the_reach_not_beside_the_elements(name, steps):
    codec, vector = wire.find(name), 1000 + random(5018, dtype=torch.float64)
    _, lost = encode(codec, vector, constant_reach(vector, 1e-3))
    assert lost.abs().max() < 1e-3 / steps


@pytest.mark.parametrize("name", CODECS)
def test_without_any_distance_a_message_is_as_exact_as_float32(name):
    codec, vector = wire.find(name), 1 + torch.rand(3000, generator=torch.Generator().manual_seed(0))
    _, lost = encode(codec, vector, constant_reach(vector, 0.0))
    assert not lost.any()


@pytest.mark.parametrize("name", CODECS)
def test_a_block_out_of_reach_is_noticed_and_the_others_are_decoded(name):
    codec, vector, size = wire.find(name), random(10 * BLOCK + 3), 10 * BLOCK + 3
    message, _ = encode(codec, vector, constant_reach(vector, 0.01))
    decoded, _ = decode(codec, message, vector)
    bits = 8 * codec.size_bytes(BLOCK) // BLOCK
    step = 2.0 ** math.ceil(math.log2(0.01 / (2 ** (bits - 1) - 3)))
    generator = torch.Generator().manual_seed(5)
    for _ in range(50):
        # One element is away by one, two or three times what the low bits can tell: these bits are right, others wrong.
        at, periods = (int(torch.randint(count, (1,), generator=generator)) for count in (size, 3))
        reference = vector.clone()
        reference[at] += (periods + 1) * 2**bits * step
        out, distances = decode(codec, message, reference)
        failed = distances == torch.inf
        assert failed.nonzero().view(-1).tolist() == [at // BLOCK]
        expected = decoded.clone()
        copy_blocks(expected, torch.zeros_like(vector), failed)
        assert torch.equal(out, expected)


@pytest.mark.parametrize("name", CODECS)
def test_a_receiver_far_away_can_decode_nothing(name):
    codec, vector = wire.find(name), random(5018)
    message, _ = encode(codec, vector, constant_reach(vector, 1e-4))
    out, distances = decode(codec, message, random(5018, seed=1))
    assert (distances == torch.inf).all()
    assert not out.any()


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("known", [False, True])
def test_what_is_not_finite_stays_so(name, bad, known):
    codec, vector, reference = wire.find(name), random(5018), random(5018) + 0.001
    vector[3000] = bad
    message, lost = encode(codec, vector, constant_reach(vector, 0.01) if known else None)
    out, distances = decode(codec, message, reference)
    assert not torch.isfinite(out[3000])
    assert not torch.isfinite(lost[3000])
    assert torch.isnan(distances).nonzero().view(-1).tolist() == [3000 // BLOCK]
    others = torch.ones(5018, dtype=torch.bool)
    others[3000 // BLOCK * BLOCK :][:BLOCK] = False
    assert torch.allclose(out[others], (vector - lost)[others], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", CODECS)
def test_a_receiver_that_is_not_finite_cannot_complete_a_block(name):
    codec, vector = wire.find(name), random(5018)
    message, _ = encode(codec, vector, constant_reach(vector, 0.01))
    reference = vector.clone()
    reference[BLOCK] = torch.nan
    _, distances = decode(codec, message, reference)
    assert (distances == torch.inf).nonzero().view(-1).tolist() == [1]


@pytest.mark.parametrize("name", CODECS)
def test_messages_add_up_with_weights(name):
    codec, vector = wire.find(name), random(5018)
    message, lost = encode(codec, vector, None)
    out = torch.ones_like(vector)
    codec.decode(message, vector, out, weight=0.25)
    assert torch.allclose(out, 1 + 0.25 * (vector - lost), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_vectors_of_half_precision(name, dtype):
    codec, vector = wire.find(name), random(3000, dtype=dtype)
    message, lost = encode(codec, vector, constant_reach(vector, 0.05))
    out, distances = decode(codec, message, vector)
    assert torch.isfinite(distances).all()
    assert torch.allclose(out.float() + lost.float(), vector.float(), rtol=0.01, atol=0.001)


elements = st.floats(-(2.0**100), 2.0**100, width=32)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(CODECS), st.lists(st.tuples(elements, st.floats(-1, 1, width=32)), min_size=1, max_size=40),
       st.floats(0, 2.0**100, width=32))  # fmt: skip
def test_any_vector_is_decoded_by_any_receiver_in_reach(name, pairs, reach):
    codec, vector = wire.find(name), torch.tensor([element for element, _ in pairs])
    reference = vector.double() + reach * torch.tensor([away for _, away in pairs], dtype=torch.float64)
    message, lost = encode(codec, vector, constant_reach(vector, reach))
    # Rounding to float32 may move the receiver out of reach.
    reachable = bool(((reference.float().double() - vector.double()).abs() <= reach).all())
    out, distances = decode(codec, message, reference.float())
    if reachable:
        assert torch.isfinite(distances).all()
    if bool(torch.isfinite(distances).all()):
        assert same(out, vector, lost)


@pytest.mark.parametrize("name", CODECS)
def test_an_empty_vector(name):
    codec, vector = wire.find(name), torch.zeros(0)
    message, _ = encode(codec, vector, None)
    out, distances = decode(codec, message, vector)
    assert len(message) == len(out) == len(distances) == 0


@pytest.mark.parametrize(("name", "per_element"), [("bfloat16", 2), ("int8", 1)])
@pytest.mark.parametrize("length", [5018, 100_000, 25_000_000])
def test_bytes(name, per_element, length):
    codec = wire.find(name)
    assert per_element * length < wire.exchange_bytes(codec, length) < 1.01 * per_element * length
    for members in (2, 4, 8):
        share = 2 * (members - 1) / members * length
        assert per_element * share <= wire.mean_bytes(codec, length, members) < 1.02 * per_element * share
    assert wire.exchange_bytes(None, length) == 4 * length
    assert wire.mean_bytes(None, length, 4, itemsize=8) == 12 * length


def test_codecs_by_name():
    assert wire.names() == ("float32", "bfloat16", "int8")
    assert wire.find("float32") is None
    assert [wire.find(name).name for name in CODECS] == list(CODECS)
    codec = wire.find("int8")
    assert wire.find(codec) is codec
    with pytest.raises(InputError, match="unknown wire codec 'int4': expected one of bfloat16, float32, int8"):
        wire.find("int4")
    with pytest.raises(InputError, match="wire codec 8 has no name, block, headroom"):
        wire.find(8)


def test_names_do_without_torch():
    import subprocess
    import sys

    check = "import sys; from gossamer import wire; wire.names(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True)
