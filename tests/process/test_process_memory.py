"""Long vectors in huge pages."""

from __future__ import annotations

import gc

import pytest
import torch

from gossamer.process.memory import HUGE, zeros

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [0, 1, HUGE - 4, HUGE, 3 * HUGE + 4])
def test_vectors_of_any_length_are_zero_and_can_be_written(length: int, dtype: torch.dtype) -> None:
    vector = zeros(length // dtype.itemsize, dtype, CPU)
    assert (vector.shape, vector.dtype) == ((length // dtype.itemsize,), dtype)
    assert not vector.any()
    vector.fill_(3)
    assert vector.eq(3).all()


def test_long_ones_begin_with_a_page_of_their_own() -> None:
    vectors = [zeros(HUGE, torch.float32, CPU) for _ in range(3)]
    assert all(vector.data_ptr() % HUGE == 0 for vector in vectors)
    assert len({vector.data_ptr() for vector in vectors}) == 3


def test_views_keep_their_memory() -> None:
    view = zeros(HUGE, torch.float32, CPU).fill_(7)[5:10]
    gc.collect()
    zeros(HUGE, torch.float32, CPU).fill_(1)
    assert view.tolist() == [7.0] * 5
