"""What workers gather and broadcast, with one that dies, one that is done, and values that cannot travel."""

import os
import time

import pytest
import torch
from real_workers import RealWorkers
from torch import nn

import gossamer
from gossamer.errors import InputError

POLL_S = 0.01


def tell(rank, environment, order, outgoing):
    os.environ.update(environment, RANK=str(rank))
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    swarm = gossamer.join(model, optimizer, method="gossip", topology="complete")

    def gathered():
        return [tensor.tolist() for tensor in swarm.gather(torch.full((rank, 2), rank, dtype=torch.int16))]

    report = {
        "all": gathered(),
        "first": swarm.broadcast({"path": f"of {rank}", "size": rank}),
        "last": swarm.broadcast(rank, source=2),
        "shared": len({parameter.untyped_storage().data_ptr() for parameter in model.parameters()}),
    }
    try:
        swarm.broadcast(torch.ones(1))
    except InputError as error:
        report["refused"] = str(error)
    outgoing.send({"at": "told"})
    if rank == 2:
        os.kill(os.getpid(), 9)
    while swarm.metrics().peers_alive == 2:
        time.sleep(POLL_S)
    report["while it was lost"] = gathered()
    report["events"] = [event.kind for event in swarm.events]
    report["survivors"] = gathered()
    report["instead of the dead"] = swarm.broadcast(f"of {rank}", source=2)
    if rank == 0:
        swarm.finish()
    else:
        report["alone"] = gathered()
        swarm.finish()
    report["apart"] = len({parameter.untyped_storage().data_ptr() for parameter in model.parameters()})
    try:
        gathered()
    except InputError as error:
        report["too late"] = str(error)
    outgoing.send({"at": "finished", **report})


@pytest.fixture(scope="module")
def reports():
    with RealWorkers(3, script=tell) as workers:
        workers[2].died()
        return workers.finished([0, 1])


def test_tensors_of_any_shape_are_gathered(reports):
    for report in reports:
        assert report["all"] == [[], [[1, 1]], [[2, 2], [2, 2]]]
        assert report["first"] == {"path": "of 0", "size": 0}
        assert report["last"] == 2
        assert "cannot send a value of type Tensor" in report["refused"]


def test_a_worker_that_is_lost_or_done_is_not_waited_for(reports):
    for report in reports:
        assert report["while it was lost"] == [[], [[1, 1]]]
        assert "not-averaged" not in report["events"]
        assert report["survivors"] == [[], [[1, 1]]]
        assert report["instead of the dead"] == "of 0"
    assert reports[1]["alone"] == [[[1, 1]]]


def test_after_the_end_parameters_have_their_own_memory(reports):
    for report in reports:
        assert (report["shared"], report["apart"]) == (1, 2)
        assert "gather and broadcast before finish()" in report["too late"]
