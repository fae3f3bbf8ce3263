"""Real gradients and real optimizers in simulated time: the same numbers as plain torch."""

import dataclasses
import math
import threading
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call

from gossamer import optim
from gossamer.config import make_schedule, resolve
from gossamer.errors import InputError
from gossamer.flat import Flat
from gossamer.tasks import Batches, Task
from gossamer.tasks.cifar10 import normalise, resnet18
from gossamer.virtual.blocks import WIDE_BYTES
from gossamer.virtual.gradients import Evaluator
from gossamer.virtual.graphs import Lane
from gossamer.virtual.simulation import make_cluster, simulate
from gossamer.virtual.ways import Single, StandIns
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
"""Nobody ever averages: each worker trains alone."""


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
    one, other = (simulated(**values, method="gossip", workers=3, gradients=way) for way in ("batched", "loop"))
    torch.testing.assert_close(one.model, other.model, rtol=0, atol=1e-5)
    assert one.final.loss == pytest.approx(other.final.loss, rel=1e-5)
    assert one.final.accuracy == pytest.approx(other.final.accuracy, abs=0.003)
    assert one.final.train_loss == pytest.approx(other.final.train_loss, rel=1e-5)
    for name, tensor in one.weights.items():
        torch.testing.assert_close(tensor, other.weights[name], rtol=0, atol=1e-5)


def test_long_rows_are_evaluated_where_they_lie():
    torch.manual_seed(0)
    task = Task(
        name="wide",
        model=lambda: nn.Linear(512, 600),
        train=(torch.randn(8, 512), torch.randn(8, 600)),
        test=(torch.randn(2, 512), torch.randn(2, 600)),
        loss=nn.functional.mse_loss,
    )
    batches = [Batches(np.arange(8), 4, seed=0, rank=rank) for rank in range(3)]
    evaluator = Evaluator(task, task.model(), batches, seed=0, device=torch.device("cpu"), way="loop")
    points = torch.randn(3, evaluator.flat.size)
    assert points[0].nbytes >= WIDE_BYTES
    rows = points.clone()
    losses = evaluator.gradients(rows, [2, 0], [5, 1])
    torch.testing.assert_close(rows[1], points[1], rtol=0, atol=0)
    for rank, step, loss in zip([2, 0], [5, 1], losses, strict=True):
        taken = torch.from_numpy(batches[rank].take(step))
        named = {name: view.clone().requires_grad_() for name, view in evaluator.flat.views(points[rank]).items()}
        alone = task.loss(functional_call(task.model(), named, (task.train[0][taken],)), task.train[1][taken])
        gradients = torch.autograd.grad(alone, list(named.values()))
        assert float(loss) == pytest.approx(float(alone.detach()), rel=1e-5)
        expected = evaluator.flat.pack(dict(zip(named, gradients, strict=True)), torch.empty_like(points[0]))
        torch.testing.assert_close(rows[rank], expected)


@pytest.mark.parametrize("way", ["batched", "loop"])
def test_batch_norm_keeps_its_statistics_per_worker_and_averages_them_for_evaluation(way):
    values = {"task": "digits", "model": "conv", "workers": 3, "batch": 8, "steps": 4, "gradients": way, **APART}
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


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.other.weight = self.one.weight

    def forward(self, x):
        if x.shape[0] == 1:
            raise ValueError("too few")
        return self.other(self.one(self.norm(x)))


def test_other_tensors_take_the_place_of_a_model_s_own():
    """Tied weights in all their places, buffers that the model replaces; and its own are back in the end."""
    model, inputs = Tied(), torch.randn(3, 4)
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    others = {name: torch.rand_like(t) if t.is_floating_point() else t.clone() for name, t in own.items()}
    expected_state = {name: tensor.clone() for name, tensor in others.items()}
    expected = functional_call(model, expected_state, (inputs,))
    stand_ins = StandIns(model)
    torch.testing.assert_close(stand_ins(others, inputs), expected, rtol=0, atol=0)
    for name in ("norm.running_mean", "norm.running_var"):
        torch.testing.assert_close(others[name], expected_state[name], rtol=0, atol=0)
    with pytest.raises(ValueError, match="too few"):
        stand_ins(others, inputs[:1])
    now = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert all(now[name] is tensor for name, tensor in own.items())
    assert model.other.weight is model.one.weight


