"""``gossamer.join`` leaves the user's loop as it was, whatever is in it."""

import loop_kinds
import pytest
import torch
from loop_kinds import LOOPS, STEPS, Loop, Training
from real_workers import RealWorkers

import gossamer
from gossamer.errors import InputError
from gossamer.methods import METHODS

OPTIMIZERS = [
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax,
    torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD,
    torch.optim.Adafactor, gossamer.AccumAdam, gossamer.AccumAdamW,
]  # fmt: skip


def trained(loop, method=None):
    """What this loop ends with, alone or joined as the only worker of its job."""
    torch.compiler.reset()
    training = Training(loop, data_seed=1)
    swarm = gossamer.join(training.model, training.optimizer, method=method) if method else None
    for _ in range(STEPS):
        loop.step(training)
    if swarm is not None:
        assert swarm.metrics().steps == STEPS
        swarm.finish()
    return training


# Without vectors of its own, with two vectors, and with communication that spans steps.
@pytest.mark.parametrize("method", ["allreduce", "a2cid2", "overlap"])
@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_one_worker_trains_as_if_nothing_were_joined(loop, method):
    plain, joined = trained(loop), trained(loop, method)
    torch.testing.assert_close(joined.weights(), plain.weights(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(joined.buffers(), plain.buffers(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("method", ["allreduce", "gossip"])
@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_any_torch_optimizer(kind, method):
    loop = Loop(optimizer=lambda model: kind(model.parameters(), lr=0.01))
    torch.testing.assert_close(trained(loop, method).weights(), trained(loop).weights(), rtol=1e-6, atol=1e-7)


def test_an_optimizer_that_takes_many_gradients_per_step_is_refused():
    model = loop_kinds.mlp()
    with pytest.raises(InputError, match="LBFGS takes several gradients per step"):
        gossamer.join(model, torch.optim.LBFGS(model.parameters()))


@pytest.mark.parametrize("loop", LOOPS)
def test_two_workers_that_share_their_gradients_stay_alike(loop):
    with RealWorkers(2, script=loop_kinds.train, loop=loop, method="allreduce") as workers:
        first, second = workers.finished()
    assert first["own_weights"] == second["own_weights"] == first["weights"] == second["weights"]
    assert first["buffers"] == second["buffers"]
    assert first["steps"] == second["steps"] == STEPS


def test_running_statistics_are_local_and_averaged_in_the_end():
    with RealWorkers(2, script=loop_kinds.train, loop="batch norm", method="gossip") as workers:
        first, second = workers.finished()
    own = torch.tensor([first["own_buffers"], second["own_buffers"]])
    assert not torch.equal(own[0], own[1])
    torch.testing.assert_close(torch.tensor(first["buffers"]), own.mean(0), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("method", "loop"), [(name, ("grad scaler", "grad scaler, fused")[at % 2]) for at, name in enumerate(METHODS)]
)
def test_a_worker_that_skips_a_step_harms_nobody(method, loop):
    if method == "divisible" and loop == "grad scaler":
        loop = "grad scaler, adam"
    with RealWorkers(2, script=loop_kinds.train, loop=loop, method=method, steps=20, overflow=(1, 7)) as workers:
        first, second = workers.finished()
    assert first["steps"] == 20
    assert second["steps"] == 19
    assert first["weights"] == second["weights"]
    assert all(abs(weight) < 10 for weight in first["weights"])


def test_a_process_group_of_the_users_own_is_left_alone():
    with RealWorkers(2, script=loop_kinds.train, loop="plain", method="allreduce", own_group=True) as workers:
        first, second = workers.finished()
    assert first["weights"] == second["weights"]
