"""What join checks on each worker by itself, how its waits end, and what is said if finish() is forgotten."""

from __future__ import annotations

import atexit
import copy
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from join_script import make_model, train
from torch import nn

import gossamer
from gossamer.errors import InputError
from gossamer.process.joining import join_checks
from gossamer.process.store import home_store
from gossamer.process.store.rank_info import free_port

SGD = torch.optim.SGD


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return SGD(model.parameters(), lr=0.05)


# Arguments


class Wrapped(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class DistributedDataParallel(Wrapped):
    """As far as join can see: a real one needs a process group."""


class Wrapping:
    """Somebody's optimizer that wraps another."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups


def mistakes() -> dict[str, tuple[Callable[[nn.Module], tuple[Any, Any]], str]]:
    def frozen(model: nn.Module) -> tuple[Any, Any]:
        model.requires_grad_(False)
        return model, SGD([nn.Parameter(torch.zeros(1))], lr=0.1)

    def lazy(model: nn.Module) -> tuple[Any, Any]:
        model.append(nn.LazyLinear(3))
        return model, sgd(model)

    def more(model: nn.Module) -> tuple[Any, Any]:
        return model, SGD([*model.parameters(), nn.Parameter(torch.zeros(1))], lr=0.1)

    return {
        "swapped": (lambda model: (sgd(model), model), "the optimizer is given before the model: call gossamer.join("),
        "parameters": (lambda model: (list(model.parameters()), sgd(model)), "is a list: expected the model, a torch"),
        "class": (lambda model: (model, SGD), "the optimizer is the class SGD: create it, as SGD(model.parameters())"),
        "schedule": (
            lambda model: (model, torch.optim.lr_scheduler.ExponentialLR(sgd(model), 0.9)),
            "ExponentialLR is a learning-rate schedule: give join the optimizer that it schedules",
        ),
        "scaler": (lambda model: (model, torch.amp.GradScaler("cpu")), "a GradScaler is no optimizer"),
        "nothing": (lambda model: (model, None), "the second argument of join is a NoneType: expected a torch.optim"),
        "wrapper": (lambda model: (model, Wrapping(sgd(model))), "give the SGD inside, if its step() is called"),
        "meta": (
            lambda model: (model.to("meta"), sgd(model)),
            "0.weight is on the meta device and has no values: create the model on a device, or load its weights",
        ),
        "lazy": (lazy, "4.weight of a lazy layer has no shape yet: run the model once on an input before join"),
        "frozen": (frozen, "Sequential has no trainable parameters, so there is nothing to train: set requires_grad"),
        "ddp": (
            lambda model: (DistributedDataParallel(model), sgd(model)),
            "the model is wrapped in DistributedDataParallel, and it would average the gradients too: drop the wrapper "
            "and join model.module, with one process for each device",
        ),
        "dp": (lambda model: (nn.Sequential(nn.DataParallel(model)), sgd(model)), "the layer 0 is wrapped in DataPar"),
        "other parameters": (
            lambda model: (model, sgd(copy.deepcopy(model))),
            "SGD has none of the model's parameters: create it from model.parameters(), after the model has been moved",
        ),
        "fewer parameters": (
            lambda model: (model, sgd(model[3])),
            "SGD lacks 4 of the model's 6 trainable parameters, such as 0.weight: add them, set requires_grad=False on",
        ),
        "more parameters": (more, "SGD has 1 trainable parameter that the model does not have, and that workers would"),
        "lbfgs": (lambda model: (model, torch.optim.LBFGS(model.parameters())), "LBFGS takes several gradients"),
    }


MISTAKES = mistakes()


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_arguments(mistake: str) -> None:
    make, line = MISTAKES[mistake]
    with pytest.raises(InputError) as raised:
        gossamer.join(*make(make_model()))
    assert line in str(raised.value)
    assert "\n" not in str(raised.value)


def test_real_ddp_is_refused() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(make_model())
        with pytest.raises(InputError, match="wrapped in DistributedDataParallel"):
            gossamer.join(model, sgd(model))
    finally:
        dist.destroy_process_group()


def test_frozen_parameters_may_be_in_the_optimizer() -> None:
    model = make_model()
    optimizer = sgd(model)
    model[0].requires_grad_(False)
    with gossamer.join(model, optimizer, method="gossip") as swarm:
        train(model, optimizer, 3)
    assert swarm.metrics().steps == 3


def test_a_model_is_joined_once_at_a_time() -> None:
    model = make_model()
    swarm = gossamer.join(model, sgd(model), method="gossip")
    with pytest.raises(InputError, match=r"this model is joined already: join it once, or call finish\(\)"):
        gossamer.join(model, sgd(model), method="gossip")
    larger = nn.Sequential(model, nn.Linear(3, 3))
    with pytest.raises(InputError, match=r"a model that has the parameter 0.0.weight too is joined already"):
        gossamer.join(larger, sgd(larger), method="gossip")
    swarm.finish()
    gossamer.join(model, sgd(model), method="gossip").close()


def test_a_join_that_failed_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = make_model(), sgd(make_model())
    with pytest.raises(InputError, match="has none of"):
        gossamer.join(model, optimizer)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    with pytest.raises(InputError, match="there is no store"):
        gossamer.join(model, sgd(model), timeout=0.5)
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    gossamer.join(model, sgd(model)).close()


def test_the_optimizer_inside_accelerates_wrapper_is_found() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = make_model()
    wrapper = accelerate.Accelerator(cpu=True).prepare(sgd(model))
    assert type(wrapper).__name__ == "AcceleratedOptimizer"
    with gossamer.join(model, wrapper, method="gossip") as swarm:
        train(model, wrapper, 4)
    assert swarm.metrics().steps == 4


def test_the_optimizer_inside_lightnings_wrapper_is_found() -> None:
    # The real one takes seconds to import.
    class LightningOptimizer(Wrapping):
        pass

    optimizer = sgd(make_model())
    assert join_checks.unwrap_optimizer(LightningOptimizer(optimizer)) is optimizer


def test_an_optimizer_of_ones_own_works() -> None:
    class SignDescent(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.01})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.sub_(p.grad.sign(), alpha=group["lr"])

    model = make_model()
    optimizer = SignDescent(model.parameters())
    with gossamer.join(model, optimizer, method="gossip") as swarm:
        train(model, optimizer, 3)
    assert swarm.metrics().steps == 3


@pytest.mark.parametrize("method", ["gossip", "allreduce"])
def test_a_compiled_model_has_the_names_of_the_plain_one(method: str) -> None:
    model = torch.compile(make_model(), backend="eager")
    optimizer = sgd(model)
    with gossamer.join(model, optimizer, method=method) as swarm:
        train(model, optimizer, 3)
        assert "1.running_mean" in swarm.state_dict()["buffers"]
    assert swarm.metrics().steps == 3


# Waits


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def set_environment(rank: int, port: int, host: str = "127.0.0.1") -> None:
        for name, value in (("RANK", rank), ("WORLD_SIZE", 2), ("MASTER_ADDR", host), ("MASTER_PORT", port)):
            monkeypatch.setenv(name, str(value))

    return set_environment


def test_a_name_that_does_not_resolve_is_said_at_once(
    as_rank: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unknown(*_: Any) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    as_rank(1, free_port(), "no-such-host")
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    model = make_model()
    with pytest.raises(InputError, match=r"MASTER_ADDR 'no-such-host' does not resolve .* set it to the name or addr"):
        gossamer.join(model, sgd(model), timeout=0.5)
    assert [record.getMessage() for record in caplog.records] == [
        "worker 1: MASTER_ADDR 'no-such-host' does not resolve (Name or service not known): trying for 0 s"
    ]


def test_no_store(as_rank: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    port = free_port()
    as_rank(1, port)
    monkeypatch.setattr(home_store, "SAY_AFTER_S", 0.1)
    model = make_model()
    with pytest.raises(InputError, match=rf"there is no store at 127.0.0.1:{port} after 1 s .*: start worker 0"):
        gossamer.join(model, sgd(model), timeout=1.0)
    assert "waiting for the store of worker 0" in caplog.text


def test_a_port_that_something_else_uses(as_rank: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(home_store, "ANSWER_TIMEOUT_S", 1.0)
    model = make_model()
    with socket.create_server(("127.0.0.1", 0)) as server:
        as_rank(1, server.getsockname()[1])
        with pytest.raises(InputError, match="does not answer as gossamer's store does: set MASTER_PORT to a port"):
            gossamer.join(model, sgd(model))
    script = (
        "import socket, sys; s = socket.create_server(('0.0.0.0', 0)); print(s.getsockname()[1], flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        as_rank(0, int(other.stdout.readline()))
        with pytest.raises(InputError, match=r"worker 0 cannot host the store at .*: set MASTER_PORT to a port"):
            gossamer.join(model, sgd(model))
        other.kill()


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan")])
def test_a_timeout_that_cannot_be(timeout: float) -> None:
    model = make_model()
    with pytest.raises(InputError, match="expected a number of seconds above 0"):
        gossamer.join(model, sgd(model), timeout=timeout)


# finish() is forgotten

FORGOTTEN = """
import sys, torch, gossamer
model = torch.nn.Linear(3, 2)
swarm = gossamer.join(model, torch.optim.SGD(model.parameters(), lr=0.1), method="gossip")
{end}
"""


@pytest.mark.parametrize(("end", "said", "code"), [("sys.exit(0)", True, 0), ("raise ValueError", False, 1)])
def test_a_process_that_ends_without_finish_says_so(end: str, said: bool, code: int) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", FORGOTTEN.format(end=end)], capture_output=True, text=True, timeout=120, check=False
    )
    line = "worker 0: this worker ends without swarm.finish(): its model is its own, not the average of all workers"
    assert ran.stderr.count(line) == int(said), ran.stderr
    assert ran.returncode == code


@pytest.mark.parametrize("leave", ["finish", "close"])
def test_a_worker_that_has_left_has_nothing_to_say_at_exit(leave: str, monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", registered.append)
    monkeypatch.setattr(atexit, "unregister", registered.remove)
    model = make_model()
    swarm = gossamer.join(model, sgd(model), method="gossip")
    assert len(registered) == 1
    getattr(swarm, leave)()
    assert registered == []
