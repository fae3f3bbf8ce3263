"""Several workers on one GPU, through host memory. Says that it skips where there is no GPU."""

import pytest
import replica_cuda_script
import torch
import torch.distributed as dist
from real_workers import RealWorkers
from torch import nn

import gossamer
from gossamer.methods import METHODS
from gossamer.process.collectives import nccl
from gossamer.process.runtime.staging import Staging
from gossamer.process.store.rank_info import free_port

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


def test_an_nccl_group_of_one_averages_beside_the_training_stream() -> None:
    device = torch.device("cuda", 0)
    group = nccl.connect(dist.HashStore(), "smoke", 0, 1)
    staging = Staging(device, nccl=True)
    vector = torch.arange(1000.0, device=device)
    with staging.sending("foreground", vector) as (travels,):
        assert travels.is_cuda
        group.allreduce([travels], dist.AllreduceOptions()).wait()
    assert torch.equal(staging.to_device(travels).cpu(), torch.arange(1000.0))
    # A second thread's messages go through host memory.
    with staging.sending("async", vector) as (travels,):
        assert travels.device.type == "cpu"
    nccl.disconnect(group)


def test_one_worker_trains_with_nccl() -> None:
    model = nn.Linear(4, 2).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gossamer.join(model, optimizer, method="allreduce", transport="nccl"):
        for _ in range(5):
            model(torch.ones(3, 4, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.isfinite(model.weight).all()


@pytest.mark.parametrize("method", ["allreduce", "a2cid2"])
def test_a_parameter_of_odd_length_before_a_batch_norm(method: str) -> None:
    """cuDNN takes weights that begin at odd places for an error of the address."""
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Conv2d(5, 3, 3), nn.BatchNorm2d(3)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gossamer.join(model, optimizer, method=method):
        for _ in range(3):
            model(torch.randn(4, 3, 8, 8, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def trained_replicas(device: str, method: str, settings: dict, steps: int = 12) -> list[dict]:
    jobs = {"ports": [free_port(), free_port()], "address": f"127.0.0.1:{free_port()}"}
    order = {"device": device, "method": method, "settings": settings, "steps": steps}
    with RealWorkers(2, script=replica_cuda_script.run, **jobs, **order) as replicas:
        return replicas.finished()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("method", "settings"), [("allreduce", {}), ("diloco", {"period": 2, "delay": 1})])
def test_replicas_with_fsdp2_on_a_gpu_end_as_on_the_cpu_and_copy_beside_the_training_stream(
    method: str, settings: dict
) -> None:
    expected = torch.tensor(trained_replicas("cpu", method, settings)[0]["weights"])
    for end in trained_replicas("cuda", method, settings):
        torch.testing.assert_close(torch.tensor(end["weights"]), expected, rtol=1e-4, atol=1e-5)
        # FSDP2 itself copies small tables of addresses to the GPU, and a flag may be read: a vector is far longer.
        check_copies(end)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("method", "settings"), [("a2cid2", {"rate": 2.0}), ("gossip", {"rate": 2.0}), ("lasgd", {})])
def test_replicas_with_fsdp2_on_a_gpu_that_do_not_wait_end_with_one_model(method: str, settings: dict) -> None:
    ends = trained_replicas("cuda", method, settings, steps=100)
    assert ends[0]["weights"] == ends[1]["weights"]
    for end in ends:
        assert end["losses"][1] < 0.9 * end["losses"][0]
        check_copies(end)


def check_copies(end: dict) -> None:
    """Vectors were copied between the GPU and the host, and none of them on the training stream."""
    vectors = [copy for copy in end["copies"] if copy[1] >= replica_cuda_script.WIDTH**2 * 4]
    assert vectors, "nothing was copied to the host: the replicas did not exchange anything"
    assert not any(on_training for on_training, _ in vectors), end["copies"]
