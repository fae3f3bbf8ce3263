"""Real gradients and real optimizers in simulated time: the same numbers as plain torch."""

import dataclasses
import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer import optim
from gossamer.config import make_schedule, resolve
from gossamer.errors import InputError
from gossamer.results import WorkerPoint
from gossamer.tasks import Task
from gossamer.virtual.compute.evaluator import Evaluator
from gossamer.virtual.sim.cluster import Cluster
from gossamer.virtual.simulation import simulate
from plain_training import (
    batches_of,
    cluster_of,
    flat,
    make_precise_run,
    make_run,
    simulated,
    train_alone,
)

APART = {"method": "localsgd", "period": 1000, "compute": "constant:1s"}
"""Workers never average: each trains alone."""


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "input.txt"
    path.write_text("".join(np.random.default_rng(0).choice(list("abcdefgh \n"), 1500)))
    return str(path)


@pytest.mark.parametrize("task", ["mlp", "conv", "shakespeare"])
def test_batched_gradients_are_those_of_one_worker_after_the_other(task, text):
    if task == "shakespeare":
        values = {"task": "shakespeare", "data": text, "batch": 2, "optimizer": "sgd", "steps": 2}
    else:
        values = {"task": "digits", "model": task, "batch": 8, "optimizer": "sgd", "steps": 4}
    one, other = (
        simulated(**values, method="gossip", workers=3, gradient_backend=backend) for backend in ("batched", "loop")
    )
    torch.testing.assert_close(one.model, other.model, rtol=0, atol=1e-5)
    assert one.final.loss == pytest.approx(other.final.loss, rel=1e-5)
    assert one.final.accuracy == pytest.approx(other.final.accuracy, abs=0.003)
    assert one.final.train_loss == pytest.approx(other.final.train_loss, rel=1e-5)
    for name, tensor in one.weights.items():
        torch.testing.assert_close(tensor, other.weights[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", ["batched", "loop"])
def test_batch_norm_keeps_its_statistics_per_worker_and_averages_them_for_evaluation(backend):
    values = {
        "task": "digits",
        "model": "conv",
        "workers": 3,
        "batch": 8,
        "steps": 4,
        "gradient_backend": backend,
        **APART,
    }
    run = make_run(**values)
    result = simulate(run)
    optimizer = partial(torch.optim.SGD, lr=run.config.lr, momentum=0.9)
    alone = [train_alone(run, optimizer, 4, ranks=[rank]) for rank in range(3)]
    mean = {
        name: torch.stack([model.state_dict()[name].double() for model in alone]).mean(0) for name in result.weights
    }
    assert any("running_mean" in name for name in mean)
    for name, tensor in result.weights.items():
        torch.testing.assert_close(tensor.double(), mean[name], rtol=0, atol=1e-5, msg=name)
    # The loss is that of the averaged model with the averaged statistics.
    model = run.task.model()
    model.load_state_dict(result.weights, strict=False)
    model.eval()
    with torch.no_grad():
        outputs = model(run.task.test[0])
    assert result.final.loss == pytest.approx(float(run.task.loss(outputs, run.task.test[1])), rel=1e-4)
    assert result.final.accuracy == pytest.approx(float(run.task.correct(outputs, run.task.test[1])), abs=1e-6)


def test_a_result_does_not_change_when_the_model_is_trained_again():
    model = Wave()
    task = dataclasses.replace(wave_task(1), model=lambda: model)
    (run,) = resolve({"workers": 1, "batch": 3, "steps": 2, "lr": 0.1, **APART}, task=task)
    first = simulate(run)
    before = first.model.clone()
    simulate(run)
    torch.nn.init.zeros_(model.w)
    torch.testing.assert_close(first.model, before, rtol=0, atol=0)


def test_each_worker_is_scored_with_its_own_model():
    run = make_run(task="digits", workers=3, batch=8, steps=15, **APART)
    result = simulate(run)
    accuracies = []
    for rank in range(3):
        model = train_alone(run, partial(torch.optim.SGD, lr=run.config.lr, momentum=0.9), 15, ranks=[rank])
        with torch.no_grad():
            accuracies.append(float(run.task.correct(model(run.task.test[0]), run.task.test[1])))
    got = result.final.worker_accuracy
    assert (got.min, got.mean, got.max) == pytest.approx(
        (min(accuracies), sum(accuracies) / 3, max(accuracies)), abs=0.004
    )


@pytest.mark.parametrize("name", optim.names())
def test_one_virtual_worker_with_any_optimizer_is_a_plain_torch_loop(name):
    values = {"task": "digits", "method": "gossip", "workers": 1, "batch": 8, "steps": 7, "optimizer": name}
    lr = make_run(task="quadratic", workers=1, method="gossip", optimizer=name).config.lr
    if name == "muon":  # takes matrices only, and the biases here are vectors
        with pytest.raises(InputError, match="muon"):
            simulated(**values)
        return
    run = make_precise_run(**values, lr=lr)
    expected = train_alone(run, partial(optim.make, name, lr=lr), steps=7)
    torch.testing.assert_close(simulate(run).model, flat(expected), rtol=0, atol=1e-7)


OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.8, weight_decay=0.02),
    "nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.8, nesterov=True),
    "dampened": partial(torch.optim.SGD, lr=0.1, momentum=0.8, dampening=0.3),
    "maximize": partial(torch.optim.SGD, lr=0.01, maximize=True),
    "adam": partial(torch.optim.Adam, lr=0.05, weight_decay=0.1),
    "amsgrad": partial(torch.optim.Adam, lr=0.05, amsgrad=True),
    "adamw": partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1),
    "accumadam": partial(optim.AccumAdam, lr=0.05, period=3, weight_decay=0.1),
    "accumadamw": partial(optim.AccumAdamW, lr=0.05, period=3, weight_decay=0.1),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.05),
}


