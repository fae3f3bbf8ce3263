"""The optimizer's state by name: what plain torch has, read and written in the order of the method's operations."""

import re

import pytest
import torch
from adhoc_methods import make_cluster, make_method

from gossamer import optim
from gossamer.config import resolve
from gossamer.effects import Update
from gossamer.errors import InputError
from gossamer.virtual.sim.cluster import Cluster

STATES = [
    ("sgd", "momentum_buffer"), ("adam", "exp_avg"), ("adam", "exp_avg_sq"), ("adamw", "exp_avg"),
    ("accumadam", "exp_avg_sq"), ("accumadam", "accumulated"), ("rmsprop", "square_avg"),
]  # fmt: skip
SETTINGS = {"lr": 0.05, "momentum": 0.9}


def make(optimizer, step, **values):
    settings = {**SETTINGS, "accumadam_period": 3, **values}
    return make_cluster(make_method((), step=step), workers=2, optimizer=optimizer, **settings)


class Plain:
    """The training of one worker in plain torch."""

    def __init__(self, cluster, optimizer, rank):
        self.target = cluster.evaluator.task.train[0][rank]
        self.x = torch.nn.Parameter(cluster.replicas.rows()[rank].clone())
        self.optimizer = optim.make(optimizer, [self.x], **SETTINGS, period=3)

    def step(self):
        self.x.grad = self.x.detach() - self.target
        self.optimizer.step()
        return self.optimizer.state[self.x]


@pytest.mark.parametrize(("optimizer", "name"), STATES)
def test_the_state_is_that_of_torch(optimizer, name):
    seen = {0: [], 1: []}

    def step(self, worker):
        before = worker.read_optimizer_state(name)
        yield Update()
        after = worker.read_optimizer_state(name)
        seen[worker.rank].append((before, after))
        if worker.step % 2:
            worker.x.mul_(0.5)
            worker.write_optimizer_state(name, 0.5 * after)
            after.fill_(77.0)  # a copy: it changes nothing

    cluster = make(optimizer, step)
    plain = [Plain(cluster, optimizer, rank) for rank in range(2)]
    cluster.run_until(6.5)
    for rank in range(2):
        before = torch.zeros(3)
        assert len(seen[rank]) == 6
        for k, (found_before, found_after) in enumerate(seen[rank]):
            torch.testing.assert_close(found_before, before, rtol=1e-5, atol=1e-7)
            state = plain[rank].step()
            if k % 2:
                with torch.no_grad():
                    plain[rank].x.mul_(0.5)
                    state[name].mul_(0.5)
            else:
                torch.testing.assert_close(found_after, state[name], rtol=1e-5, atol=1e-7)
            before = state[name].clone()
        torch.testing.assert_close(cluster.replicas.rows()[rank], plain[rank].x.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("optimizer", "name"), STATES)
def test_before_the_first_step_the_state_is_zero_and_writing_has_no_effect(optimizer, name):
    def step(self, worker):
        if worker.step == 0:
            assert not worker.read_optimizer_state(name).any()
            worker.write_optimizer_state(name, torch.ones(3))
        yield Update()

    cluster = make(optimizer, step)
    plain = Plain(cluster, optimizer, 0)
    cluster.run_until(2.5)
    for _ in range(2):
        plain.step()
    torch.testing.assert_close(cluster.replicas.rows()[0], plain.x.detach(), rtol=1e-5, atol=1e-6)


def test_a_row_may_be_written_to_the_state():
    """Operations on it that are recorded come first."""

    def step(self, worker):
        yield Update()
        worker.vector("mine").copy_(worker.x).mul_(3.0)
        worker.write_optimizer_state("momentum_buffer", worker.vector("mine"))

    cluster = make("sgd", step)
    cluster.run_until(1.5)
    torch.testing.assert_close(
        cluster.workers[1].read_optimizer_state("momentum_buffer"), 3 * cluster.replicas.rows()[1]
    )


@pytest.mark.parametrize(
    ("optimizer", "momentum", "message"),
    [
        ("sgd", 0.9, "SGD keeps no vectors 'exp_avg_cube': expected momentum_buffer"),
        ("sgd", 0.0, "SGD keeps no vectors 'exp_avg_cube': expected none: it has no state with these settings"),
        ("adam", 0.9, "Adam keeps no vectors 'exp_avg_cube': expected exp_avg, exp_avg_sq"),
        ("rmsprop", 0.0, "RMSprop keeps no vectors 'exp_avg_cube': expected square_avg"),
    ],
)
def test_a_state_that_the_optimizer_does_not_have_is_refused(optimizer, momentum, message):
    def step(self, worker):
        yield Update()
        worker.read_optimizer_state("exp_avg_cube")

    with pytest.raises(InputError, match=re.escape(message)):
        make(optimizer, step, momentum=momentum).run_until(1.5)


def test_the_state_of_several_parameters_has_their_order():
    """With parameter groups, every worker has a torch optimizer of its own."""

    def grouped(parameters):
        parameters = list(parameters)
        groups = [{"params": [p for p in parameters if p.dim() == dim], "lr": 0.01 * dim} for dim in (2, 1)]
        return torch.optim.SGD(groups, momentum=0.9)

    def step(self, worker):
        yield Update()

    results = []
    for make_optimizer in (grouped, lambda parameters: torch.optim.SGD(parameters, lr=0.0, momentum=0.9)):
        (run,) = resolve(
            {"task": "digits", "workers": 2, "batch": 4, "compute": "constant:1s"},
            method=make_method((), step=step),
            make_optimizer=make_optimizer,
        )
        cluster = Cluster(run)
        cluster.run_until(1.5)
        results.append(cluster.workers[1].read_optimizer_state("momentum_buffer"))
    # After one step the momentum is the first gradient, at the same parameters in both.
    torch.testing.assert_close(*results)
    assert results[0].any()
