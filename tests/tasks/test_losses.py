"""Losses of several models in one call."""

import pytest
import torch
from torch.func import vmap

from gossamer.tasks.task import cross_entropies, cross_entropy


@pytest.mark.parametrize("shape", [(8,), (4, 6)], ids=["one prediction per sample", "one per position"])
def test_of_many_is_each_by_itself(shape):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, *shape, 5, dtype=torch.float64, generator=generator, requires_grad=True)
    classes = torch.randint(5, (3, *shape), generator=generator, dtype=torch.uint8)
    together, each = cross_entropies(logits, classes), vmap(cross_entropy)(logits, classes)
    torch.testing.assert_close(together, each)
    (gradient,) = torch.autograd.grad(together.sum(), logits)
    (expected,) = torch.autograd.grad(each.sum(), logits)
    torch.testing.assert_close(gradient, expected)
