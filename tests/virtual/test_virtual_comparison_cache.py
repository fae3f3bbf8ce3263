"""Runs of one comparison share data and captured graphs, and give the results of runs one by one."""

import gc
import json
import weakref

import pytest
import torch
from torch import nn
from uncaptured import Uncaptured

from gossamer import cli, tasks
from gossamer.config import resolve
from gossamer.tasks import Task
from gossamer.virtual.compute import comparison_cache, cuda_graphs, evaluator
from gossamer.virtual.compute.comparison_cache import ComparisonCache, model_key
from gossamer.virtual.compute.gradient_backends import BatchedBackend
from gossamer.virtual.simulation import simulate


class Flipped(nn.Module):
    """Its random signs are no buffer and no parameter."""

    def __init__(self):
        super().__init__()
        self.signs = torch.randn(6).sign()

    def forward(self, x):
        return x * self.signs


class Frozen(nn.Linear):
    def __init__(self):
        super().__init__(6, 6)
        self.requires_grad_(False)


class Hooked(nn.Linear):
    def __init__(self):
        super().__init__(6, 6)
        self.scale = lambda y: 2 * y

    def forward(self, x):
        return self.scale(super().forward(x))


CAPTURED_ONCE = [nn.Tanh, lambda: nn.BatchNorm1d(6), lambda: nn.BatchNorm1d(6, momentum=None)]
CAPTURED_FOR_EACH_SEED = [Frozen, Flipped, Hooked]
CAPTURED_FOR_EACH_RUN = [lambda: nn.Dropout(0.4)]


def make_task(make_layer):
    generator = torch.Generator().manual_seed(0)
    train, test = (torch.randn(size, 6, generator=generator) for size in (24, 10))
    return Task(
        name="layers",
        model=lambda: nn.Sequential(nn.Linear(6, 6), make_layer(), nn.Linear(6, 3)),
        train=(train, (train.sum(1) > 0).long()),
        test=(test, (test.sum(1) > 0).long()),
        loss=nn.functional.cross_entropy,
        correct=tasks.accuracy,
    )


@pytest.fixture
def captures(monkeypatch):
    """Captures on the CPU, and counts them."""

    class Counting(Uncaptured):
        def capture(self, compute):
            captured = compute.func.__self__
            if not isinstance(captured, BatchedBackend):
                return super().capture(compute)
            model = captured.losses.__self__.model
            assert model.training

            def compute_in_training():
                """As a graph does, whatever the mode of the model it was captured of is by now."""
                mode = model.training
                model.train()
                losses = compute()
                model.train(mode)
                return losses

            return super().capture(compute_in_training)

    for module in (evaluator, cuda_graphs):
        monkeypatch.setattr(module, "can_capture", lambda device: True)
    monkeypatch.setattr(cuda_graphs, "GraphCapture", Counting)
    return Counting


def results_of(task, backend, captures, cache):
    """Return what some runs yield, and how many graphs each captured."""
    results, counts = [], []
    for seed, method, momentum in ((0, "allreduce", 0.0), (0, "gossip", 0.9), (1, "gossip", 0.9), (1, "a2cid2", 0.9)):
        values = {"workers": 4, "batch": 4, "steps": 5, "lr": 0.1, "clock": "ideal", "gradient_backend": backend}
        (run,) = resolve({**values, "method": method, "seed": seed, "momentum": momentum}, task=task)
        before = captures.captures
        result = simulate(run, cache=cache)
        counts.append(captures.captures - before)
        document = result.document()
        for point in (document, *document["history"]):
            del point["wall_s"]
        results.append((document, result.weights))
    return results, counts


@pytest.mark.parametrize("backend", ["graph", "batched"])
@pytest.mark.parametrize(
    ("make_layer", "num_captured"),
    [
        *((layer, 1) for layer in CAPTURED_ONCE),
        *((layer, 2) for layer in CAPTURED_FOR_EACH_SEED),
        *((layer, 4) for layer in CAPTURED_FOR_EACH_RUN),
    ],
)
def test_runs_that_share_graphs_give_the_results_of_runs_one_by_one(make_layer, num_captured, backend, captures):
    task = make_task(make_layer)
    expected, alone = results_of(task, backend, captures, None)
    found, together = results_of(task, backend, captures, ComparisonCache())
    for (document, weights), (other_document, other_weights) in zip(found, expected, strict=True):
        assert document == other_document
        assert all(torch.equal(weights[name], other_weights[name]) for name in other_weights)
    # A run captures a graph for every number of workers that compute at once: 1, 2 and 4.
    assert alone == [1, 3, 3, 3]
    assert together == {1: [1, 2, 0, 0], 2: [1, 2, 3, 0], 4: alone}[num_captured]


