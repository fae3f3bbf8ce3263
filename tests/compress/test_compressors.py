"""What all compressors promise, each in turn."""

from __future__ import annotations

import math

import pytest
import torch
from compress_lockstep import average_all, make_workers, together
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gossamer import compress
from gossamer.errors import InputError

ALL = pytest.mark.parametrize("name", compress.names())
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
DEVICES = pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
LENGTHS = [1, 2, 7, 8, 9, 100, 2048, 4097, 10_000]


def draw(num_workers: int, length: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, generator=generator).to(dtype) for _ in range(num_workers)]


def assert_promises(compressor: compress.Compressor, vectors: list[Tensor], tolerance: float = 1e-6) -> None:
    means, kept, num_bytes = average_all(compressor, vectors)
    length, size = vectors[0].numel(), max(float(vector.abs().max()) for vector in vectors)
    assert all(torch.equal(mean, means[0]) for mean in means), "means must be bit-identical"
    for tensor in (*means, *kept):
        assert (tensor.shape, tensor.dtype) == (vectors[0].shape, vectors[0].dtype)
        assert tensor.device == vectors[0].device
    mean_of_kept = torch.stack([part.double() for part in kept]).mean(0)
    # A kept element can be larger than every element of the vector, but not than the vector's norm.
    scale = max([size, *(float(part.abs().max()) for part in kept)])
    torch.testing.assert_close(means[0].double(), mean_of_kept, rtol=0, atol=tolerance * scale)
    expected = compressor.size_bytes(length, vectors[0].itemsize)
    assert num_bytes == [expected] * len(vectors)
    # Fresh: writing into one leaves the others alone.
    pointers = {tensor.untyped_storage().data_ptr() for tensor in (*means, *kept, *vectors)}
    assert len(pointers) == 3 * len(vectors)


@DEVICES
@DTYPES
@ALL
def test_promises(name, dtype, device):
    tolerance = {torch.float32: 2e-6, torch.float64: 1e-12, torch.bfloat16: 5e-2}[dtype]
    for length in LENGTHS:
        vectors = [vector.to(device) for vector in draw(3, length, dtype=dtype)]
        assert_promises(compress.make(name, ratio=8), vectors, tolerance)


@settings(max_examples=80, deadline=None)
@given(
    name=st.sampled_from(compress.names()),
    ratio=st.floats(1, 1e6),
    num_workers=st.integers(1, 4),
    length=st.integers(1, 300),
    exponent=st.integers(-30, 30),
    data=st.data(),
)
def test_promises_for_any_values(name, ratio, num_workers, length, exponent, data):
    values = st.lists(st.floats(-1, 1, width=32), min_size=length, max_size=length)
    vectors = [torch.tensor(data.draw(values)) * 10.0**exponent for _ in range(num_workers)]
    assert_promises(compress.make(name, ratio), vectors, tolerance=1e-5)


@ALL
def test_zeros_stay_zeros(name):
    for length in (1, 5000):
        means, kept, _ = average_all(compress.make(name, ratio=16), [torch.zeros(length)] * 2)
        assert not means[0].any()
        assert not kept[0].any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["topk", "sign", "int8", "lowrank", "none"])
def test_what_is_not_finite_reaches_the_mean_without_a_crash(name, bad):
    vectors = draw(3, 5000)
    vectors[1][4321] = bad
    means, _, _ = average_all(compress.make(name, ratio=16), vectors)
    assert not torch.isfinite(means[0][4321])
    assert all(torch.equal(mean.isfinite(), means[0].isfinite()) for mean in means)


@pytest.mark.parametrize("name", ["topk", "sign", "int8", "lowrank", "none"])
@pytest.mark.parametrize("length", [1, 64, 5000])
def test_contraction(name, length):
    """‖v − kept‖ ≤ (1 − δ) ‖v‖: nothing is made larger than it was, and something is always kept."""
    for seed in range(3):
        (vector,) = draw(1, length, seed)
        (_, (kept,), _) = average_all(compress.make(name, ratio=16), [vector])
        delta = {"topk": 0.03, "sign": 0.3, "int8": 0.98, "lowrank": 0.01, "none": 1.0}[name]
        assert (vector - kept).norm() <= (1 - delta) * vector.norm() + 1e-6


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from(["topk", "sign", "int8"]),
    values=st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=200),
)
def test_contraction_for_any_values(name, values):
    vector = torch.tensor(values)
    (_, (kept,), _) = average_all(compress.make(name, ratio=4), [vector])
    assert (vector - kept).norm() <= vector.norm() * (1 + 1e-6)


@ALL
def test_error_feedback_conserves_mass(name):
    """Σ vectors = Σ means delivered + mean residual, whatever the compressor leaves out."""
    compressor = compress.make(name, ratio=16)
    workers = make_workers(3, torch.zeros(3000, dtype=torch.float64))
    residuals = [torch.zeros(3000, dtype=torch.float64) for _ in workers]
    given_in, delivered = torch.zeros(3000, dtype=torch.float64), torch.zeros(3000, dtype=torch.float64)
    for round in range(20):
        vectors = draw(3, 3000, seed=round, dtype=torch.float64)
        given_in += torch.stack(vectors).mean(0)
        generators = [
            compress.average_with_feedback(compressor, worker, residual.add_(vector), round, "test")
            for worker, vector, residual in zip(workers, vectors, residuals, strict=True)
        ]
        means, _ = together(generators)
        compress.add_parts(delivered, means[0])
    torch.testing.assert_close(delivered + torch.stack(residuals).mean(0), given_in, rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", ["topk", "randomblock", "sign", "int8", "lowrank"])
def test_error_feedback_delivers_a_constant_vector_in_the_end(name):
    """What is left out is offered again: the mean of what arrives tends to the vector itself."""
    compressor = compress.make(name, ratio=8)
    vectors = draw(2, 400)
    workers = make_workers(2, vectors[0])
    residuals = [torch.zeros(400) for _ in workers]
    delivered, num_rounds = torch.zeros(400), 300
    for round in range(num_rounds):
        means, _ = together(
            [
                compress.average_with_feedback(compressor, worker, residual.add_(vector), round, "test")
                for worker, vector, residual in zip(workers, vectors, residuals, strict=True)
            ]
        )
        compress.add_parts(delivered, means[0], 1 / num_rounds)
    target = torch.stack(vectors).mean(0)
    assert (delivered - target).norm() < 0.2 * target.norm()


@pytest.mark.parametrize("ratio", [0.5, 0, -3, math.nan, math.inf])
@ALL
def test_unusable_ratios(name, ratio):
    with pytest.raises(InputError, match=r"compression ratio .* at least 1"):
        compress.make(name, ratio)


def test_unknown_names():
    with pytest.raises(InputError, match=r"unknown compressor 'top-k'.*Did you mean 'topk'"):
        compress.make("top-k", 8)


@ALL
def test_a_compressor_knows_its_name(name):
    assert compress.make(name, 8).name == name


def test_ratios_in_bytes():
    dense = 4 * 2**20
    expected = {"topk": 64, "randomblock": 128, "sign": 32, "int8": 4, "lowrank": 128, "none": 1}
    for name, ratio in expected.items():
        size = compress.make(name, ratio=128).size_bytes(2**20)
        assert dense / size == pytest.approx(ratio, rel=0.02), name
