"""Several workers on one GPU, through host memory. Says that it skips where there is no GPU."""

import pytest
import torch
from real_workers import RealWorkers

from gossamer.methods import METHODS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with CUDA")


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_on_a_shared_gpu(method: str) -> None:
    with RealWorkers(4, method=method, steps=150, compute_s=0.0, other_start=True, device="cuda") as workers:
        ends = workers.finished()
    assert all(end["weights"] == ends[0]["weights"] for end in ends)
    assert ends[0]["accuracy"] > 0.95


def test_a_killed_worker_on_a_shared_gpu_comes_back() -> None:
    with RealWorkers(3, method="a2cid2", steps=1500, device="cuda") as workers:
        for worker in workers:
            worker.step(50)
        workers.kill(1)
        workers.restart(1).until(lambda report: report.get("exchanges", 0) > 0, 60)
        ends = workers.finished()
    assert all(end["weights"] == ends[0]["weights"] for end in ends)
