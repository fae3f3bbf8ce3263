"""BatchedMLP gives the same as ``vmap`` over the workers' models, and refuses models that are not a chain of layers."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap

from gossamer.virtual.compute.batched_mlp import BatchedMLP

CHAINS = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 7), nn.ReLU(), nn.Linear(7, 3)),
    "no bias": lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 5, bias=False), nn.Tanh(), nn.Linear(5, 2)),
    "nested": lambda: nn.Sequential(nn.Sequential(nn.Linear(3, 4), nn.GELU()), nn.Flatten(-2), nn.Linear(16, 2)),
    "positions": lambda: nn.Sequential(nn.Linear(3, 6), nn.SiLU(), nn.Linear(6, 2)),
    "in place": lambda: nn.Sequential(nn.Flatten(1, -1), nn.Linear(12, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)),
    "one layer": lambda: nn.Linear(3, 2),
    "one vector": lambda: nn.Sequential(nn.Flatten(0), nn.Linear(72, 4), nn.ELU(), nn.Linear(4, 2, bias=False)),
    "twice": lambda: nn.Sequential(*[nn.Linear(3, 3)] * 2),
}


@pytest.mark.parametrize("name", CHAINS)
def test_outputs_and_gradients_are_those_of_vmap(name):
    torch.manual_seed(0)
    model = CHAINS[name]().double()
    inputs = torch.randn(5, 6, 4, 3, dtype=torch.float64)
    parameters = {
        name: torch.randn(5, *tensor.shape, dtype=torch.float64, requires_grad=True)
        for name, tensor in model.named_parameters()
    }
    chain = BatchedMLP.of(model)
    assert chain is not None
    outputs = chain(parameters, inputs.clone())
    expected = vmap(lambda own, x: functional_call(model, own, x))(parameters, inputs)
    torch.testing.assert_close(outputs, expected, rtol=1e-12, atol=1e-12)
    ours, theirs = (torch.autograd.grad(y.square().sum(), list(parameters.values())) for y in (outputs, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


class Doubled(nn.Sequential):
    def forward(self, inputs):
        return 2 * super().forward(inputs)


class Shifted(nn.Linear):
    def forward(self, inputs):
        return super().forward(inputs) + 1


def hooked():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    model[0].register_forward_hook(lambda module, inputs, outputs: 2 * outputs)
    return model


def test_a_model_with_global_hooks_is_left_to_vmap():
    doubled = torch.nn.modules.module.register_module_forward_hook(lambda module, inputs, outputs: 2 * outputs)
    try:
        assert BatchedMLP.of(nn.Linear(3, 3)) is None
    finally:
        doubled.remove()


def replaced():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    model[1].forward = torch.sin
    return model


def frozen():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].weight.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU()),
        lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)),
        lambda: nn.Sequential(nn.Linear(3, 3), nn.Dropout()),
        lambda: nn.Sequential(nn.Linear(3, 3), nn.Softmax(1)),
        lambda: Doubled(nn.Linear(3, 3)),
        lambda: Shifted(3, 3),
        hooked,
        replaced,
        frozen,
    ],
)
def test_anything_else_is_left_to_vmap(make):
    assert BatchedMLP.of(make()) is None
