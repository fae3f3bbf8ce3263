"""DiLoCo and Streaming DiLoCo against their formulas written out, and what stays equal on all workers."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.errors import InputError
from gossamer.methods.diloco import DiLoCo, DiLoCoConfig, cut
from gossamer.testing.worlds.any_order import AnyOrderWorld
from gossamer.topology import build
from gossamer.virtual.sim.cluster import Cluster
from gossamer.virtual.simulation import simulate
from plain_training import batches_of, flat, fresh_model, gradient_at, make_precise_run, make_run, trajectory

DIGITS = {"task": "digits", "workers": 3, "batch": 8, "steps": 13, "clock": "ideal", "partition": "by-class"}
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
CHOICES = st.lists(st.integers(0, 1 << 16), max_size=120)


def close(one, other, tolerance=1e-9):
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_with_outer_lr_1_and_no_momentum_it_is_local_sgd(optimizer):
    same = {**DIGITS, "optimizer": optimizer, "period": 4}
    expected, _ = trajectory(make_run(**same, method="localsgd"))
    got, _ = trajectory(make_run(**same, method="diloco", outer_lr=1.0, outer_momentum=0.0))
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[key], expected[key]) for key in expected)


def recursion(run, period, outer_lr, outer_momentum, bounds, delay, alpha):
    """The formulas of the docstring, one torch optimizer per worker; x after each step. ``alpha`` None: displaced."""
    n, model, batches = run.config.workers, fresh_model(run), batches_of(run)
    anchor = flat(model).clone()
    momentum = torch.zeros_like(anchor)
    parameters = [torch.nn.Parameter(anchor.clone()) for _ in range(n)]
    optimizers = [SGD([parameter]) for parameter in parameters]
    x = [parameter.data for parameter in parameters]
    fragments = [slice(*pair) for pair in pairwise(bounds)]
    in_flight = {}

    def outer_step(part, sent):
        outer_gradient = anchor[part] - sum(sent) / n
        momentum[part] = outer_momentum * momentum[part] + outer_gradient
        anchor[part] -= outer_lr * (outer_gradient + outer_momentum * momentum[part])
        for i in range(n):
            if alpha is None:
                x[i][part] += anchor[part] - sent[i]
            else:
                x[i][part] = alpha * x[i][part] + (1 - alpha) * anchor[part]

    for t in range(1, run.config.steps + 1):
        for i in range(n):
            parameters[i].grad = gradient_at(run, model, x[i], batches[i].take(t - 1))
            optimizers[i].step()
        for f, part in enumerate(fragments):
            started = f * period // len(fragments)
            if delay and f in in_flight and t % period == (started + delay) % period:
                outer_step(part, in_flight.pop(f))
            if t % period == started:
                in_flight[f] = [row[part].clone() for row in x]
                if not delay:
                    outer_step(part, in_flight.pop(f))
        yield [row.clone() for row in x]


@pytest.mark.parametrize(
    ("options", "alpha"),
    [
        ({"period": 3, "outer_lr": 0.7, "outer_momentum": 0.9}, 0.0),
        ({"period": 4, "outer_lr": 0.7, "outer_momentum": 0.5, "workers": 1}, 0.0),
        ({"period": 4, "delay": 2, "merge": "mix"}, 0.5),
        ({"period": 4, "fragments": 3}, 0.0),
        ({"period": 4, "fragments": 3, "delay": 3, "merge": "mix", "alpha": 0.25}, 0.25),
        ({"period": 4, "fragments": 2, "delay": 4, "merge": "mix"}, 0.5),
        ({"period": 4, "fragments": 2, "delay": 2}, None),
    ],
    ids=["plain", "alone", "delay", "fragments", "streaming", "delay-of-a-period", "displacement"],
)
def test_it_is_its_recursion(options, alpha):
    run = make_precise_run(**{**DIGITS, **options}, method="diloco")
    c = run.method_config
    sizes = [parameter.numel() for parameter in fresh_model(run).parameters()]
    offsets = [sum(sizes[:k]) for k in range(len(sizes) + 1)]
    expected = recursion(run, c.period, c.outer_lr, c.outer_momentum, cut(offsets, c.fragments), c.delay, alpha)
    got, _ = trajectory(run)
    for t, rows in enumerate(expected):
        for rank, row in enumerate(rows):
            close(got[t, rank], row)
    assert len(got) == 13 * run.config.workers


@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=12),
    fragments=st.integers(1, 12),
)
def test_fragments_are_cut_at_tensors_and_cover_all(sizes, fragments):
    offsets = [sum(sizes[:k]) for k in range(len(sizes) + 1)]
    if fragments > len(sizes):
        with pytest.raises(InputError, match=f"--fragments is {fragments}: expected at most one per tensor"):
            cut(offsets, fragments)
        return
    bounds = cut(offsets, fragments)
    assert len(bounds) == fragments + 1
    assert bounds == sorted(set(bounds))
    assert set(bounds) <= set(offsets)
    assert (bounds[0], bounds[-1]) == (0, offsets[-1])


def test_fragments_are_of_about_equal_length():
    assert cut([0, 10, 20, 30, 40], 2) == [0, 20, 40]
    assert cut([0, 4, 19, 22, 40], 2) == [0, 19, 40]
    assert cut([0, 1, 2, 3, 100], 3) == [0, 2, 3, 100]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"period": 4, "delay": 5}, "--delay is 5: expected at most --period, which is 4"),
        ({"alpha": -0.5}, "--alpha is -0.5: expected a share from 0 to 1, or -1 for the default"),
        ({"merge": "overwrite"}, "--merge"),
    ],
)
def test_settings_that_do_not_fit_are_refused(values, message):
    with pytest.raises(InputError, match=message):
        DiLoCoConfig(**values)


streaming = st.fixed_dictionaries(
    {
        "period": st.integers(1, 5),
        "fragments": st.integers(1, 3),
        "delay": st.integers(0, 5),
        "merge": st.sampled_from(["mix", "displacement"]),
    }
).map(lambda values: {**values, "delay": min(values["delay"], values["period"])})


def in_any_order(choices, workers, seed, values, **world):
    method = DiLoCo(DiLoCoConfig(**values), build("ring", workers))
    return AnyOrderWorld(method, steps=9, choices=choices, seed=seed, **world)


@given(choices=CHOICES, workers=st.integers(1, 5), seed=st.integers(0, 99), values=streaming)
@settings(max_examples=60)
def test_anchors_are_equal_after_every_step_in_any_order(choices, workers, seed, values):
    seen = {}

    def stepped(worker):
        state = torch.cat([worker.vector("anchor"), worker.vector("outer_momentum")])
        seen.setdefault(worker.step, []).append((state, worker.scalars["outer_steps"]))

    world = in_any_order(choices, workers, seed, values, apart=False, stepped=stepped)
    world.run()
    world.finish()
    assert not any(worker.tickets for worker in world.workers)
    for (first, outer_steps), *others in seen.values():
        assert len(others) == workers - 1
        assert all(torch.equal(first, other) and outer_steps == theirs for other, theirs in others)
    due = sum(t % values["period"] == f * values["period"] // values["fragments"]
              for t in range(1, 10) for f in range(values["fragments"]))  # fmt: skip
    assert world.workers[0].scalars["outer_steps"] == due


@given(choices=CHOICES, workers=st.integers(1, 5), seed=st.integers(0, 99), values=streaming)
@settings(max_examples=40)
def test_displacement_loses_no_inner_step(choices, workers, seed, values):
    """With an outer step to the mean itself, the sum of all models moves only by the workers' own updates."""
    values = {**values, "merge": "displacement", "outer_lr": 1.0, "outer_momentum": 0.0}
    world = in_any_order(choices, workers, seed, values, apart=False)
    before = sum(worker.x.clone() for worker in world.workers)
    world.run()
    world.finish()
    close(sum(worker.x for worker in world.workers), before + world.added, 1e-12)


