"""A model's parameters as one vector: tied weights once, frozen ones not at all, memory formats and dtypes kept."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gossamer.errors import InputError
from gossamer.vectors.flat import Flat


def packed(model):
    flat = Flat.of_parameters(model)
    return flat, flat.pack(dict(model.named_parameters()), torch.empty(flat.size, dtype=flat.dtype))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


def test_the_order_is_that_of_the_model():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    flat, vector = packed(model)
    assert [part.name for part in flat.parts] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert torch.equal(vector, nn.utils.parameters_to_vector(model.parameters()))


def test_views_share_memory_with_the_vector():
    flat, vector = packed(nn.Linear(3, 2))
    views = flat.views(vector)
    views["bias"].fill_(7.0)
    assert vector[-2:].tolist() == [7.0, 7.0]
    assert views["weight"].shape == (2, 3)


def test_tied_weights_are_there_once():
    flat, _ = packed(Tied())
    assert flat.size == 15
    assert [part.name for part in flat.parts] == ["embedding.weight"]


def test_frozen_parameters_are_not_there():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    model[0].weight.requires_grad_(False)
    flat, _ = packed(model)
    assert [part.name for part in flat.parts] == ["0.bias", "1.weight", "1.bias"]


def test_a_model_without_anything_to_train_is_an_error():
    with pytest.raises(InputError, match="ReLU has no trainable parameters"):
        Flat.of_parameters(nn.ReLU())


def test_channels_last_lies_in_the_vector_as_it_lies_in_memory():
    model = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
    flat, vector = packed(model)
    in_memory = torch.as_strided(model.weight.detach(), (model.weight.numel(),), (1,))
    assert torch.equal(vector[: model.weight.numel()], in_memory)
    view = flat.views(vector)["weight"]
    assert torch.equal(view, model.weight)
    assert view.is_contiguous(memory_format=torch.channels_last)
    assert view.stride() == model.weight.stride()


def test_several_dtypes_share_a_vector_of_the_widest():
    model = nn.Sequential(nn.Linear(3, 2).to(torch.bfloat16), nn.Linear(2, 1))
    flat, vector = packed(model)
    assert vector.dtype == torch.float32
    views = flat.views(vector)
    assert views["0.weight"].dtype == torch.bfloat16
    assert views["1.weight"].dtype == torch.float32
    for name, parameter in model.named_parameters():
        assert torch.equal(views[name], parameter)
    assert packed(nn.Linear(2, 2).to(torch.bfloat16))[0].dtype == torch.bfloat16
    assert packed(nn.Linear(2, 2).half())[0].dtype in (torch.float16, torch.float32)
    assert packed(nn.Linear(2, 2).double())[0].dtype == torch.float64


def test_a_parameter_may_be_a_single_number():
    model = nn.Module()
    model.temperature = nn.Parameter(torch.tensor(2.5))
    flat, vector = packed(model)
    assert vector.tolist() == [2.5]
    assert flat.views(vector)["temperature"].shape == ()
    assert flat.views(vector.expand(3, 1))["temperature"].shape == (3,)


def test_many_vectors_at_once():
    """The leading dimension is the worker."""
    flat, vector = packed(nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last))
    rows = torch.stack([vector, 2 * vector])
    views = flat.views(rows)
    assert views["weight"].shape == (2, 3, 2, 3, 3)
    assert torch.equal(views["weight"][1], 2 * flat.views(vector)["weight"])


def test_buffers_are_those_with_a_fraction():
    model = nn.BatchNorm1d(3)
    assert [part.name for part in Flat.of_buffers(model).parts] == ["running_mean", "running_var"]
    assert Flat.of_buffers(nn.Linear(2, 2)).size == 0


@given(
    shapes=st.lists(st.lists(st.integers(1, 4), max_size=4), min_size=1, max_size=5),
    permute=st.randoms(use_true_random=False),
    dtypes=st.lists(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]), min_size=5, max_size=5),
)
@settings(max_examples=80)
def test_packing_and_unpacking_gives_back_what_was_there(shapes, permute, dtypes):
    named = {}
    for k, shape in enumerate(shapes):
        order = list(range(len(shape)))
        permute.shuffle(order)
        named[str(k)] = torch.randn(shape, generator=torch.Generator().manual_seed(k)).permute(order).to(dtypes[k])
    flat = Flat(named.items())
    vector = flat.pack(named, torch.empty(flat.size, dtype=flat.dtype))
    assert flat.size == sum(tensor.numel() for tensor in named.values())
    for name, view in flat.views(vector).items():
        assert torch.equal(view, named[name])
    back = {name: torch.zeros_like(tensor) for name, tensor in named.items()}
    flat.unpack(vector, back)
    assert all(torch.equal(back[name], named[name]) for name in named)