class Wave(torch.nn.Module):
    """A model with a gradient that depends on the parameters, in float64, with two parameters."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3))
        self.b = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, inputs):
        return torch.sin(inputs @ self.w + self.b)


def wave_task(workers):
    inputs = torch.from_numpy(np.random.default_rng(1).standard_normal((12 * workers, 2)))
    targets = torch.from_numpy(np.random.default_rng(2).standard_normal((12 * workers, 3)))
    return Task(
        name="wave",
        model=Wave,
        train=(inputs, targets),
        test=(inputs, targets),
        loss=lambda outputs, targets: (outputs - targets).square().mean(),
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_of_many_workers_at_once_are_those_of_torchs_own_optimizers(name):
    """Workers of different speed, so that rows with different step counts are updated together."""
    (run,) = resolve(
        {"workers": 5, "batch": 3, "steps": 12, "straggler": "0:3.5,3:0.4", "schedule": "cosine", **APART}
        | {"compute": "lognormal:1s,0.3"},
        task=wave_task(5),
        make_optimizer=OPTIMIZERS[name],
    )
    cluster = Cluster(run)
    cluster.run_until(12.5)
    steps_done = [worker.steps_done for worker in cluster.workers]
    assert len(set(steps_done)) >= 3
    for rank, steps in enumerate(steps_done):
        model = Wave()
        opt = OPTIMIZERS[name](model.parameters())
        schedule = torch.optim.lr_scheduler.LambdaLR(opt, make_schedule("cosine", 12, 0))
        batches = batches_of(run)[rank]
        for step in range(steps):
            samples = batches.take(step)
            opt.zero_grad()
            run.task.loss(model(run.task.train[0][samples]), run.task.train[1][samples]).backward()
            opt.step()
            schedule.step()
        torch.testing.assert_close(cluster.replicas.rows()[rank], flat(model), rtol=0, atol=1e-10)


def test_parameter_groups_keep_their_own_learning_rates():
    def grouped(parameters):
        parameters = list(parameters)
        matrices = [parameter for parameter in parameters if parameter.dim() == 2]
        vectors = [parameter for parameter in parameters if parameter.dim() == 1]
        return torch.optim.SGD([{"params": matrices, "lr": 0.2}, {"params": vectors, "lr": 0.05}])

    (run,) = resolve({"workers": 1, "batch": 3, "steps": 6, **APART}, task=wave_task(1), make_optimizer=grouped)
    expected = train_alone(run, grouped, steps=6)
    torch.testing.assert_close(simulate(run).model, flat(expected), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["constant", "cosine", "linear", "step"])
@pytest.mark.parametrize("warmup", [0, 4])
def test_learning_rates_follow_their_schedule(kind, warmup):
    run = make_run(
        task="quadratic", dim=2, workers=1, method="allreduce", steps=20, schedule=kind, lr_warmup=warmup, lr=0.3
    )
    b = run.task.train[0][0].double()
    x = torch.zeros(2, dtype=torch.float64)
    for step in range(20):
        done = (step - warmup) / (20 - warmup)
        factor = {
            "constant": 1.0,
            "cosine": 0.5 * (1 + math.cos(math.pi * done)),
            "linear": 1 - done,
            "step": 1.0 if done < 0.5 else 0.1 if done < 0.75 else 0.01,
        }[kind]
        if step < warmup:
            factor = (step + 1) / warmup
        x = x - 0.3 * factor * (x - b)
    torch.testing.assert_close(simulate(run).model.double(), x, rtol=0, atol=1e-6)


def test_a_custom_schedule():
    (run,) = resolve(
        {"workers": 1, "batch": 3, "steps": 5, "lr": 0.1, "momentum": 0.0, **APART},
        task=wave_task(1),
        schedule=lambda step: 0.0 if step else 1.0,
    )
    torch.testing.assert_close(
        simulate(run).model, flat(train_alone(run, partial(torch.optim.SGD, lr=0.1), steps=1)), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("name", ["sgd", "adam", "accumadam", "rmsprop"])
@pytest.mark.parametrize("method", ["lasgd", "localsgd"])
def test_a_worker_that_joins_takes_over_the_optimizer_state_in_lockstep_only(name, method):
    """The workers never average, so the state must be that of the peer's steps, or a fresh one."""
    run = make_run(
        task="quadratic", dim=4, workers=2, optimizer=name, lr=0.1, momentum=0.9, accumadam_period=3, method=method,
        period=1000, compute="constant:1s", fail="1@7.5", join="1@10.5", steps=100,
    )  # fmt: skip
    cluster = Cluster(run)
    assert cluster.method.lockstep == (method == "localsgd")
    mine = torch.nn.Parameter(torch.zeros(4))
    optimizer = optim.make(name, [mine], lr=0.1, momentum=0.9, period=3)
    for _ in range(10):
        mine.grad = mine.detach() - run.task.train[0][0]
        optimizer.step()
    cluster.run_until(10.6)
    torch.testing.assert_close(cluster.replicas.rows()[1], mine.detach(), rtol=1e-5, atol=1e-6)
    if method == "lasgd":
        optimizer = optim.make(name, [mine], lr=0.1, momentum=0.9, period=3)
    for step in range(1, 6):
        cluster.run_until(10.6 + step)
        mine.grad = mine.detach() - run.task.train[0][1]
        optimizer.step()
        torch.testing.assert_close(cluster.replicas.rows()[1], mine.detach(), rtol=1e-5, atol=1e-6)


