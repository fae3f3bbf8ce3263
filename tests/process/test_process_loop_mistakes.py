"""Mistakes in a loop of one's own, after join: each has a line that says what to do, and no process hangs or aborts."""

from __future__ import annotations

import os
import warnings
from typing import Any

import loop_mistakes_script
import pytest
import torch
from join_script import make_model, train
from real_workers import RealWorkers
from torch import nn

import gossamer
from gossamer import InputError
from gossamer.process.joining.join_checks import check_model

SGD = torch.optim.SGD


def test_two_workers_that_do_one_thing_after_the_other_wrong() -> None:
    with RealWorkers(2, script=loop_mistakes_script.run, method="gossip") as workers:
        ends = workers.finished()
    for end in ends:
        said = end["said"]
        assert said["shapes"] == (
            "worker 0 called swarm.mean of 2 numbers, worker 1 called swarm.mean of 3 numbers: "
            "all workers must make the same calls in the same order"
        )
        assert said["calls"].startswith("worker 0 called swarm.mean of 3 numbers, worker 1 called swarm.gather: all")
        assert (said["whole numbers"], said["empty"], said["late"]) == ("[0.5]", "[]", "0.5")
        assert said["no tensor"] == "swarm.mean takes a tensor, not a float: give torch.tensor(value)"
        assert "not complex ones: give torch.view_as_real(tensor)" in said["complex"]
        assert "evaluate inside, train outside" in said["step in average"]
        assert "leave it first" in said["finish in average"]
        assert "this worker has left the job with finish() or close(): call swarm.mean before" in said["too late"]
    # The second one to come says so; the first one has got its batch.
    (refused,) = {end["said"]["deal"] for end in ends} - {"1"}
    assert refused.startswith("workers differ in what swarm.batches deals: batches of ")
    waits = [text for kind, text in ends[0]["events"] if kind == "waiting"]
    assert waits[0].startswith("swarm.mean has waited for 0 s for rank 1: all workers must call it")
    assert waits[-1].startswith("finish() waits for rank 1, without a step for 0 s: all workers must call finish()")
    assert ends[0]["weights"] == ends[1]["weights"]


def joined(model: nn.Module, optimizer: torch.optim.Optimizer, **arguments: Any) -> gossamer.Swarm:
    return gossamer.join(model, optimizer, method="gossip", **arguments)


@pytest.mark.parametrize("in_optimizer", [False, True])
def test_a_parameter_that_is_trained_only_after_join(in_optimizer: bool) -> None:
    model = make_model()
    model[0].requires_grad_(False)
    optimizer = SGD([p for p in model.parameters() if p.requires_grad or in_optimizer], lr=0.1)
    swarm = joined(model, optimizer)
    train(model, optimizer, 2)
    model[0].requires_grad_(True)
    if not in_optimizer:
        train(model, optimizer, 1)
        optimizer.add_param_group({"params": list(model[0].parameters())})
    how = "was frozen at join and is trained now" if in_optimizer else "was added to the optimizer after join"
    with pytest.raises(InputError, match=rf"the parameter 0\.weight {how}, and workers would not share it: call"):
        train(model, optimizer, 1)
    swarm.close()


def test_parameters_that_are_added_or_removed() -> None:
    model = make_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    swarm = joined(model, optimizer)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3), requires_grad=False)]})
    train(model, optimizer, 1)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    with pytest.raises(InputError, match="a parameter that is not in the model was added to the optimizer after join"):
        train(model, optimizer, 1)
    optimizer.param_groups.pop()
    train(model, optimizer, 1)
    del optimizer.param_groups[0]["params"][0]
    with pytest.raises(InputError, match=r"0\.weight was removed from the optimizer after join: set requires_grad=F"):
        train(model, optimizer, 1)
    swarm.close()


def test_steps_without_a_gradient_are_said_once() -> None:
    model = make_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    with joined(model, optimizer) as swarm:
        for _ in range(25):
            optimizer.step()
    said = [str(event) for event in swarm.events if event.kind == "no-gradient"]
    assert len(said) == 1
    assert "call loss.backward() before optimizer.step()" in said[0]


def test_buffers_that_are_added_or_change_their_shape() -> None:
    model = make_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    swarm = joined(model, optimizer)
    train(model, optimizer, 1)
    model.register_buffer("late", torch.zeros(2))
    for _ in range(2):
        with swarm.averaged():
            pass
    (event,) = [event for event in swarm.events if event.kind == "not-averaged"]
    assert "the buffer late was added after join" in str(event)
    model[1].running_mean = torch.zeros(9)
    with pytest.raises(
        InputError, match=r"1\.running_mean was \(8,\) torch.float32 at join and is \(9,\) torch.float32"
    ):
        swarm.finish()


def test_complex_parameters_are_refused() -> None:
    with pytest.raises(InputError, match="weight is complex, and workers average real numbers: make the parameter a"):
        check_model(nn.Linear(2, 2, dtype=torch.complex64))


def test_a_process_that_is_forked_from_a_worker_is_none() -> None:
    model = make_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    with joined(model, optimizer) as swarm:
        train(model, optimizer, 1)
        read, write = os.pipe()
        with warnings.catch_warnings():
            # Python 3.12 warns of forks beside threads.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            try:
                swarm._close_at_exit()
                train(model, optimizer, 1)
            except InputError as error:
                os.write(write, str(error).encode())
            finally:
                os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            said = pipe.read()
        os.waitpid(child, 0)
        train(model, optimizer, 1)
    assert said.startswith("this process was forked from a worker after join, and is none itself: train in the process")
    assert swarm.metrics().steps == 2


def test_a_pair_of_models_with_an_optimizer_each() -> None:
    generator, critic = nn.Linear(2, 6), make_model()
    optimizers = [SGD(model.parameters(), lr=0.1) for model in (generator, critic)]
    swarms = [joined(model, optimizer) for model, optimizer in zip((generator, critic), optimizers, strict=True)]
    for _ in range(3):
        critic(generator(torch.randn(4, 2))).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for swarm in swarms:
        swarm.finish()
    assert [swarm.metrics().steps for swarm in swarms] == [3, 3]
    assert not any(event.kind == "unseen" for swarm in swarms for event in swarm.events)