def odd_task():
    """A batch norm behind a parameter of odd length."""
    torch.manual_seed(0)
    return Task(
        name="odd",
        model=lambda: nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Flatten(), nn.Linear(180, 3)),
        train=(torch.randn(8, 3, 8, 8), torch.randint(0, 3, (8,))),
        test=(torch.randn(4, 3, 8, 8), torch.randint(0, 3, (4,))),
        loss=nn.functional.cross_entropy,
    )


def computed(task, device, way, precision="float32"):
    """Losses, gradients, buffers and scores of five workers."""
    batches = [Batches(np.arange(8), 4, seed=0, rank=rank) for rank in range(5)]
    torch.manual_seed(0)
    evaluator = Evaluator(task, task.model(), batches, seed=0, device=device, way=way, precision=precision)
    start = evaluator.start(torch.zeros(evaluator.flat.size, device=device))
    rows = torch.stack([start * (1 + 0.1 * rank) for rank in range(5)])
    losses = evaluator.gradients(rows, [0, 1, 2, 3, 4], [0] * 5)
    scores, _ = evaluator.scores(rows, evaluator.buffers)
    return [tensor.cpu() for tensor in (losses, rows, evaluator.buffers, scores)]


@pytest.mark.parametrize(("precision", "rounding"), [("float32", 1e-6), ("bfloat16", 1e-3)])
def test_a_chain_of_layers_batched_and_one_by_one(precision, rounding):
    torch.manual_seed(0)
    task = Task(
        name="chain",
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 9), nn.ReLU(inplace=True), nn.Linear(9, 3)),
        train=(torch.randint(0, 256, (8, 3, 4), dtype=torch.uint8), torch.randint(0, 3, (8,))),
        test=(torch.randint(0, 256, (4, 3, 4), dtype=torch.uint8), torch.randint(0, 3, (4,))),
        loss=nn.functional.cross_entropy,
        prepare=lambda images: images.float() / 255,
    )
    expected = computed(task, torch.device("cpu"), "loop", precision)
    for here, there in zip(computed(task, torch.device("cpu"), "batched", precision), expected, strict=True):
        torch.testing.assert_close(here, there, rtol=rounding, atol=rounding)


def test_parameters_that_cannot_be_views_of_the_vector(monkeypatch):
    """As on a GPU, where some kernels cannot use what does not begin at a multiple of 16 bytes."""
    task, cpu = odd_task(), torch.device("cpu")
    expected = computed(task, cpu, "loop")
    asked = []

    def usable(tensor):
        asked.append(tensor.data_ptr() % 16 == 0)
        return asked[-1]

    monkeypatch.setattr("gossamer.flat.usable", usable)
    for here, there in zip(computed(task, cpu, "loop"), expected, strict=True):
        torch.testing.assert_close(here, there, rtol=0, atol=0)
    assert True in asked
    assert False in asked


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("way", ["batched", "loop", "graph"])
def test_batch_norm_behind_a_parameter_of_odd_length_on_a_gpu(way, monkeypatch):
    """cuDNN takes weights that begin at odd places for an error of the address."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    task = odd_task()
    expected = computed(task, torch.device("cpu"), "loop")
    for here, there in zip(computed(task, torch.device("cuda"), way), expected, strict=True):
        torch.testing.assert_close(here, there, rtol=1e-2, atol=1e-3, check_dtype=False)


class Hidden(torch.autograd.Function):
    """Keeps a weight where torch does not see it."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        return x @ weight.T @ weight

    @staticmethod
    def backward(ctx, g):
        return g @ ctx.weight.T @ ctx.weight, None


class Branches(nn.Module):
    """With a tied weight, an unused parameter, and perhaps a weight that is needed when its gradient is there."""

    def __init__(self, again=""):
        super().__init__()
        self.one, self.other, self.unused = nn.Linear(6, 6), nn.Linear(6, 6), nn.Parameter(torch.ones(3))
        self.last, self.again = nn.Linear(6, 3), again
        self.other.weight = self.one.weight

    def forward(self, x):
        hidden = torch.tanh(self.other(torch.tanh(self.one(x))))
        weight = self.last.weight.detach()
        if self.again == "seen":
            hidden = hidden + torch.tanh(hidden @ weight.T @ weight)
        elif self.again == "hidden":
            hidden = hidden + torch.tanh(Hidden.apply(hidden, weight))
        return self.last(hidden)