def test_graphs_are_captured_again_for_another_batch_and_another_precision(captures):
    cache, task, counts = ComparisonCache(), make_task(nn.Tanh), []
    values = {"workers": 4, "steps": 2, "lr": 0.1, "method": "allreduce", "gradient_backend": "graph"}
    for changed in ({"batch": 4}, {"batch": 4}, {"batch": 5}, {"batch": 5, "precision": "bfloat16"}):
        (run,) = resolve({**values, **changed}, task=task)
        before = captures.captures
        simulate(run, cache=cache)
        counts.append(captures.captures - before)
    assert counts == [1, 0, 1, 1]


def test_the_key_of_a_model_says_what_it_computes():
    def key(model):
        replaced = [tensor for tensor in model.parameters() if tensor.requires_grad]
        return model_key(model, replaced, seed=7)

    assert key(nn.Linear(2, 3)) == key(nn.Linear(2, 3))
    assert key(nn.Linear(2, 3)) != key(nn.Linear(3, 2))
    assert key(nn.Linear(2, 3)) != key(nn.Linear(2, 3).double())
    assert key(nn.LeakyReLU(0.1)) != key(nn.LeakyReLU(0.2))
    frozen = Frozen()
    assert key(frozen) == key(frozen)
    assert key(frozen) != key(Frozen())
    assert key(Hooked()) == 7
    norms = [nn.BatchNorm1d(2), nn.BatchNorm1d(2)]
    norms[1].num_batches_tracked += 1
    assert key(norms[0]) != key(norms[1])


def test_tasks_that_are_the_same_for_every_seed_are_built_once():
    cache, config = ComparisonCache(), tasks.TaskConfig()

    def built(spec, workers, seed, config=config):
        return cache.build_task(spec, workers=workers, seed=seed, config=config)

    first = built("digits", 4, 0)
    assert built("digits", 16, 1) is first
    assert built("digits", 4, 0, tasks.TaskConfig(model="conv")) is not first
    first = built("quadratic", 4, 0)
    assert built("quadratic", 4, 0) is first
    assert built("quadratic", 4, 1) is not first
    assert cache.device_data(first, torch.device("cpu")) is cache.device_data(first, torch.device("cpu"))


def test_nothing_of_a_task_is_kept_while_another_one_is_built(monkeypatch):
    class Graphs:
        draws_random_numbers = False

    cache, build, alive = ComparisonCache(), tasks.build, []

    def building(spec, **values):
        gc.collect()
        alive.append([kept() is not None for kept in before])
        return build(spec, **values)

    monkeypatch.setattr(comparison_cache.tasks, "build", building)
    before = []
    task = cache.build_task("quadratic", workers=2, seed=0)
    data = cache.device_data(task, torch.device("cpu"))
    before = [weakref.ref(task), weakref.ref(data[0][0]), weakref.ref(cache.graphs((task, 2), Graphs))]
    del task, data
    cache.build_task("quadratic", workers=2, seed=1)
    assert alive == [[], [False, False, False]]


@pytest.mark.parametrize("name", ["digits"])
def test_tasks_that_are_said_to_be_the_same_are(name):
    assert name in tasks.SAME_FOR_ALL
    one, other = (tasks.build(name, workers=workers, seed=seed) for workers, seed in ((2, 0), (5, 3)))
    for here, there in zip((*one.train, *one.test), (*other.train, *other.test), strict=True):
        assert torch.equal(here, there)


def test_reproduce_reads_the_data_once_for_all_methods_and_seeds(tmp_path, monkeypatch, capsys):
    built, build = [], tasks.build

    def counting(spec, **values):
        built.append(spec)
        return build(spec, **values)

    monkeypatch.setattr(comparison_cache.tasks, "build", counting)
    path = tmp_path / "two.toml"
    path.write_text(
        """
title = "t"
paper = "p"
claim = "c"
note = "n"
measures = ["accuracy"]
seeds = 2

[settings]
task = "digits"
workers = 2
steps = 2

[full]

[reduced]

[[axes]]
name = "method"
values = ["gossip", "allreduce"]
""",
        encoding="utf-8",
    )
    assert cli.main(["reproduce", str(path), "--out", str(tmp_path / "out"), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 2
    assert built == ["digits"]
