"""Memory for long vectors."""

from __future__ import annotations

import gc
import mmap
import subprocess
import sys

import pytest
import torch

from gossamer.vectors.memory import HUGE_PAGE_BYTES, MAX_HEAP_BLOCK_BYTES, zeros, zeros_like

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [0, 1, HUGE_PAGE_BYTES - 4, HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES + 4])
def test_vectors_of_any_length_are_zero_and_can_be_written(length: int, dtype: torch.dtype) -> None:
    vector = zeros(length // dtype.itemsize, dtype, CPU)
    assert (vector.shape, vector.dtype) == ((length // dtype.itemsize,), dtype)
    assert not vector.any()
    vector.fill_(3)
    assert vector.eq(3).all()


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no huge pages")
def test_long_vectors_begin_at_a_huge_page() -> None:
    vectors = [zeros(HUGE_PAGE_BYTES, torch.float32, CPU) for _ in range(3)]
    assert all(vector.data_ptr() % HUGE_PAGE_BYTES == 0 for vector in vectors)
    assert len({vector.data_ptr() for vector in vectors}) == 3


def test_views_keep_their_memory() -> None:
    view = zeros(HUGE_PAGE_BYTES, torch.float32, CPU).fill_(7)[5:10]
    gc.collect()
    zeros(HUGE_PAGE_BYTES, torch.float32, CPU).fill_(1)
    assert view.tolist() == [7.0] * 5


def test_torch_raises_when_memory_runs_out() -> None:
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        zeros(1 << 48, torch.float32, CPU)


def test_zeros_like_has_the_shape_of_its_argument() -> None:
    like = zeros_like(torch.ones(512, HUGE_PAGE_BYTES // 512, dtype=torch.float64))
    assert (like.shape, like.dtype, like.any()) == ((512, HUGE_PAGE_BYTES // 512), torch.float64, False)


@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc")
def test_freed_blocks_are_reused() -> None:
    script = f"""
import resource, torch
from gossamer.vectors.memory import retain_freed_blocks

def page_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.ones({MAX_HEAP_BLOCK_BYTES // 2})
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

before = page_faults()
retain_freed_blocks({MAX_HEAP_BLOCK_BYTES})
short = page_faults()
retain_freed_blocks({2 * MAX_HEAP_BLOCK_BYTES})
# Other allocations take parts of the first freed blocks.
warm_up = [page_faults() for _ in range(5)]
print(before, short, page_faults())
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    before, short, retained = map(int, ran.stdout.split())
    assert short > before / 2 > 10 * retained
