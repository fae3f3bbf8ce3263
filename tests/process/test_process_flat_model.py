"""Parameters that cannot be views of the flat vector train as well."""

import pytest
import torch
from torch import nn

import gossamer
from gossamer.process.runtime.flat_model import FlatModel
from gossamer.vectors.flat import Flat


def trained(method):
    """The weights after a few steps; with ``method`` empty, of a plain loop."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    swarm = gossamer.join(model, optimizer, method=method) if method else None
    inputs = torch.randn(20, 4, 3)
    for batch in inputs:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if swarm is not None:
        swarm.finish()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("method", ["allreduce", "a2cid2", "lasgd"])
def test_parameters_that_cannot_be_views_of_the_vector(method, monkeypatch):
    """As on a GPU, where some kernels cannot use what does not begin at a multiple of 16 bytes."""
    expected = trained("")
    torch.testing.assert_close(trained(method), expected, rtol=0, atol=1e-6)
    asked = []

    def usable(tensor):
        asked.append(tensor.data_ptr() % 16 == 0)
        return asked[-1]

    monkeypatch.setattr("gossamer.vectors.flat.usable", usable)
    torch.testing.assert_close(trained(method), expected, rtol=0, atol=1e-6)
    assert True in asked
    assert False in asked


def test_views_that_cannot_be_used_are_copies(monkeypatch):
    flat = Flat(nn.Linear(3, 3).named_parameters())
    vector = torch.arange(12.0)
    monkeypatch.setattr("gossamer.vectors.flat.usable", lambda tensor: tensor.data_ptr() % 16 == 0)
    views = flat.views(vector)
    assert views["weight"].data_ptr() == vector.data_ptr()
    assert views["bias"].tolist() == [9.0, 10.0, 11.0]
    assert views["bias"].data_ptr() % 16 == 0


def test_gradients_are_added_as_they_are_joined():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2).to(torch.bfloat16), nn.Linear(2, 5), nn.Linear(5, 1))
    flat_model = FlatModel(model, torch.optim.SGD(model.parameters(), lr=0.1), two_vectors=True)
    for parameter in [*model.parameters()][:5]:  # the others have none
        parameter.grad = torch.randn_like(parameter)
    start = torch.randn(flat_model.flat.size)
    added, added_again = start.clone(), start.clone()
    flat_model.add_gradient(added)
    joined = flat_model.gradient()
    assert torch.equal(added, start + joined)
    joined.mul_(2)  # a method may write to it
    flat_model.add_gradient(added_again)
    assert torch.equal(added_again, start + joined)
