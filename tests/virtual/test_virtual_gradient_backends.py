"""Gradient backends agree: one worker after the other, many at once, captured graphs, on a CPU and on a GPU."""

import dataclasses
import threading
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call
from uncaptured import Uncaptured

from gossamer.config import resolve
from gossamer.errors import InputError
from gossamer.tasks import Batches, Task
from gossamer.tasks.cifar10 import normalise, resnet18
from gossamer.vectors.flat import Flat
from gossamer.virtual.compute.cuda_graphs import CapturedCopies
from gossamer.virtual.compute.evaluator import Evaluator
from gossamer.virtual.compute.gradient_backends import FunctionalModel, SequentialBackend
from gossamer.virtual.compute.matrix import WIDE_BYTES
from gossamer.virtual.simulation import simulate
from plain_training import flat, train_alone


def test_long_rows_are_evaluated_in_place():
    torch.manual_seed(0)
    task = Task(
        name="wide",
        model=lambda: nn.Linear(512, 600),
        train=(torch.randn(8, 512), torch.randn(8, 600)),
        test=(torch.randn(2, 512), torch.randn(2, 600)),
        loss=nn.functional.mse_loss,
    )
    batches = [Batches(np.arange(8), 4, seed=0, rank=rank) for rank in range(3)]
    evaluator = Evaluator(task, task.model(), batches, seed=0, device=torch.device("cpu"), backend="loop")
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


def test_functional_model_replaces_the_tensors_of_a_model():
    """Tied weights in all their modules, and buffers that the model writes. Afterwards it has its own tensors."""
    model, inputs = Tied(), torch.randn(3, 4)
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    others = {name: torch.rand_like(t) if t.is_floating_point() else t.clone() for name, t in own.items()}
    expected_state = {name: tensor.clone() for name, tensor in others.items()}
    expected = functional_call(model, expected_state, (inputs,))
    functional_model = FunctionalModel(model)
    torch.testing.assert_close(functional_model(others, inputs), expected, rtol=0, atol=0)
    for name in ("norm.running_mean", "norm.running_var"):
        torch.testing.assert_close(others[name], expected_state[name], rtol=0, atol=0)
    with pytest.raises(ValueError, match="too few"):
        functional_model(others, inputs[:1])
    now = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert all(now[name] is tensor for name, tensor in own.items())
    assert model.other.weight is model.one.weight


def odd_task():
    """A model with a batch norm behind a parameter of odd length."""
    torch.manual_seed(0)
    return Task(
        name="odd",
        model=lambda: nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Flatten(), nn.Linear(180, 3)),
        train=(torch.randn(8, 3, 8, 8), torch.randint(0, 3, (8,))),
        test=(torch.randn(4, 3, 8, 8), torch.randint(0, 3, (4,))),
        loss=nn.functional.cross_entropy,
    )


def computed(task, device, backend, precision="float32"):
    """Return losses, gradients, buffers and scores of five workers."""
    batches = [Batches(np.arange(8), 4, seed=0, rank=rank) for rank in range(5)]
    torch.manual_seed(0)
    evaluator = Evaluator(task, task.model(), batches, seed=0, device=device, backend=backend, precision=precision)
    start = evaluator.pack_model(torch.zeros(evaluator.flat.size, device=device))
    rows = torch.stack([start * (1 + 0.1 * rank) for rank in range(5)])
    losses = evaluator.gradients(rows, [0, 1, 2, 3, 4], [0] * 5)
    scores, _ = evaluator.scores(rows, evaluator.buffers)
    return [tensor.cpu() for tensor in (losses, rows, evaluator.buffers, scores)]


