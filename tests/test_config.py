"""From what a person gives to a run: who wins, and what is refused."""

import networkx as nx
import pytest
import torch

from gossamer.config import RunConfig, make_schedule, resolve
from gossamer.errors import InputError
from gossamer.methods import METHODS
from gossamer.tasks import Task
from plain_training import make_run


def small_task(**defaults):
    data = (torch.zeros(60, 1), torch.zeros(60))
    return Task(
        name="small",
        model=lambda: torch.nn.Linear(1, 1),
        train=data,
        test=data,
        loss=lambda a, b: a.mean(),
        defaults=defaults,
    )


def run_of(task, **values):
    (run,) = resolve(values, task=task)
    return run.config


def test_the_user_wins_over_the_method_over_the_task_over_the_general_default():
    bare, task = small_task(), small_task(optimizer="rmsprop", batch=7, lr={"rmsprop": 0.3, "adam": 0.4, "sgd": 0.6})
    assert run_of(bare, method="gossip").optimizer == RunConfig.optimizer
    assert run_of(bare, method="gossip").batch == RunConfig.batch
    assert run_of(task, method="gossip").optimizer == "rmsprop"
    assert run_of(task, method="gossip").batch == 7
    assert run_of(task, method="divisible").optimizer == "adam"
    assert run_of(task, method="divisible", optimizer="adamw").optimizer == "adamw"
    assert run_of(task, method="gossip", batch=5).batch == 5


def test_the_learning_rate_suits_the_optimizer_that_was_chosen():
    task = small_task(optimizer="rmsprop", lr={"rmsprop": 0.3, "adam": 0.4, "sgd": 0.6})
    assert run_of(task, method="gossip").lr == 0.3
    assert run_of(task, method="divisible").lr == 0.4
    assert run_of(task, method="gossip", optimizer="sgd").lr == 0.6
    assert run_of(task, method="gossip", optimizer="accumadam").lr == 0.4
    assert run_of(task, method="gossip", optimizer="adadelta").lr == 1.0
    assert run_of(task, method="gossip", optimizer="SGD", lr=0.01).lr == 0.01
    assert run_of(small_task(lr=0.9), method="gossip").lr == 0.9


def test_several_methods_are_several_runs_of_one_task():
    one, two = resolve({"task": "quadratic", "method": "gossip, allreduce", "workers": 3, "rate": 2.0})
    assert (one.config.method, two.config.method) == ("gossip", "allreduce")
    assert one.task is two.task
    assert one.topology is two.topology
    assert one.method_config.rate == 2.0


def test_the_defaults_alone_are_a_run():
    (run,) = resolve({"task": "quadratic"})
    assert run.config.method == "a2cid2"
    assert run.topology.name == "ring"
    assert run.config.workers == 16


@pytest.mark.parametrize("method", METHODS)
def test_the_values_of_a_run_give_the_same_run_again(method):
    run = make_run(task="quadratic", method=method, workers=3, steps=7, seed=5)
    again = make_run(**run.values())
    assert again.values() == run.values()


def test_epochs_are_passes_of_all_workers_together():
    task = small_task(batch=4)
    # 60 samples, 3 workers × 4: five steps are one pass.
    assert run_of(task, method="gossip", workers=3, epochs=2).steps == 10
    assert run_of(task, method="gossip", workers=3, epochs=0.1).steps == 1
    assert run_of(task, method="gossip", workers=3, steps=17).steps == 17
    assert run_of(task, method="gossip", workers=4, epochs=1, batch=7).steps == 3


def test_an_edge_list_determines_the_number_of_workers(tmp_path):
    path = tmp_path / "graph.txt"
    path.write_text("0 1\n1 2\n2 3\n3 4\n4 0\n0 2\n")
    run = make_run(task="quadratic", method="gossip", topology=str(path))
    assert run.config.workers == 5
    assert run.topology.num_edges == 6
    assert len(run.task.train[0]) == 5
    with pytest.raises(InputError, match="3"):
        make_run(task="quadratic", method="gossip", topology=str(path), workers=3)