@pytest.mark.parametrize("fragments", [1, 3])
def test_it_sends_as_many_bytes_as_local_sgd(fragments):
    run = make_run(**{**DIGITS, "steps": 24}, method="diloco", period=6, fragments=fragments)
    result = simulate(run)
    # All fragments are averaged once per period. The bytes of each all-reduce are rounded.
    allreduce = round(2 * 2 / 3 * 4 * result.model.numel())
    assert result.final.bytes_sent == pytest.approx(3 * 4 * allreduce, rel=1e-4)


@pytest.mark.parametrize("streaming", [{}, {"fragments": 2, "delay": 2}, {"delay": 3, "merge": "mix"}])
@pytest.mark.parametrize("join", ["2@9.7", "2@11.2", "2@12.4", "2@13.3"])
def test_a_worker_that_joins_takes_over_the_anchor_and_what_is_in_flight(streaming, join):
    run = make_run(
        task="digits", workers=4, batch=4, method="diloco", period=4, fail="2@3.5", join=join, compute="constant:1s",
        link="inf", steps=30, **streaming,
    )  # fmt: skip
    cluster = Cluster(run)
    for time in (14.9, 17.9, 25.9):  # when all have done the same number of steps
        cluster.run_until(time)
        assert len(cluster.alive()) == 4
        for name in ("anchor", "outer_momentum"):
            rows = [worker.vector(name) + 0.0 for worker in cluster.workers]
            assert all(torch.equal(rows[0], row) for row in rows)
            assert rows[0].any()
        assert len({worker.scalars["outer_steps"] for worker in cluster.workers}) == 1


def test_what_is_in_flight_is_dropped_when_the_membership_changes():
    world = in_any_order([], 3, 0, {"period": 3, "delay": 3}, apart=False)
    method, worker = world.method, world.workers[0]
    while worker.step < 3:
        world.act(world.possible())
    assert list(worker.tickets) == ["fragment 0"]
    anchor = worker.vector("anchor").clone()
    method.on_membership_change(worker)
    assert list(method.merge(worker, 0)) == []
    assert torch.equal(worker.vector("anchor"), anchor)
    assert worker.scalars["outer_steps"] == 0