def branches_task(again=""):
    torch.manual_seed(0)
    return Task(
        name="branches",
        model=lambda: Branches(again),
        train=(torch.randn(8, 6), torch.randint(0, 3, (8,))),
        test=(torch.randn(4, 6), torch.randint(0, 3, (4,))),
        loss=nn.functional.cross_entropy,
    )


@pytest.mark.parametrize("again", ["", "seen", "hidden"])
def test_gradients_replace_the_parameters_that_they_are_of_as_they_come(again, monkeypatch):
    """Unless the parameters are still needed then."""
    monkeypatch.setattr("gossamer.virtual.graphs.HELD_BYTES", 0)
    task = branches_task(again)
    model = task.model()
    layout, no_buffers = Flat.of_parameters(model), Flat.of_buffers(model)
    start = layout.pack(dict(model.named_parameters()), torch.empty(layout.size))
    task.loss(model(task.train[0]), task.train[1]).backward()
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    expected = layout.pack(gradients, torch.empty_like(start))
    single = Single(task, model, layout, no_buffers, torch.device("cpu"), in_place=True)
    lane = Lane(single, *task.train)
    lane.settle(start, single.buffers)
    assert lane.held_at_most == (math.inf if again else 0)
    early = []
    monkeypatch.setattr(single, "write_early", lambda write=single.write_early: early.append(write()))
    for _ in range(2):
        lane.load(start, single.buffers, *task.train)
        lane.compute()
        torch.testing.assert_close(single.point, expected)
    assert bool(early) == (not again)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("again", ["", "seen", "hidden"])
@pytest.mark.parametrize("held", [0, 1 << 30])
def test_a_captured_graph_of_several_workers_on_a_gpu(again, held, monkeypatch):
    monkeypatch.setattr("gossamer.virtual.graphs.HELD_BYTES", held)
    task = branches_task(again)
    expected = computed(task, torch.device("cpu"), "loop")
    for here, there in zip(computed(task, torch.device("cuda"), "graph"), expected, strict=True):
        torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-5, check_dtype=False)


class Stubborn(nn.Linear):
    def __deepcopy__(self, memo):
        return Stubborn(self.in_features, self.out_features)


class Locked(nn.Linear):
    def __init__(self, *shape):
        super().__init__(*shape)
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("kind", "why"), [(Stubborn, "in a way of its own.*batched"), (Locked, "cannot be copied .*batched; .*pickle")]
)
def test_a_model_that_cannot_be_copied_is_told_to_be_batched(kind, why):
    task = dataclasses.replace(branches_task(), model=lambda: kind(6, 3))
    with pytest.raises(InputError, match=why):
        computed(task, torch.device("cpu"), "loop")
    assert all(tensor.isfinite().all() for tensor in computed(task, torch.device("cpu"), "batched"))


def test_a_model_whose_parts_know_each_other_otherwise_than_as_modules():
    """A copy's hook would add what another model has."""

    def model():
        made = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
        made[1].register_forward_hook(lambda module, inputs, output: output + made[2].weight.sum())
        return made

    values = {"workers": 1, "batch": 4, "steps": 3, "lr": 0.1, "gradients": "batched", **APART}
    (run,) = resolve(values, task=dataclasses.replace(branches_task(), model=model))
    expected = train_alone(run, partial(torch.optim.SGD, lr=0.1, momentum=0.9), steps=3)
    torch.testing.assert_close(simulate(run).model, flat(expected), rtol=0, atol=1e-6)


def test_the_result_is_not_what_the_model_is_trained_on_with_next():
    model = Wave()
    task = dataclasses.replace(wave_task(1), model=lambda: model)
    (run,) = resolve({"workers": 1, "batch": 3, "steps": 2, "lr": 0.1, **APART}, task=task)
    first = simulate(run)
    kept = first.model.clone()
    simulate(run)
    torch.nn.init.zeros_(model.w)
    torch.testing.assert_close(first.model, kept, rtol=0, atol=0)


