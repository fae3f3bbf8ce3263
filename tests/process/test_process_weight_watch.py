"""What the swarm says of weights that change without a step that it sees, and what becomes of such changes."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from join_script import make_model, train
from torch import nn

import gossamer
from gossamer.errors import InputError

SGD = torch.optim.SGD


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return SGD(model.parameters(), lr=0.05)


METHODS = ["gossip", "a2cid2", "allreduce"]
"""Two vectors, two vectors with an evaluation point of its own, one vector."""


def unseen(swarm: gossamer.Swarm) -> list[str]:
    return [str(event) for event in swarm.events if event.kind == "unseen"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_that_is_replaced(method: str, fused: bool) -> None:
    model = make_model()
    swarm = gossamer.join(model, sgd(model), method=method)
    other = torch.optim.AdamW(model.parameters(), fused=fused)
    with pytest.raises(InputError, match=r"changed 10 times in a row by another AdamW, not by step.. of the SGD given"):
        train(model, other, 20)
    swarm.close()


@pytest.mark.parametrize("method", METHODS)
def test_an_optimizer_that_is_replaced_later_is_said_and_its_steps_count(method: str) -> None:
    model = make_model()
    optimizer = sgd(model)
    swarm = gossamer.join(model, optimizer, method=method)
    train(model, optimizer, 3)
    other = sgd(model)
    train(model, other, 12)
    assert "changed 10 times in a row by another SGD" in unseen(swarm)[0]
    trained = [p.detach().clone() for p in model.parameters()]
    swarm.finish()
    assert all(torch.allclose(p, q) for p, q in zip(model.parameters(), trained, strict=True))


def test_an_optimizer_that_is_replaced_later_ends_the_training_at_last() -> None:
    model = make_model()
    optimizer = sgd(model)
    with gossamer.join(model, optimizer, method="gossip"):
        train(model, optimizer, 1)
        with pytest.raises(InputError, match="changed 100 times in a row"):
            train(model, sgd(model), 200)


class Descent:
    """Updates without an optimizer of torch."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @torch.no_grad()
    def step(self) -> None:
        for p in self.model.parameters():
            p.sub_(p.grad, alpha=0.05)

    def zero_grad(self) -> None:
        self.model.zero_grad()


@pytest.mark.parametrize("method", METHODS)
def test_updates_by_hand(method: str) -> None:
    model = make_model()
    swarm = gossamer.join(model, sgd(model), method=method)
    with pytest.raises(InputError, match="changed 10 times in a row by something else, not by step"):
        train(model, Descent(model), 20)
    swarm.close()


@pytest.mark.parametrize("method", METHODS)
def test_finish_and_averaged_throw_no_training_away(method: str) -> None:
    model = make_model()
    swarm = gossamer.join(model, sgd(model), method=method)
    train(model, sgd(model), 5)
    trained = copy.deepcopy(model.state_dict())
    with pytest.raises(InputError, match="changed 5 times"), swarm.averaged():
        pass
    with pytest.raises(InputError, match="changed 5 times"):
        swarm.finish()
    assert all(torch.equal(value, trained[name]) for name, value in model.state_dict().items())
    swarm.finish()


def loops(model: nn.Module, optimizer: Any) -> dict[str, Callable[[], None]]:
    """What may happen between two steps."""
    average = copy.deepcopy(model)

    def swap() -> None:
        for p, q in zip(model.parameters(), average.parameters(), strict=True):
            saved = p.detach().clone()
            p.data.copy_(q)
            p.detach().copy_(saved)

    def swap_by_load() -> None:
        saved = copy.deepcopy(model.state_dict())
        model.load_state_dict(average.state_dict())
        model.load_state_dict(saved)

    def accumulate() -> None:
        for _ in range(30):
            model(torch.ones(4, 6)).sum().backward()
        optimizer.zero_grad()

    def evaluate() -> None:
        with torch.no_grad():
            model(torch.ones(4, 6))

    def copies() -> None:
        average.load_state_dict(copy.deepcopy(model).state_dict())

    def freeze() -> None:
        model[0].requires_grad_(False)

    return {
        "swap": swap,
        "swap by load_state_dict": swap_by_load,
        "accumulation": accumulate,
        "evaluation": evaluate,
        "copies": copies,
        "freezing": freeze,
        "clipping": lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0) and None,
        "optimizer state": lambda: optimizer.load_state_dict(optimizer.state_dict()),
        "moved there and back": lambda: model.double().float() and None,
    }


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("loop", loops(make_model(), None))
def test_no_false_alarm(method: str, loop: str) -> None:
    def trained(join: bool) -> tuple[list[torch.Tensor], list[str]]:
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters())
        swarm = gossamer.join(model, optimizer, method=method) if join else None
        train(model, optimizer, 15, loops(model, optimizer)[loop])
        said = unseen(swarm) if swarm is not None else []
        if swarm is not None:
            swarm.finish()
        return [p.detach() for p in model.parameters()], said

    plain, _ = trained(join=False)
    ours, said = trained(join=True)
    if loop != "moved there and back":
        assert said == []
    assert all(torch.allclose(p, q, atol=1e-6) for p, q in zip(plain, ours, strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_a_checkpoint_that_is_loaded_after_join_counts(method: str) -> None:
    model, other = make_model(), make_model()
    train(other, sgd(other), 5)
    optimizer = sgd(model)
    with gossamer.join(model, optimizer, method=method) as swarm:
        model.load_state_dict(other.state_dict())
        train(model, optimizer, 3)
        assert unseen(swarm) == []
    train(other, sgd(other), 3)
    assert all(torch.allclose(p, q, atol=1e-6) for p, q in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_weights_that_are_clamped_between_steps_stay_clamped(method: str) -> None:
    model = make_model()
    optimizer = sgd(model)

    @torch.no_grad()
    def clamp() -> None:
        for p in model.parameters():
            p.clamp_(-0.1, 0.1)

    with gossamer.join(model, optimizer, method=method) as swarm:
        train(model, optimizer, 10, clamp)
        assert len(unseen(swarm)) == 1
    assert max(float(p.detach().abs().max()) for p in model.parameters()) <= 0.1 + 1e-6


@pytest.mark.parametrize("method", METHODS)
def test_a_parameter_that_is_not_the_same_any_more(method: str) -> None:
    for change, line in (
        (lambda model: model.double(), "was 8x6 float32 on cpu at join and is 8x6 float64 on cpu now"),
        (
            lambda model: model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True),
            "is not the one that was",
        ),
    ):
        model = make_model()
        optimizer = sgd(model)
        swarm = gossamer.join(model, optimizer, method=method)
        change(model)
        with pytest.raises(InputError, match=line):
            optimizer.step()
        swarm.close()


def test_a_layer_that_is_replaced_is_noticed_at_the_end() -> None:
    model = make_model()
    optimizer = sgd(model)
    swarm = gossamer.join(model, optimizer, method="gossip")
    train(model, optimizer, 1)
    model[3] = nn.Linear(8, 3)
    with pytest.raises(InputError, match=r"the parameter 3.weight is not the one that was joined"):
        swarm.finish()


def test_the_watch_ends_with_the_swarm() -> None:
    model = make_model()
    swarm = gossamer.join(model, sgd(model), method="gossip")
    swarm.finish()
    del swarm
    gc.collect()
    train(model, torch.optim.AdamW(model.parameters()), 120)
