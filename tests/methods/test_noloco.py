"""NoLoCo: what exchanges keep in any order, and a run against its formulas written out."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.errors import InputError
from gossamer.methods.noloco import NoLoCo, NoLoCoConfig
from gossamer.testing.worlds.any_order import AnyOrderWorld
from gossamer.topology import build
from gossamer.virtual.sim.cluster import Cluster
from gossamer.virtual.simulation import simulate
from plain_training import (
    INSTANT,
    batches_of,
    flat,
    fresh_model,
    gradient_at,
    make_precise_run,
    make_run,
    train_alone,
    trajectory,
)

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
CHOICES = st.lists(st.integers(0, 1 << 16), max_size=120)
SETTINGS = st.fixed_dictionaries(
    {
        "period": st.integers(1, 4),
        "outer_lr": st.sampled_from([0.3, 0.7, 1.0]),
        "outer_momentum": st.sampled_from([0.0, 0.5, 0.9]),
        "anchor_pull": st.sampled_from([0.0, 0.5, 1.0, 1.9]),
    }
).map(lambda values: {**values, "anchor_pull": values["anchor_pull"] * (1 - values["outer_momentum"] ** 2)})


def close(one, other, tolerance=1e-9):
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@given(
    choices=CHOICES, graph=st.sampled_from(["ring", "complete", "star"]), workers=st.integers(1, 6), values=SETTINGS,
    seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=80)
def test_anchors_move_by_outer_updates_and_no_inner_step_is_lost_in_any_order(choices, graph, workers, values, seed):
    method = NoLoCo(NoLoCoConfig(**values), build(graph, workers))
    moved, taken_over = torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    lr, momentum = values["outer_lr"], values["outer_momentum"]
    original = method.outer_step

    def outer_step(worker, sent, received):
        nonlocal moved, taken_over
        delta, peer_delta = sent[4:].clone(), received[4:].clone()
        moved = moved - lr / (1 - momentum) * 0.5 * (delta + peer_delta)
        taken_over = taken_over - delta
        original(worker, sent, received)

    method.outer_step = outer_step
    world = AnyOrderWorld(method, steps=12, choices=choices, seed=seed)

    def anchors():
        """Σ_i a_i, and the momentum that is still to come."""
        gain = momentum / (1 - momentum)
        return sum(worker.vector("anchor") + gain * worker.vector("outer_momentum") for worker in world.workers)

    before = anchors()
    world.run()
    close(anchors(), before + moved, 1e-10)
    # What the inner steps have added is in a model, relative to its anchor, or has been taken over by an outer step.
    progress = sum(worker.x - worker.vector("anchor") for worker in world.workers)
    close(progress, world.added - taken_over, 1e-10)


def test_workers_do_take_outer_steps_in_the_world_of_any_order():
    world = AnyOrderWorld(NoLoCo(NoLoCoConfig(period=2), build("ring", 5)), steps=40, choices=[], seed=1)
    world.run()
    assert world.num_exchanges >= 10


def recursion(run, outer_steps, outer_lr, outer_momentum, pull):
    """Two workers that take outer steps after these numbers of steps; x after each step."""
    model, batches = fresh_model(run), batches_of(run)
    parameters = [torch.nn.Parameter(flat(model).clone()) for _ in range(2)]
    optimizers = [SGD([parameter]) for parameter in parameters]
    x = [parameter.data for parameter in parameters]
    anchors = [row.clone() for row in x]
    momenta = [torch.zeros_like(row) for row in x]
    for t in range(1, run.config.steps + 1):
        for i in range(2):
            parameters[i].grad = gradient_at(run, model, x[i], batches[i].take(t - 1))
            optimizers[i].step()
        yield [row.clone() for row in x]
        if t in outer_steps:
            outer_gradient = sum(a - row for a, row in zip(anchors, x, strict=True)) / 2
            middle = sum(anchors) / 2
            for i in range(2):
                momenta[i] = outer_momentum * momenta[i] - outer_lr * outer_gradient - pull * (anchors[i] - middle)
                anchors[i] = anchors[i] + momenta[i]
                x[i].copy_(anchors[i])


def test_two_workers_of_one_speed_are_the_recursion(monkeypatch):
    outer_steps, original = [], NoLoCo.outer_step

    def outer_step(self, worker, sent, received):
        outer_steps.append(worker.step)
        original(self, worker, sent, received)

    monkeypatch.setattr(NoLoCo, "outer_step", outer_step)
    options = {"outer_lr": 0.6, "outer_momentum": 0.8, "anchor_pull": 0.4}
    run = make_precise_run(
        task="digits", workers=2, batch=8, steps=16, method="noloco", period=4, partition="by-class", **INSTANT,
        **options,
    )  # fmt: skip
    got, _ = trajectory(run)
    assert len(got) == 32
    assert outer_steps[::2] == outer_steps[1::2]
    assert len(outer_steps) >= 6
    for t, rows in enumerate(recursion(run, set(outer_steps), *options.values())):
        for rank, row in enumerate(rows):
            close(got[t, rank], row)


def test_a_worker_that_finds_no_peer_is_plain_training():
    run = make_precise_run(task="digits", workers=1, method="noloco", period=2, steps=9)
    close(simulate(run).model, flat(train_alone(run, SGD, steps=9)))


def test_an_exchange_sends_two_vectors_each_way():
    run = make_run(task="digits", workers=4, batch=4, steps=30, method="noloco", topology="complete")
    result = simulate(run)
    assert result.final.exchanges > 10
    assert result.final.bytes_sent == result.final.exchanges * 2 * 8 * result.model.numel()


def consensus_left(**options):
    """The share of the anchors' initial distance that 150 outer steps leave."""
    run = make_run(
        task="consensus", dim=6, method="noloco", period=1, steps=150, compute="constant:1s", link="inf", **options
    )  # fmt: skip
    result = simulate(run)
    return result.final.consensus / result.history[0].consensus


@pytest.mark.parametrize("topology", ["complete", "ring"])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_the_default_pull_brings_anchors_together(topology, momentum):
    assert consensus_left(topology=topology, workers=10, outer_momentum=momentum) < 0.05


def test_without_a_pull_anchors_stay_apart():
    assert consensus_left(topology="complete", workers=10, anchor_pull=0.0) == pytest.approx(1.0)


def test_workers_of_one_speed_do_not_form_the_same_pairs_for_ever(monkeypatch):
    """The tests above would notice."""
    monkeypatch.setattr(NoLoCo, "steps_until_ready", lambda self, worker: self.config.period)
    assert consensus_left(topology="complete", workers=10) > 0.3


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"outer_momentum": 0.9, "anchor_pull": 0.5}, "--anchor-pull is 0.5: anchors diverge unless it is .* 0.38"),
        ({"anchor_pull": -0.5}, "--anchor-pull is -0.5: expected 0 or more, or -1"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_are_refused(values, message):
    with pytest.raises(InputError, match=message):
        NoLoCoConfig(**values)


def test_a_worker_that_joins_anchors_at_the_model_it_has_taken_over():
    run = make_run(
        task="quadratic", dim=4, workers=4, method="noloco", period=50, fail="2@6.5", join="2@12.5", steps=30,
        compute="constant:1s", link="inf",
    )  # fmt: skip
    cluster = Cluster(run)
    cluster.run_until(12.5)
    worker = cluster.workers[2]
    assert worker.alive
    assert torch.equal(worker.vector("anchor") + 0.0, worker.x + 0.0)
    assert not (worker.vector("outer_momentum") + 0.0).any()