class Curious(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y if y[0, 0].item() > 0 else 2 * y


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_model_that_cannot_be_captured_goes_without_a_graph_on_a_gpu():
    task = dataclasses.replace(branches_task(), model=lambda: Curious(6, 3))
    expected = computed(task, torch.device("cpu"), "loop")
    with pytest.warns(UserWarning, match="no CUDA graph"):
        found = computed(task, torch.device("cuda"), "graph")
    for here, there in zip(found, expected, strict=True):
        torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-5, check_dtype=False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_resnet_by_a_captured_graph_and_one_by_one_on_a_gpu(monkeypatch):
    """The graph has kernels of its own for batch norm."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    task = Task(
        name="images",
        model=resnet18,
        train=(torch.randint(0, 256, (8, 3, 32, 32), dtype=torch.uint8), torch.randint(0, 10, (8,))),
        test=(torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8), torch.randint(0, 10, (4,))),
        loss=nn.functional.cross_entropy,
        prepare=normalise,
    )
    gpu = torch.device("cuda")
    for here, there in zip(computed(task, gpu, "graph"), computed(task, gpu, "loop"), strict=True):
        assert float((here - there).norm()) <= 2e-3 * float(there.norm())


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
    """Something whose gradient is not the same everywhere, in float64 and in two pieces."""

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
    cluster = make_cluster(run)
    cluster.run_until(12.5)
    made = [worker.made for worker in cluster.workers]
    assert len(set(made)) >= 3
    for rank, steps in enumerate(made):
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
        torch.testing.assert_close(cluster.rows()[rank], flat(model), rtol=0, atol=1e-10)


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


def test_a_schedule_of_the_users_own():
    (run,) = resolve(
        {"workers": 1, "batch": 3, "steps": 5, "lr": 0.1, "momentum": 0.0, **APART},
        task=wave_task(1),
        schedule=lambda step: 0.0 if step else 1.0,
    )
    torch.testing.assert_close(
        simulate(run).model, flat(train_alone(run, partial(torch.optim.SGD, lr=0.1), steps=1)), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("name", ["sgd", "adam", "accumadam", "rmsprop"])
def test_the_optimizer_of_a_worker_that_joins_begins_anew(name):
    run = make_run(
        task="quadratic", dim=4, workers=2, optimizer=name, lr=0.1, momentum=0.9, accum=3, **APART, fail="1@7.5",
        join="1@10.5", steps=100,
    )  # fmt: skip
    cluster = make_cluster(run)
    cluster.run_until(10.6)
    x = torch.nn.Parameter(cluster.rows()[1].clone())
    optimizer = optim.make(name, [x], lr=0.1, momentum=0.9, period=3)
    for step in range(1, 6):
        cluster.run_until(10.6 + step)
        x.grad = x.detach() - run.task.train[0][1]
        optimizer.step()
        torch.testing.assert_close(cluster.rows()[1], x.detach(), rtol=1e-5, atol=1e-6)


@given(seed=st.integers(0, 1000), look=st.lists(st.floats(0.01, 0.8), max_size=6))
@settings(max_examples=12)
def test_looking_at_a_run_does_not_change_it(seed, look):
    """Operations are written down and executed later, in batches; when does not matter."""
    values = {"task": "quadratic", "dim": 3, "workers": 5, "method": "a2cid2", "seed": seed, "noise": 0.5}
    quiet, watched = cluster_of(**values), cluster_of(**values)
    quiet.run_until(0.8)
    for time in sorted(look):
        watched.run_until(time)
        watched.consensus()
    watched.run_until(0.8)
    torch.testing.assert_close(quiet.rows(), watched.rows(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("clock", ["ideal", "hardware"])
@pytest.mark.parametrize("method", ["gossip", "allreduce", "divisible"])
def test_a_diverged_run_says_when_and_where_and_keeps_what_it_has(method, clock):
    result = simulated(task="quadratic", method=method, workers=3, steps=80, lr=1e6, clock=clock, momentum=0.0)
    if method == "divisible":
        assert result.diverged is None  # Adam's steps are as long as the learning rate, and no longer
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


def test_the_first_loss_that_is_not_finite_is_the_one_that_is_named():
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
        simulate(make_run(**values, gradients="batched"))
