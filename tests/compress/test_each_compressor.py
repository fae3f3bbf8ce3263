"""What one compressor does and the others do not."""

from __future__ import annotations

import pytest
import torch
from compress_lockstep import FakeWorker, average_all, make_workers

from gossamer.compress.lowrank import LowRank
from gossamer.compress.quantized import Int8, Sign
from gossamer.compress.randomblock import RandomBlock
from gossamer.compress.topk import TopK, bound_on_largest, exceeding, largest
from gossamer.errors import InputError


def test_topk_keeps_the_largest():
    vectors = [torch.tensor([0.0, 1.0, -5.0, 2.0, 0.5]), torch.tensor([4.0, 0.0, 1.0, -3.0, 0.5])]
    means, kept, _ = average_all(TopK(ratio=2.5), vectors)
    assert kept[0].tolist() == [0, 0, -5, 2, 0]
    assert kept[1].tolist() == [4, 0, 0, -3, 0]
    assert means[0].tolist() == [2, 0, -2.5, -0.5, 0]


def test_topk_of_equal_magnitudes_still_keeps_k():
    _, (kept,), _ = average_all(TopK(ratio=10), [torch.ones(100)])
    assert int(kept.sum()) == 10


def test_topk_of_ratio_one_keeps_everything():
    vector = torch.linspace(-1, 1, 33)
    (mean,), (kept,), _ = average_all(TopK(ratio=1), [vector])
    assert torch.equal(kept, vector)
    assert torch.equal(mean, vector)


def test_random_block_is_the_same_on_all_workers_and_covers_everything_in_time():
    vectors = [torch.ones(1000), torch.full((1000,), 3.0)]
    times = torch.zeros(1000)
    for round in range(200):
        means, kept, _ = average_all(RandomBlock(ratio=10), vectors, round)
        assert torch.equal(kept[0] * 3, kept[1])
        assert torch.equal(means[0], kept[0] * 2)
        assert int(kept[0].sum()) == 100
        times += kept[0]
    assert times.min() > 0
    ends = torch.cat((times[:50], times[-50:]))  # a block that did not wrap around would come here less often
    assert ends.mean() == pytest.approx(20, abs=8)


def test_random_block_depends_on_seed_round_and_topic():
    def block(seed: int, round: int, topic: str) -> list[int]:
        generator = RandomBlock(ratio=100).average(FakeWorker(seed=seed), torch.ones(10_000), round, topic)
        effect = generator.send(None)
        with pytest.raises(StopIteration) as end:
            generator.send(effect.vector)
        return end.value.value[1].indices.sort().values.tolist()

    reference = block(1, 1, "a")
    assert block(1, 1, "a") == reference
    assert all(block(*other) != reference for other in [(2, 1, "a"), (1, 2, "a"), (1, 1, "b"), (-1, 1, "a")])


def test_sign_keeps_signs_and_mean_magnitude_per_chunk():
    vector = torch.cat((torch.tensor([1.0, -3.0]).repeat(2048), torch.tensor([10.0, -20.0, 30.0])))
    _, (kept,), _ = average_all(Sign(), [vector])
    assert torch.equal(kept.sign(), vector.sign())
    assert torch.equal(kept[:4096].abs(), torch.full((4096,), 2.0))
    assert kept[4096:].tolist() == [20, -20, 20]


def test_int8_is_off_by_half_a_step_at_most():
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        vector = (torch.randn(5000, generator=generator) * 100).to(dtype)
        _, (kept,), _ = average_all(Int8(), [vector])
        for chunk in range(0, 5000, 2048):
            part = slice(chunk, chunk + 2048)
            step = vector[part].abs().max().double() / 127
            slack = {torch.float32: 1e-4, torch.float64: 1e-9, torch.bfloat16: 0.6}[dtype]
            assert (kept[part].double() - vector[part].double()).abs().max() <= step * (0.5 + slack)