@given(seed=st.integers(0, 1000), times=st.lists(st.floats(0.01, 0.8), max_size=6))
@settings(max_examples=12)
def test_observing_a_run_does_not_change_it(seed, times):
    """The tape executes operations later, in batches. The moment of a flush does not matter."""
    values = {"task": "quadratic", "dim": 3, "workers": 5, "method": "a2cid2", "seed": seed, "noise": 0.5}
    unobserved, observed = cluster_of(**values), cluster_of(**values)
    unobserved.run_until(0.8)
    for time in sorted(times):
        observed.run_until(time)
        observed.consensus()
    observed.run_until(0.8)
    torch.testing.assert_close(unobserved.replicas.rows(), observed.replicas.rows(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("clock", ["ideal", "hardware"])
@pytest.mark.parametrize("method", ["gossip", "allreduce", "divisible"])
def test_a_diverged_run_reports_when_and_where_and_keeps_its_history(method, clock):
    result = simulated(task="quadratic", method=method, workers=3, steps=80, lr=1e6, clock=clock, momentum=0.0)
    if method == "divisible":
        assert result.diverged is None  # a step of Adam is never longer than the learning rate
        return
    assert result.diverged is not None
    assert 0 < result.diverged.time <= result.final.time + 3
    assert result.diverged.rank in range(3)
    assert 0 < result.diverged.step < 80
    assert f"worker {result.diverged.rank}" in str(result.diverged)
    assert 1 < len(result.history) < 81
    assert all(point.loss is None or math.isfinite(point.loss) or point.loss > 0 for point in result.history)
    document = result.document()
    assert document["diverged"] == {
        "time": result.diverged.time, "worker": result.diverged.rank, "step": result.diverged.step
    }  # fmt: skip


def test_the_first_loss_that_is_not_finite_is_reported():
    """Worker 1 alone has data that overflows."""
    inputs = torch.tensor([[1.0], [1e30], [1.0]])

    class Product(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(1))

        def forward(self, x):
            return (self.w * x) ** 2

    task = Task(
        name="overflow",
        model=Product,
        train=(inputs, torch.zeros(3)),
        test=(inputs[:1], torch.zeros(1)),
        loss=lambda outputs, targets: outputs.mean(),
        own_data=True,
        defaults={"batch": 1, "lr": 1e-3},
    )
    (run,) = resolve({"method": "gossip", "workers": 3, "steps": 5, "compute": "constant:1s"}, task=task)
    result = simulate(run)
    assert (result.diverged.rank, result.diverged.step, result.diverged.time) == (1, 0, 1.0)


def test_models_may_compute_in_bfloat16():
    values = {"task": "digits", "workers": 3, "steps": 40, "method": "allreduce", "seed": 0}
    exact, narrow = (simulate(make_run(**values, precision=precision)) for precision in ("float32", "bfloat16"))
    assert narrow.final.loss != exact.final.loss
    assert narrow.final.loss == pytest.approx(exact.final.loss, rel=0.1)
    assert narrow.model.dtype == torch.float32


def test_batch_norm_in_bfloat16_is_not_batched():
    values = {"task": "digits", "model": "conv", "workers": 2, "steps": 2, "precision": "bfloat16"}
    assert math.isfinite(simulate(make_run(**values)).final.loss)
    with pytest.raises(InputError, match="do not batch"):
        simulate(make_run(**values, gradient_backend="batched"))


class Seen:
    """What an observer sees: every point, and what ``read`` returns of the workers then."""

    def __init__(self, read=lambda workers: None):
        self.points, self.workers, self.read = [], [], read

    def __call__(self, point, workers, events):
        self.points.append(point)
        self.workers.append(self.read(workers))


def counted_scores(monkeypatch):
    """Return the list to which every evaluation appends how many models it is of."""
    counts, scores = [], Evaluator.scores

    def counting(self, rows, buffers):
        counts.append(len(rows))
        return scores(self, rows, buffers)

    monkeypatch.setattr(Evaluator, "scores", counting)
    return counts


@pytest.mark.parametrize(("method", "clock"), [("gossip", "ideal"), ("overlap", "ideal"), ("gossip", "hardware")])
@pytest.mark.parametrize("seed", range(6))
def test_a_run_is_evaluated_at_its_start_and_once_at_its_end(method, clock, seed, monkeypatch):
    """Also when the random gradients of the ideal clock have made all steps before the last unit of time."""
    counts, seen = counted_scores(monkeypatch), Seen()
    run = make_run(task="digits", method=method, workers=3, steps=12, batch=4, clock=clock, seed=seed, eval_every=1000)
    result = simulate(run, seen)
    # The start, where all workers are alike; at the end the averaged model, and those of the workers.
    assert counts == [1, 1, 3]
    assert seen.points == result.history
    assert [point.accuracy is None for point in result.history] == [False] + [True] * (len(result.history) - 2) + [
        False
    ]
    if clock == "ideal":
        assert [point.time for point in result.history] == list(range(13))


def test_the_end_of_a_run_with_messages_in_flight_is_later_than_its_last_point(monkeypatch):
    counts, seen = counted_scores(monkeypatch), Seen()
    values = {"link": "1mbit/1s", "eval_every": 1000, "workers": 3, "steps": 12, "batch": 4}
    result = simulate(make_run(task="digits", method="overlap", clock="hardware", **values), seen)
    assert counts == [1, 1, 3, 1, 3]
    assert seen.points == result.history[:-1]
    assert result.history[-1].time > result.history[-2].time
    assert result.history[-2].accuracy is not None


@pytest.mark.parametrize("method", ["gossip", "overlap"])
@pytest.mark.parametrize("clock", ["ideal", "hardware"])
def test_every_point_of_a_run_that_all_workers_leave_is_shown_once(method, clock):
    seen = Seen()
    values = {"workers": 2, "steps": 12, "compute": "constant:1s", "fail": "0@3.5,1@4.5"}
    result = simulate(make_run(task="quadratic", method=method, clock=clock, **values), seen)
    assert result.final.workers_alive == 0
    ended_later = clock == "hardware" and method == "overlap"
    # What ``finish`` comes to there is in the result.
    assert len(seen.points) == len(result.history)
    assert seen.points[:-1] == result.history[:-1]
    assert ended_later or seen.points[-1] is result.final


@pytest.mark.parametrize("clock", ["ideal", "hardware"])
def test_the_last_point_is_shown_also_if_the_last_step_diverged(clock, monkeypatch):
    seen, consensus = Seen(), Cluster.consensus

    def diverging(self):
        # In the evaluation of the end, after the last point of the training.
        return math.nan if len(calls) > 6 else calls.append(0) or consensus(self)

    calls = []
    monkeypatch.setattr(Cluster, "consensus", diverging)
    monkeypatch.setattr("gossamer.virtual.sim.replicas.Replicas.first_nonfinite", lambda self: 1)
    values = {"workers": 2, "steps": 6, "compute": "constant:1s", "clock": clock}
    result = simulate(make_run(task="quadratic", method="gossip", **values), seen)
    assert result.diverged is not None
    assert seen.points == result.history
    assert len(seen.points) == 7


def test_the_state_of_the_workers_is_built_for_those_who_read_it_only(monkeypatch):
    built = []

    def counting(**values):
        built.append(values["rank"])
        return WorkerPoint(**values)

    monkeypatch.setattr("gossamer.virtual.simulation.WorkerPoint", counting)
    run = make_run(task="quadratic", method="gossip", workers=3, steps=5, clock="ideal")
    simulate(run, Seen())
    assert built == [0, 1, 2]  # those of the result
    seen = Seen(read=lambda workers: [worker.steps for worker in workers()])
    simulate(run, seen)
    assert [sum(steps) for steps in seen.workers] == [point.total_steps for point in seen.points]
