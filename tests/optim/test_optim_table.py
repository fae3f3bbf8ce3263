"""Optimizers by name, and which of them may run on one flat vector."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gossamer import optim
from gossamer.errors import InputError

ELEMENTWISE = [
    "accumadam",
    "accumadamw",
    "adadelta",
    "adagrad",
    "adam",
    "adamax",
    "adamw",
    "asgd",
    "nadam",
    "radam",
    "rmsprop",
    "rprop",
    "sgd",
]


def one_param() -> list[Tensor]:
    return [torch.ones(2, 2, requires_grad=True)]


@pytest.mark.parametrize("name", optim.names())
def test_every_name_makes_an_optimizer_that_steps_at_its_default_lr(name):
    params = one_param()
    optimizer = optim.make(name, params, lr=optim.default_lr(name))
    assert type(optimizer) is optim.OPTIMIZERS[name]
    assert optimizer.param_groups[0]["lr"] == optim.default_lr(name)
    params[0].grad = torch.tensor([[1.0, 2.0], [3.0, -4.0]])
    optimizer.step()
    assert not torch.equal(params[0], torch.ones(2, 2))
    assert torch.isfinite(params[0]).all()


def test_names():
    assert {"sgd", "adam", "adamw", "accumadam", "accumadamw", "rmsprop", "nadam"} <= set(optim.names())
    assert not {"lbfgs", "sparseadam", "optimizer"} & set(optim.names())


def test_options_go_to_those_that_have_them():
    sgd = optim.make("sgd", one_param(), lr=0.1, momentum=0.7, weight_decay=0.2)
    assert (sgd.defaults["momentum"], sgd.defaults["weight_decay"]) == (0.7, 0.2)
    accum = optim.make("accumadamw", one_param(), lr=0.1, period=9)
    assert (accum.defaults["period"], accum.defaults["weight_decay"]) == (9, 0.0)
    assert optim.make("adamw", one_param(), lr=0.1).defaults["weight_decay"] == 0.0
    assert optim.make("rprop", one_param(), lr=0.1).defaults["lr"] == 0.1


def test_unknown_names():
    with pytest.raises(InputError, match=r"unknown optimizer 'adamv'.*Did you mean 'adam"):
        optim.make("adamv", one_param(), lr=0.1)
    with pytest.raises(InputError, match="unknown optimizer"):
        optim.default_lr("adamv")


@pytest.mark.parametrize(("name", "why"), [("lbfgs", "closure"), ("sparseadam", "sparse gradients")])
def test_unsupported_optimizers_say_why(name, why):
    with pytest.raises(InputError, match=f"cannot be used: it .*{why}.* use one of .*adam"):
        optim.make(name, one_param(), lr=0.1)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("sgd", {"lr": -1.0}, "optimizer 'sgd': Invalid learning rate"),
        ("adam", {"lr": float("nan")}, "not a finite number"),
        ("adam", {"lr": float("inf")}, "not a finite number"),
        ("accumadam", {"lr": 0.1, "period": 0}, "Invalid period"),
        ("rprop", {"lr": 0.1, "weight_decay": 0.1}, "has no weight decay"),
    ],
)
def test_unusable_settings_are_one_clear_line(name, settings, message):
    with pytest.raises(InputError, match=message) as caught:
        optim.make(name, one_param(), **settings)
    assert "\n" not in str(caught.value)


def test_default_lr():
    assert optim.default_lr("sgd") == 0.05
    assert optim.default_lr("adamw") == optim.default_lr("accumadam") == 1e-3


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_optimizers_do_the_same_on_one_flat_vector(name):
    generator = torch.Generator().manual_seed(0)
    shaped = [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in [(4, 3), (5,), (), (2, 2, 2)]
    ]
    flat = torch.cat([param.detach().flatten() for param in shaped]).requires_grad_()
    weight_decay = 0.0 if name == "rprop" else 0.1
    of_shaped = optim.make(name, shaped, lr=0.03, weight_decay=weight_decay, period=3)
    of_flat = optim.make(name, [flat], lr=0.03, weight_decay=weight_decay, period=3)
    for _ in range(25):
        noise = torch.randn(flat.shape, generator=generator, dtype=torch.float64)
        flat.grad = flat.detach() + noise
        chunks = flat.grad.split([param.numel() for param in shaped])
        for param, piece in zip(shaped, chunks, strict=True):
            param.grad = piece.view(param.shape).clone()
        of_shaped.step()
        of_flat.step()
        joined = torch.cat([param.detach().flatten() for param in shaped])
        torch.testing.assert_close(joined, flat.detach(), rtol=1e-13, atol=1e-13)
