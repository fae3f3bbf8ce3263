"""Settings in which a method is exactly another algorithm, and runs compared with their formulas written out."""

from functools import partial

import pytest
import torch

from gossamer import compress
from gossamer.virtual.simulation import simulate
from plain_training import (
    INSTANT,
    SYNCHRONOUS,
    batches_of,
    cluster_of,
    flat,
    fresh_model,
    gradient_at,
    make_precise_run,
    make_run,
    simulated,
    train_alone,
    trajectory,
)

DIGITS = {"task": "digits", "workers": 4, "batch": 8, "steps": 8, "clock": "ideal"}
SGD = partial(torch.optim.SGD, lr=0.05)
ADAM = partial(torch.optim.Adam, lr=0.002)


def close(one, other, tolerance=1e-6):
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("settings", "optimizer"),
    [
        ({"optimizer": "sgd", "momentum": 0.0}, SGD),
        ({"optimizer": "sgd", "momentum": 0.9}, partial(SGD, momentum=0.9)),
        ({"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.1}, partial(SGD, momentum=0.9, weight_decay=0.1)),
        ({"optimizer": "adam"}, ADAM),
        (
            {"optimizer": "adamw", "weight_decay": 0.1, "lr": 0.002},
            partial(torch.optim.AdamW, lr=0.002, weight_decay=0.1),
        ),
    ],
    ids=["sgd", "momentum", "decay", "adam", "adamw"],
)
def test_allreduce_is_training_alone_on_the_joint_batch(settings, optimizer):
    run = make_run(**DIGITS, method="allreduce", **settings)
    close(simulate(run).model, flat(train_alone(run, optimizer, steps=8)))


def test_allreduce_on_slow_uneven_machines_is_the_same_training():
    run = make_run(**{**DIGITS, "clock": "hardware"}, method="allreduce", straggler="2:5", link="1mbit/10ms")
    close(simulate(run).model, flat(train_alone(run, partial(SGD, momentum=0.9), steps=8)))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("method", ["lasgd", "localsgd"])
def test_averaging_models_after_every_step_is_allreduce(method, momentum):
    same = {**DIGITS, **INSTANT, "momentum": momentum, "optimizer": "sgd"}
    expected = simulated(**same, method="allreduce").model
    cluster = cluster_of(**same, method=method, period=1)
    cluster.run_until(8.0)
    close(cluster.replicas.rows(), expected.expand(4, -1))


def test_lasgd_with_a_delay_is_not_allreduce():
    """The test above would notice: it is the missing delay that makes them equal."""
    same = {**DIGITS, **INSTANT, "link": "1mbit/0ms", "optimizer": "sgd"}
    got, expected = simulated(**same, method="lasgd", period=1), simulated(**same, method="allreduce")
    assert (got.model - expected.model).abs().max() > 1e-4
    assert got.final.consensus > 1e-3


@pytest.mark.parametrize("compressor", compress.names())
def test_divisible_with_period_1_and_no_delay_is_synchronous_adam(compressor):
    run = make_precise_run(**DIGITS, method="divisible", compressor=compressor, **SYNCHRONOUS["divisible"])
    close(simulate(run).model, flat(train_alone(run, ADAM, steps=8)), 1e-9)


@pytest.mark.parametrize("compressor", ["topk", "none"])
def test_divisible_decays_weights_as_adamw_does(compressor):
    run = make_precise_run(
        **DIGITS,
        method="divisible",
        optimizer="adamw",
        lr=0.002,
        weight_decay=0.5,
        compressor=compressor,
        **SYNCHRONOUS["divisible"],
    )
    expected = train_alone(run, partial(torch.optim.AdamW, lr=0.002, weight_decay=0.5), steps=8)
    close(simulate(run).model, flat(expected), 1e-9)


def test_divisible_is_adam_while_it_warms_up():
    run = make_precise_run(**DIGITS, method="divisible", warmup=8)
    close(simulate(run).model, flat(train_alone(run, ADAM, steps=8)), 1e-9)


def mixing(topology, round, everyone=False):
    """W of one round as a dense matrix."""
    n = topology.workers
    if everyone:
        return torch.full((n, n), 1 / n, dtype=torch.float64)
    w = torch.eye(n, dtype=torch.float64)
    for group in topology.rounds[round % topology.period]:
        members = list(group.members)
        w[members] *= 1 - group.strength
        w[torch.tensor(members)[:, None], torch.tensor(members)] += group.strength / len(members)
    close(w.sum(0), torch.ones(n, dtype=torch.float64))
    close(w.sum(1), torch.ones(n, dtype=torch.float64))
    return w


def overlap_recursion(run, optimizer, global_every=0):
    """x_i(t+1) = Σ_j w_ij x_j(t) + u_i(t), one torch optimizer per worker; x(t) for t = 1, 2, …"""
    n, model, batches = run.config.workers, fresh_model(run), batches_of(run)
    start = flat(model)
    x = start.double().repeat(n, 1)
    parameters = [torch.nn.Parameter(row.clone()) for row in x]
    optimizers = [optimizer([parameter]) for parameter in parameters]
    for t in range(run.config.steps):
        gradients = [gradient_at(run, model, x[i].to(start), batches[i].take(t)) for i in range(n)]
        if t > 0:
            x = mixing(run.topology, t - 1, bool(global_every) and t % global_every == 0) @ x
        for i in range(n):
            parameters[i].data.copy_(x[i])
            parameters[i].grad = gradients[i].double()
            optimizers[i].step()
        x = torch.stack([parameter.detach().clone() for parameter in parameters])
        yield x


GRAPHS = [
    ({"topology": "ring", "workers": 6}, {}),
    ({"topology": "ring", "workers": 5}, {}),
    ({"topology": "complete", "workers": 5}, {}),
    ({"topology": "one-peer-exponential", "workers": 8}, {}),
    ({"topology": "base", "workers": 7}, {}),
    ({"topology": "alternating-exponential-ring", "workers": 8, "nodes": 4}, {}),
    ({"topology": "ring", "workers": 6}, {"global_every": 3}),
]


@pytest.mark.parametrize(("graph", "more"), GRAPHS, ids=lambda value: "-".join(map(str, value.values())) or "plain")
@pytest.mark.parametrize(
    ("task", "optimizer"),
    [
        ({"task": "quadratic", "dim": 5, "lr": 0.1, "momentum": 0.9, "steps": 25}, partial(SGD, lr=0.1, momentum=0.9)),
        ({"task": "digits", "batch": 4, "steps": 6, "optimizer": "adam", "partition": "by-class"}, ADAM),
    ],
    ids=["quadratic", "digits"],
)
def test_overlap_is_its_recursion(task, optimizer, graph, more):
    run = make_precise_run(**task, **graph, **more, method="overlap", clock="ideal")
    found, _ = trajectory(run)
    for t, expected in enumerate(overlap_recursion(run, optimizer, **more)):
        got = torch.stack([found[t, rank] for rank in range(run.config.workers)]).double()
        close(got, expected, 1e-9)


def test_overlap_mixes_before_weight_decay_acts():
    run = make_run(
        task="quadratic", dim=5, workers=6, method="overlap", clock="ideal", steps=20, lr=0.1, weight_decay=0.3
    )
    found, _ = trajectory(run)
    for t, expected in enumerate(overlap_recursion(run, partial(SGD, lr=0.1, weight_decay=0.3))):
        close(torch.stack([found[t, rank] for rank in range(6)]).double(), expected)


def test_overlap_gives_the_same_trajectory_however_slow_workers_and_links_are():
    same = {"task": "quadratic", "dim": 5, "workers": 6, "steps": 20, "method": "overlap", "lr": 0.1}
    expected, _ = trajectory(make_run(**same, clock="ideal"))
    got, _ = trajectory(make_run(**same, straggler="1:3,4:7", link="1kbit/30ms", compute="exponential:20ms"))
    # A worker ahead of the rest may be a step further when the run ends.
    assert len(got) >= 19 * 6
    for key in got.keys() & expected.keys():
        close(got[key], expected[key])


def test_gossip_is_a2cid2_without_its_momentum(monkeypatch):
    from gossamer.methods.a2cid2 import A2CiD2

    original = A2CiD2.__init__

    def still(self, config, topology):
        original(self, config, topology)
        self.eta, self.alpha_tilde = 0.0, 0.5

    for clock in ("ideal", "hardware"):
        same = {"task": "digits", "workers": 5, "steps": 12, "batch": 8, "clock": clock, "momentum": 0.9}
        expected = simulated(**same, method="gossip")
        with monkeypatch.context() as patch:
            patch.setattr(A2CiD2, "__init__", still)
            got = simulated(**same, method="a2cid2")
        close(got.model, expected.model)
        assert [point.exchanges for point in got.history] == [point.exchanges for point in expected.history]
        assert got.final.consensus == pytest.approx(expected.final.consensus, rel=1e-4)


def test_lasgd_averages_what_was_sent_and_keeps_what_was_done_meanwhile():
    """Two workers, gradients of 1 s, an all-reduce of 1.5 s: worked out by hand."""
    # One float each: 4 bytes; 2(n−1)/n = 1 vector over a link of 4/1.5 bytes per second.
    cluster = cluster_of(
        task="quadratic", dim=1, workers=2, method="lasgd", period=1, optimizer="sgd", lr=0.1, momentum=0.0,
        clock="hardware", compute="constant:1s", link=f"{4 / 1.5}b/0ms",
    )  # fmt: skip
    b = cluster.evaluator.task.train[0].flatten().double()
    x = torch.zeros(2, dtype=torch.float64)

    def step(x, at):
        return x - 0.1 * (at - b)

    first = step(x, x)  # at 1 s; the all-reduce of this is back at 2.5 s
    second = step(first, first)  # at 2 s
    merged = second + first.mean() - first  # at 2.5 s
    third = step(merged, second)  # at 3 s, with the gradient taken at 2 s
    cluster.run_until(2.4)
    close(cluster.replicas.rows().flatten().double(), second)
    cluster.run_until(2.6)
    close(cluster.replicas.rows().flatten().double(), merged)
    cluster.run_until(3.1)
    close(cluster.replicas.rows().flatten().double(), third)
