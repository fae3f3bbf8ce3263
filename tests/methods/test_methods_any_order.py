"""Whatever the order in which things happen, no gradient is lost and nobody waits for ever."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer import compress
from gossamer.methods import METHODS
from gossamer.settings import from_values
from gossamer.testing.worlds.any_order import AnyOrderWorld
from gossamer.topology import build
from plain_training import kept_sum

AVERAGING = sorted(name for name, method in METHODS.items() if "mean" not in method.gives_up)
"""Methods with which the sum of all models moves only by the workers' updates."""

CHOICES = st.lists(st.integers(0, 1 << 16), max_size=120)
GRAPHS = st.sampled_from(["ring", "complete", "base", "star", "path"])


def make(name, topology, **values):
    return METHODS[name](from_values(METHODS[name].Config, values), topology)


@pytest.mark.parametrize("name", AVERAGING)
@given(choices=CHOICES, graph=GRAPHS, workers=st.integers(1, 6), period=st.integers(0, 3), seed=st.integers(0, 99))
@settings(max_examples=60)
def test_the_sum_of_all_models_moves_only_by_the_workers_own_updates(name, choices, graph, workers, period, seed):
    fields = METHODS[name].Config.__dataclass_fields__
    period = max(period, fields["period"].metadata["minimum"] if "period" in fields else 0)
    method = make(name, build(graph, workers), period=period, global_every=period)
    world = AnyOrderWorld(method, steps=6, choices=choices, seed=seed)
    before = kept_sum(method, world.workers)
    world.run()
    world.finish()
    torch.testing.assert_close(kept_sum(method, world.workers), before + world.added, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", AVERAGING)
def test_workers_do_communicate_in_the_world_of_any_order(name):
    world = AnyOrderWorld(make(name, build("ring", 5), period=1), steps=40, choices=[], seed=1)
    world.run()
    assert world.num_exchanges + world.num_means >= 10


@given(choices=CHOICES, workers=st.integers(1, 6), seed=st.integers(0, 99))
@settings(max_examples=40)
def test_allreduce_gives_every_optimizer_the_same_gradient(choices, workers, seed):
    gradients = {}

    def stepped(worker):
        gradients.setdefault(worker.step, []).append(worker.gradient.clone())

    world = AnyOrderWorld(make("allreduce", build("ring", workers)), steps=6, choices=choices, seed=seed)
    world.stepped = stepped
    world.run()
    assert sorted(gradients) == list(range(6))
    for equal in gradients.values():
        assert len(equal) == workers
        assert all(torch.equal(equal[0], other) for other in equal)


@given(
    choices=CHOICES,
    workers=st.integers(1, 5),
    compressor=st.sampled_from(sorted(compress.names())),
    period=st.integers(1, 4),
    delay=st.integers(-1, 4),
    warmup=st.integers(1, 3),
    lookahead=st.sampled_from([-1.0, 0.0, 0.5]),
    seed=st.integers(0, 99),
)
@settings(max_examples=80)
def test_divisible_keeps_replicas_equal_and_loses_no_gradient(
    choices, workers, compressor, period, delay, warmup, lookahead, seed
):
    values = {"compressor": compressor, "period": period, "delay": min(delay, period), "warmup": warmup}
    method = make("divisible", build("ring", workers), ratio=3.0, lookahead=lookahead, **values)
    dim, steps = 7, 13
    zeros = torch.zeros(dim, dtype=torch.float64)
    states, gradients, arrived, left = {}, {}, {}, {}
    original = method.adam_step

    def adam_step(worker, what):
        arrived.setdefault(worker.step, []).append(zeros.clone())
        compress.add_parts(arrived[worker.step][-1], what)
        original(worker, what)

    def stepped(worker):
        t = worker.step
        state = torch.cat([worker.x, worker.vector("m"), worker.vector("v")])
        numbers = worker.scalars.get("w"), worker.scalars.get("lookahead"), worker.scalars.get("merge_at")
        states.setdefault(t, []).append((state, numbers))
        gradients.setdefault(t, []).append(worker.gradient.clone())
        in_flight = worker.vector("in_flight", 2 * dim + 1)[:dim]
        left.setdefault(t, []).append(worker.vector("undelivered") + in_flight)

    method.adam_step = adam_step
    world = AnyOrderWorld(method, steps=steps, choices=choices, seed=seed, dim=dim, apart=False, stepped=stepped)
    world.run()
    given_so_far, arrived_so_far = zeros, zeros
    for t in range(steps):
        (first, numbers), *others = states[t]
        assert len(states[t]) == workers
        assert all(torch.equal(first, other) and numbers == theirs for other, theirs in others)
        given_so_far = given_so_far + torch.stack(gradients[t]).mean(0)
        arrived_so_far = arrived_so_far + arrived[t][0]
        torch.testing.assert_close(
            given_so_far, arrived_so_far + torch.stack(left[t]).mean(0), rtol=0, atol=1e-10, msg=f"after step {t}"
        )
    world.finish()
    drained = arrived[steps][0] if steps in arrived else zeros
    torch.testing.assert_close(given_so_far, arrived_so_far + drained, rtol=0, atol=1e-10)
    assert all(torch.equal(world.workers[0].x, worker.x) for worker in world.workers)