def test_int8_never_wraps_around():
    """Scales that are rounded down (bfloat16, subnormal numbers) must not push the largest element over 127."""
    for vector in (
        torch.linspace(0.5, 1.0, 999).to(torch.bfloat16),
        torch.tensor([190 * 1.4e-45, -190 * 1.4e-45, 1e-45]),
    ):
        for top in vector.sort(descending=True).values[:300:10]:
            pair = torch.stack((top, -top))
            _, (kept,), _ = average_all(Int8(), [pair])
            assert kept[0] >= 0
            assert kept[1] <= 0


def test_low_rank_is_exact_for_a_matrix_of_that_rank_after_a_few_rounds():
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(30, 3, generator=generator, dtype=torch.float64)
    vectors = [(left @ torch.randn(3, 30, generator=generator, dtype=torch.float64)).flatten() for _ in range(4)]
    workers = make_workers(4, vectors[0])
    for round in range(4):
        means, kept, _ = average_all(LowRank(ratio=1, rank=3), vectors, round, workers)
    torch.testing.assert_close(means[0], torch.stack(vectors).mean(0), rtol=0, atol=1e-10)
    torch.testing.assert_close(kept[2], vectors[2], rtol=0, atol=1e-10)


def test_low_rank_warm_start_converges_to_the_best_approximation():
    generator = torch.Generator().manual_seed(1)
    matrix = torch.randn(20, 20, generator=generator, dtype=torch.float64)
    matrix = matrix * torch.logspace(0, -2, 20, dtype=torch.float64)
    singular = torch.linalg.svdvals(matrix)
    workers = make_workers(1, matrix.flatten())
    errors = []
    for round in range(30):
        _, (kept,), _ = average_all(LowRank(ratio=1, rank=2), [matrix.flatten()], round, workers)
        errors.append(float((matrix.flatten() - kept).norm()))
    best = float(singular[2:].norm())
    assert errors[-1] == pytest.approx(best, rel=1e-3)
    assert errors[0] > errors[-1]


def test_low_rank_recovers_from_numbers_that_are_not_finite():
    vector = torch.randn(100, generator=torch.Generator().manual_seed(0))
    workers = make_workers(1, vector)
    compressor = LowRank(ratio=2)
    average_all(compressor, [torch.full((100,), float("nan"))], 0, workers)
    (mean,), _, _ = average_all(compressor, [vector], 1, workers)
    assert torch.isfinite(mean).all()
    assert mean.any()


def test_low_rank_shapes():
    assert LowRank(ratio=1, rank=5).shape(1) == (1, 1, 1)
    assert LowRank(ratio=1e9).shape(12) == (3, 4, 1)
    rows, cols, rank = LowRank(ratio=10).shape(10_001)
    assert (rows, cols, rank) == (100, 101, 4)
    with pytest.raises(InputError, match="rank -1"):
        LowRank(ratio=4, rank=-1)


@pytest.mark.parametrize("kind", ["noise", "heavy tails", "few that are not zero", "zero", "a wave", "not a number"])
@pytest.mark.parametrize("ratio", [16, 128, 1024])
def test_topk_finds_the_largest_of_many(kind, ratio):
    length = 300_001
    noise = torch.randn(length, generator=torch.Generator().manual_seed(0))
    vector = {
        "noise": noise,
        "heavy tails": noise**5,
        "few that are not zero": noise * (torch.arange(length) % 1000 == 3),
        "zero": torch.zeros(length),
        "a wave": torch.sin(torch.arange(length) / 100),
        "not a number": torch.where(torch.arange(length) % 9999 == 3, float("nan"), noise),
    }[kind]
    count = -(-length // ratio)
    values, indices = largest(vector, count)
    assert len(indices) == count
    assert (indices.diff() > 0).all(), "not ascending, or not distinct"
    torch.testing.assert_close(values, vector[indices], equal_nan=True, rtol=0, atol=0)
    expected = vector.abs().topk(count).values
    torch.testing.assert_close(values.abs().sort(descending=True).values, expected, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("ratio", [16, 128, 1024])
def test_topk_looks_at_few_candidates(ratio):
    """More than are wanted, or all elements have to be sorted; but not many more."""
    vector = torch.randn(1_000_003, generator=torch.Generator().manual_seed(0))
    count = -(-len(vector) // ratio)
    candidates, _ = exceeding(vector, bound_on_largest(vector, count))
    assert count <= len(candidates) <= 3 * count
