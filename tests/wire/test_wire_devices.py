"""CPU and GPU compute the same messages and the same values, to the bit."""

import pytest
import torch

from gossamer import wire
from gossamer.wire import codec as codec_module
from gossamer.wire import lattice
from gossamer.wire.codec import BLOCK, SEGMENT, num_blocks

CODECS = ("bfloat16", "int8")
LENGTHS = (1, BLOCK, SEGMENT, 5 * SEGMENT + 3 * BLOCK + 7)


def message_and_values(codec, vector, reference, known):
    reach = torch.full((num_blocks(len(vector)),), 0.01, device=vector.device) if known else None
    message = torch.empty(codec.size_bytes(len(vector)), dtype=torch.uint8, device=vector.device).zero_()
    lost, out = torch.empty_like(vector), torch.zeros_like(vector)
    codec.encode(vector, reach, 3, message, lost)
    distances = codec.decode(message, reference, out)
    return [tensor.cpu() for tensor in (message, lost, out, distances)]


def vectors(length, dtype):
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(length, generator=generator, dtype=dtype)
    reference = vector + 0.005 * torch.rand(length, generator=generator, dtype=dtype)
    # One block that cannot be decoded, and one that is not finite.
    reference[0] += 1
    vector[-1] = torch.nan
    return vector, reference


def assert_same(one, other):
    for a, b in zip(one, other, strict=True):
        assert (
            torch.equal(a.nan_to_num(nan=-1.0), b.nan_to_num(nan=-1.0)) if a.is_floating_point() else torch.equal(a, b)
        )


each_case = pytest.mark.parametrize(
    ("name", "length", "dtype", "known"),
    [
        (name, length, dtype, known)
        for name in CODECS
        for length in LENGTHS
        for dtype in (torch.float32, torch.float64)
        for known in (False, True)
    ],
)


@each_case
def test_many_segments_at_a_time_are_the_same_as_one(monkeypatch, name, length, dtype, known):
    codec, (vector, reference) = wire.find(name), vectors(length, dtype)
    expected = message_and_values(codec, vector, reference, known)
    monkeypatch.setattr(codec_module, "segments_at_a_time", lambda device: 4)
    assert_same(message_and_values(codec, vector, reference, known), expected)


@each_case
@pytest.mark.parametrize("spoilt", [False, True])
def test_what_a_gpu_does_without_looking_changes_nothing(monkeypatch, name, length, dtype, known, spoilt):
    codec, (vector, reference) = wire.find(name), vectors(length, dtype)
    if not spoilt:
        vector = vector.nan_to_num(0.0)
        reference = vector + 0.001
    expected = message_and_values(codec, vector, reference, known)
    monkeypatch.setattr(lattice, "may_hold", lambda mask: True)
    assert_same(message_and_values(codec, vector, reference, known), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@each_case
def test_a_gpu_computes_the_same(name, length, dtype, known):
    codec, (vector, reference) = wire.find(name), vectors(length, dtype)
    expected = message_and_values(codec, vector, reference, known)
    assert_same(message_and_values(codec, vector.cuda(), reference.cuda(), known), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", CODECS)
def test_links_and_means_on_a_gpu(name):
    codec, answers = wire.find(name), {}
    for device in ("cpu", "cuda"):
        base = torch.randn(5018, generator=torch.Generator().manual_seed(0)).to(device)
        links = tuple(wire.Links(codec, 0, rank).to(1 - rank) for rank in (0, 1))
        means = [wire.MeanLink(codec, seed) for seed in range(2)]
        outs = (torch.empty_like(base), torch.empty_like(base))
        for _ in range(3):
            wire.exchange(links, (base, base + 0.01), outs)
        swapped = [out.clone().cpu() for out in outs]
        for _ in range(3):
            wire.average(means, (base, base + 0.01), outs)
        answers[device] = [*swapped, *(out.cpu() for out in outs)]
    for one, other in zip(answers["cpu"], answers["cuda"], strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-6)
