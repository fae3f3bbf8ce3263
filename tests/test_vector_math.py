"""Sums of long vectors, computed chunk by chunk."""

import pytest
import torch

from gossamer.vectors.vector_math import CHUNK, chunks, combine, distance


@pytest.mark.parametrize("length", [1, 1000, CHUNK, CHUNK + 1, 2 * CHUNK + 17])
def test_sums_are_computed_one_after_the_other(length):
    x, z, s, r = torch.randn(4, length, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    new_x = x + 0.3 * z - 0.5 * s + 0.5 * r
    new_z = 0.4 * z + 2.0 * new_x
    combine((x, 1.0, ((0.3, z), (-0.5, s), (0.5, r))), (z, 0.4, ((2.0, x),)))
    torch.testing.assert_close(x, new_x, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(z, new_z, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("terms", [(1.0,), (0.5,), (1.0, 2.0), (0.5, 2.0), (1.0, -1.0, 3.0)])
def test_with_keep_0_the_old_content_is_not_read(terms):
    vectors = [torch.full((CHUNK + 3,), float(k + 1)) for k in range(len(terms))]
    out = torch.full((CHUNK + 3,), torch.nan)
    combine((out, 0.0, list(zip(terms, vectors, strict=True))))
    assert torch.equal(out, torch.full_like(out, sum(number * (k + 1) for k, number in enumerate(terms))))


def test_chunks_are_views_of_all_elements():
    one, other = torch.zeros(2 * CHUNK + 5), torch.ones(2 * CHUNK + 5)
    assert [len(a) for a, _ in chunks(one, other)] == [CHUNK, CHUNK, 5]
    for a, b in chunks(one, other):
        a.add_(b)
    assert torch.equal(one, other)
    assert distance(one, torch.zeros_like(one)) == pytest.approx((2 * CHUNK + 5) ** 0.5)