def test_a_graph_of_ones_own():
    (run,) = resolve({"task": "quadratic", "method": "overlap"}, graph=nx.petersen_graph())
    assert run.config.workers == 10
    with pytest.raises(InputError, match="in 4 parts that no edge joins"):
        resolve({"task": "quadratic", "method": "overlap"}, graph=nx.empty_graph(4))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"metod": "gossip"}, "unknown option 'metod'.*Did you mean 'method'?"),
        ({"method": "gosip"}, "unknown method 'gosip'.*Did you mean 'gossip'?"),
        ({"method": "gossip,gossip"}, "expected each method once"),
        ({"method": ""}, "unknown method"),
        ({"task": "digit"}, "unknown task 'digit'.*Did you mean 'digits'?"),
        ({"topology": "rng"}, "unknown topology 'rng'"),
        ({"optimizer": "adm", "task": "quadratic"}, "unknown optimizer 'adm'.*Did you mean 'adam'?"),
        ({"workers": 0}, "--workers is 0: expected 1 or more"),
        ({"steps": -5}, "--steps is -5: expected 1 or more"),
        ({"lr": -0.1}, "--lr is -0.1: expected 0 or more"),
        ({"lr": "nan"}, "--lr is not a number"),
        ({"momentum": 1.5}, "--momentum is 1.5: expected 1 or less"),
        ({"seed": -1}, "--seed is -1: expected 0 or more"),
        ({"clock": "idle"}, "unknown value for --clock 'idle'.*Did you mean 'ideal'?"),
        ({"schedule": "cos"}, "unknown value for --schedule 'cos'"),
        ({"device": "abacus"}, "--device is 'abacus': expected cpu"),
        ({"gradient_backend": "quick"}, "unknown value for --gradient-backend"),
        ({"method": "gossip", "period": 3}, "--period does not apply to gossip: it is an option of .*localsgd"),
        ({"method": "allreduce", "rate": 2.0}, "--rate does not apply to allreduce: it is an option of a2cid2, gossip"),
        ({"method": "gossip", "rate": 0}, "--rate is 0.0: expected more than 0"),
        ({"method": "localsgd", "period": 0}, "--period is 0: expected 1 or more"),
        ({"task": "quadratic", "model": "mlp"}, "does not use model"),
        ({"task": "nowhere.py"}, "nowhere.py does not exist"),
        ({"topology": "nowhere.txt"}, "nowhere.txt"),
        ({"lr": "inf"}, "--lr is inf: expected a finite number"),
        ({"epochs": "inf"}, "--epochs is inf"),
    ],
)
def test_what_cannot_be_is_one_clear_line(values, message):
    with pytest.raises(InputError, match=message) as caught:
        resolve({"task": "quadratic", **values})
    assert "\n" not in str(caught.value)


def test_an_option_of_one_of_several_methods_is_taken():
    one, two = resolve({"task": "quadratic", "workers": 2, "method": "localsgd,gossip", "period": 3})
    assert one.method_config.period == 3
    assert not hasattr(two.method_config, "period")


def test_schedules():
    assert [make_schedule("linear", 4, 0)(step) for step in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert [make_schedule("constant", 4, 2)(step) for step in range(4)] == [0.5, 1.0, 1.0, 1.0]
    assert [make_schedule("step", 8, 0)(step) for step in (0, 3, 4, 5, 6, 7)] == pytest.approx(
        [1, 1, 0.1, 0.1, 0.01, 0.01]
    )
    assert make_schedule("cosine", 10, 0)(5) == pytest.approx(0.5)
    assert make_schedule("cosine", 10, 20)(3) == pytest.approx(0.2)
    # Workers that are ahead of the others may go beyond the last step.
    assert make_schedule("cosine", 10, 0)(15) == pytest.approx(0.0)
    assert make_schedule("linear", 10, 0)(15) == 0.0
