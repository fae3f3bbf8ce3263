"""Batch norm in one with an addition and a ReLU: what torch makes of the three, one after the other."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gossamer.tasks.fused_resnet import fuse, normalised
from gossamer.tasks.resnet import ResNet18

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def images(shape, device, dtype=torch.float32, *, mean=0.0):
    return (torch.randn(shape, device=device) + mean).to(dtype).contiguous(memory_format=torch.channels_last)


def one_after_the_other(norm, x, skip, relu):
    y = norm(x)
    y = y if skip is None else y + skip
    return F.relu(y) if relu else y


def outcome(norm, call, x, skip, relu):
    """Output, gradients and running statistics."""
    norm = copy.deepcopy(norm)
    leaves = [tensor.clone().requires_grad_() for tensor in (x, skip) if tensor is not None]
    out = call(norm, leaves[0], leaves[1] if skip is not None else None, relu)
    out.backward(torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out).to(out.dtype))
    gradients = [leaf.grad for leaf in leaves] + [norm.weight.grad, norm.bias.grad]
    return [out.detach(), *gradients, norm.running_mean, norm.running_var]


def made(channels, device):
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(channels).to(device)
    nn.init.uniform_(norm.weight, 0.5, 2.0)
    nn.init.normal_(norm.bias)
    return norm


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("skips", [False, True])
def test_on_a_cpu_it_is_torchs_own(skips, relu):
    norm = made(6, "cpu")
    x, skip = images((4, 6, 5, 5), "cpu"), images((4, 6, 5, 5), "cpu") if skips else None
    expected = outcome(norm, one_after_the_other, x, skip, relu)
    for here, there in zip(outcome(norm, normalised, x, skip, relu), expected, strict=True):
        torch.testing.assert_close(here, there, rtol=0, atol=0)


def test_a_fused_network_is_the_same_network():
    torch.manual_seed(0)
    plain = ResNet18()
    fused = copy.deepcopy(plain)
    fuse(fused)
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(fused(x), plain(x), rtol=0, atol=0)
    assert list(fused.state_dict()) == list(plain.state_dict())


@on_gpu
@pytest.mark.parametrize("shape", [(128, 64, 32, 32), (16, 512, 4, 4), (7, 96, 5, 3), (2, 3, 1, 1), (5, 33, 8, 8)])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("skips", [False, True])
def test_kernels_agree_with_torch(shape, skips, relu):
    """Also far from zero, and where blocks are not full."""
    norm = made(shape[1], "cuda")
    x, skip = images(shape, "cuda", mean=50.0), images(shape, "cuda") if skips else None
    double = [None if tensor is None else tensor.double() for tensor in (x, skip)]
    expected = outcome(copy.deepcopy(norm).double(), one_after_the_other, *double, relu)
    for here, there in zip(outcome(norm, normalised, x, skip, relu), expected, strict=True):
        # Where something is zero but for rounding it may or may not pass the ReLU.
        assert float((here - there).norm()) <= 2e-3 * float(there.norm()) + 1e-3


@on_gpu
def test_kernels_are_used_and_repeat_themselves():
    norm, x = made(64, "cuda"), images((32, 64, 16, 16), "cuda")
    out = normalised(norm, x.requires_grad_(), x.detach())
    assert "Normalised" in type(out.grad_fn).__name__
    first, second = (outcome(norm, normalised, x.detach(), x.detach(), relu=True) for _ in range(2))
    for here, there in zip(first, second, strict=True):
        torch.testing.assert_close(here, there, rtol=0, atol=0)


@on_gpu
def test_kernels_in_bfloat16_are_no_less_exact_than_torch():
    norm = made(64, "cuda")
    x, skip = (images((16, 64, 8, 8), "cuda", torch.bfloat16) for _ in range(2))
    exact = outcome(copy.deepcopy(norm).double(), one_after_the_other, x.double(), skip.double(), relu=True)
    torchs = outcome(norm, one_after_the_other, x, skip, relu=True)
    for here, there, right in zip(outcome(norm, normalised, x, skip, relu=True), torchs, exact, strict=True):
        assert here.dtype == there.dtype
        assert float((here - right).norm()) <= 1.05 * float((there - right).norm()) + 1e-5 * float(right.norm())


@on_gpu
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_a_number_stays_so(value):
    """Else nobody would notice that a run has diverged."""
    norm, x = made(8, "cuda"), images((4, 8, 5, 5), "cuda")
    x[0, 3, 2] = value
    out = normalised(norm, x, None, relu=True)
    assert out[:, 3].isnan().all()
    assert norm.running_var[3].isnan()
    assert out[:, [0, 1, 2, 4, 5, 6, 7]].isfinite().all()


@on_gpu
@pytest.mark.parametrize("unlike", ["layout", "dtype", "evaluation", "no statistics", "skip"])
def test_what_the_kernels_cannot_take_is_left_to_torch(unlike):
    norm, x, skip = made(8, "cuda"), images((4, 8, 5, 5), "cuda"), None
    if unlike == "layout":
        x = x.contiguous()
    elif unlike == "dtype":
        norm, x = norm.double(), x.double()
    elif unlike == "evaluation":
        norm.eval()
    elif unlike == "skip":
        skip = x[:1].detach()
    else:
        norm = nn.BatchNorm2d(8, track_running_stats=False).cuda()
    out = normalised(norm, x.requires_grad_(), skip)
    assert "Normalised" not in type(out.grad_fn).__name__