@pytest.mark.parametrize(("precision", "rounding"), [("float32", 1e-6), ("bfloat16", 1e-3)])
def test_an_mlp_batched_and_one_by_one(precision, rounding):
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
    """As on a GPU, where some kernels need addresses that are multiples of 16 bytes."""
    task, cpu = odd_task(), torch.device("cpu")
    expected = computed(task, cpu, "loop")
    answers = []

    def usable(tensor):
        answers.append(tensor.data_ptr() % 16 == 0)
        return answers[-1]

    monkeypatch.setattr("gossamer.vectors.flat.usable", usable)
    for here, there in zip(computed(task, cpu, "loop"), expected, strict=True):
        torch.testing.assert_close(here, there, rtol=0, atol=0)
    assert True in answers
    assert False in answers


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("backend", ["batched", "loop", "graph", "compiled"])
def test_batch_norm_behind_a_parameter_of_odd_length_on_a_gpu(backend, monkeypatch):
    """cuDNN refuses weights at addresses that are not aligned."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    task = odd_task()
    expected = computed(task, torch.device("cpu"), "loop")
    for here, there in zip(computed(task, torch.device("cuda"), backend), expected, strict=True):
        torch.testing.assert_close(here, there, rtol=1e-2, atol=1e-3, check_dtype=False)


class Branches(nn.Module):
    """A model with a tied weight and an unused parameter."""

    def __init__(self):
        super().__init__()
        self.one, self.other, self.unused = nn.Linear(6, 6), nn.Linear(6, 6), nn.Parameter(torch.ones(3))
        self.last = nn.Linear(6, 3)
        self.other.weight = self.one.weight

    def forward(self, x):
        return self.last(torch.tanh(self.other(torch.tanh(self.one(x)))))


def branches_task():
    torch.manual_seed(0)
    return Task(
        name="branches",
        model=Branches,
        train=(torch.randn(8, 6), torch.randint(0, 3, (8,))),
        test=(torch.randn(4, 6), torch.randint(0, 3, (4,))),
        loss=nn.functional.cross_entropy,
    )


@pytest.mark.parametrize("in_place", [False, True])
def test_a_gradient_replaces_its_row_with_tied_and_unused_parameters(in_place):
    task = branches_task()
    model = task.model()
    layout, no_buffers = Flat.of_parameters(model), Flat.of_buffers(model)
    start = layout.pack(dict(model.named_parameters()), torch.empty(layout.size))
    task.loss(model(task.train[0]), task.train[1]).backward()
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    expected = layout.pack(gradients, torch.empty_like(start))
    backend = SequentialBackend(task, model, layout, no_buffers, torch.device("cpu"), in_place=in_place)
    inputs, targets = (part[None] for part in task.train)
    for _ in range(2):
        rows = start[None].clone()
        backend(rows, torch.zeros(1, 0), [0], torch.tensor([0]), inputs, targets)
        torch.testing.assert_close(rows[0], expected)


@pytest.mark.parametrize("make_task", [odd_task, branches_task])
def test_copies_of_the_model_compute_any_number_of_workers(make_task):
    """Batches of 1 to 6 workers with graphs of 1, 2, 4 and 6 copies: copies that are left over change nothing."""
    task, cpu = make_task(), torch.device("cpu")
    batches = [Batches(np.arange(8), 4, seed=0, rank=rank) for rank in range(6)]
    torch.manual_seed(0)
    evaluator = Evaluator(task, task.model(), batches, seed=0, device=cpu, backend="loop")
    start = evaluator.pack_model(torch.zeros(evaluator.flat.size))
    points = torch.stack([start * (1 + 0.1 * rank) for rank in range(6)])
    buffers = evaluator.buffers.clone()
    make_copy = partial(SequentialBackend, task, evaluator.model, evaluator.flat, evaluator.buffer_flat, cpu)
    inputs, targets = evaluator._mini_batches([0], [0])
    copies = CapturedCopies(make_copy, 6, inputs[0], targets[0], make_capture=Uncaptured)
    for ranks in ([5], [1, 3], [4, 0, 2], [3, 1, 0, 5], [0, 1, 2, 3, 4, 5], [2, 4, 1, 0, 3], [0, 2]):
        steps = [7 * rank for rank in ranks]
        expected, expected_buffers = points.clone(), buffers.clone()
        inputs, targets = evaluator._mini_batches(ranks, steps)
        losses = make_copy()(expected, expected_buffers, ranks, torch.tensor(ranks), inputs, targets)
        rows, row_buffers = points.clone(), buffers.clone()
        found = copies(rows, row_buffers, ranks, torch.tensor(ranks), inputs, targets)
        for here, there in ((found, losses), (rows, expected), (row_buffers, expected_buffers)):
            torch.testing.assert_close(here, there, rtol=0, atol=0)
    assert sorted(copies.graphs) == [1, 2, 4, 6]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("backend", ["graph", "compiled"])
def test_a_captured_graph_of_several_workers_on_a_gpu(backend):
    task = branches_task()
    expected = computed(task, torch.device("cpu"), "loop")
    for here, there in zip(computed(task, torch.device("cuda"), backend), expected, strict=True):
        torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-5, check_dtype=False)


class Stubborn(nn.Linear):
    def __deepcopy__(self, memo):
        return Stubborn(self.in_features, self.out_features)


class Locked(nn.Linear):
    def __init__(self, *shape):
        super().__init__(*shape)
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("kind", "why"), [(Stubborn, "defines a __deepcopy__ .*batched"), (Locked, "cannot be copied .*batched; .*pickle")]
)
def test_the_error_for_a_model_that_cannot_be_copied_recommends_batched(kind, why):
    task = dataclasses.replace(branches_task(), model=lambda: kind(6, 3))
    with pytest.raises(InputError, match=why):
        computed(task, torch.device("cpu"), "loop")
    assert all(tensor.isfinite().all() for tensor in computed(task, torch.device("cpu"), "batched"))


def test_a_model_whose_hook_refers_to_another_of_its_modules():
    """The hook of a copy would read the weights of the original."""

    def model():
        chain = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
        chain[1].register_forward_hook(lambda module, inputs, output: output + chain[2].weight.sum())
        return chain

    values = {
        "workers": 1,
        "batch": 4,
        "steps": 3,
        "lr": 0.1,
        "gradient_backend": "batched",
        "method": "localsgd",
        "period": 1000,
    }
    (run,) = resolve(values, task=dataclasses.replace(branches_task(), model=model))
    expected = train_alone(run, partial(torch.optim.SGD, lr=0.1, momentum=0.9), steps=3)
    torch.testing.assert_close(simulate(run).model, flat(expected), rtol=0, atol=1e-6)


class Curious(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y if y[0, 0].item() > 0 else 2 * y


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_model_that_cannot_be_captured_falls_back_on_a_gpu():
    task = dataclasses.replace(branches_task(), model=lambda: Curious(6, 3))
    expected = computed(task, torch.device("cpu"), "loop")
    with pytest.warns(UserWarning, match="no CUDA graph"):
        computed_on_gpu = computed(task, torch.device("cuda"), "graph")
    for here, there in zip(computed_on_gpu, expected, strict=True):
        torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-5, check_dtype=False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_resnet_by_a_captured_graph_and_one_by_one_on_a_gpu(monkeypatch):
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
