"""ResNet-18 with batch norm, addition and ReLU in one, for captured CUDA graphs.

torch normalises, adds and takes the positive part one after the other, each time with a pass over the images. Kernels
of our own (``norm_kernels``) need fewer passes. Launched from Python they take longer than they save; a captured graph
launches them by itself.
"""

from __future__ import annotations

from types import MethodType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.tasks.resnet import Block, ResNet18


def fuse(model: nn.Module) -> None:
    """Let the networks and blocks of ``resnet`` in this model, if any, use kernels of our own."""
    for module in model.modules():
        if type(module) is Block:
            module.forward = MethodType(_block, module)  # type: ignore[method-assign]
        elif type(module) is ResNet18:
            module.forward = MethodType(_network, module)  # type: ignore[method-assign]


def _block(self: Block, x: Tensor) -> Tensor:
    inner = normalised(self.norm1, self.conv1(x))
    skip = x
    if len(self.shortcut):
        conv, norm = self.shortcut
        assert isinstance(norm, nn.BatchNorm2d)
        skip = normalised(norm, conv(x), relu=False)
    return normalised(self.norm2, self.conv2(inner), skip)


def _network(self: ResNet18, x: Tensor) -> Tensor:
    x = self.blocks(normalised(self.norm, self.stem(x)))
    logits: Tensor = self.head(x.mean((-2, -1)))
    return logits


def normalised(norm: nn.BatchNorm2d, x: Tensor, skip: Tensor | None = None, relu: bool = True) -> Tensor:
    """``relu(norm(x) + skip)``. UnsupportedModule torch's, the norm does not count its batches."""
    if _suits(norm, x, skip):
        from gossamer.tasks.norm_kernels import Normalised

        y: Tensor = Normalised.apply(
            x, skip, norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.momentum, norm.eps, relu
        )
        return y
    y = norm(x)
    if skip is not None:
        y = y + skip
    return F.relu(y) if relu else y


def _suits(norm: nn.BatchNorm2d, x: Tensor, skip: Tensor | None) -> bool:
    """With the usual settings, on a GPU, where every pixel's channels lie side by side."""
    own = (norm.weight, norm.bias, norm.running_mean, norm.running_var)
    return (
        norm.training
        and norm.momentum is not None
        and all(tensor is not None and tensor.dtype == torch.float32 for tensor in own)
        and x.is_cuda
        and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and x.is_contiguous(memory_format=torch.channels_last)
        and x.numel() > x.shape[1]
        and (skip is None or (skip.dtype, skip.shape, skip.stride()) == (x.dtype, x.shape, x.stride()))
    )
