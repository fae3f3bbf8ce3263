"""Batch norm together with what follows it in a residual network.

torch normalises, adds and takes the positive part one after the other, each time with a pass over the images. Kernels
of our own (``norm_kernels``) need fewer. Launched from Python they take longer than they save; a captured CUDA graph
launches them by itself. Whoever captures one says so: ``fused``.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from contextvars import ContextVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_fused: ContextVar[bool] = ContextVar("fused", default=False)


@contextlib.contextmanager
def fused() -> Iterator[None]:
    """Let batch norms use kernels of our own, where they can."""
    before = _fused.set(importlib.util.find_spec("triton") is not None)
    try:
        yield
    finally:
        _fused.reset(before)


class BatchNorm2d(nn.BatchNorm2d):
    """torch's, and more at once."""

    def forward(self, input: Tensor, skip: Tensor | None = None, relu: bool = False) -> Tensor:
        """``input`` normalised, plus ``skip``; of that the positive part if ``relu``."""
        if _fused.get() and self._can_be_fused(input, skip):
            from gossamer.tasks.norm_kernels import Normalised

            output: Tensor = Normalised.apply(
                input, skip, self.weight, self.bias, self.running_mean, self.running_var, self.momentum, self.eps, relu
            )
            return output
        output = super().forward(input)
        if skip is not None:
            output = output + skip
        return F.relu(output) if relu else output

    def _can_be_fused(self, input: Tensor, skip: Tensor | None) -> bool:
        """With the usual settings, on a GPU, where every pixel's channels lie side by side."""
        own = (self.weight, self.bias, self.running_mean, self.running_var)
        return (
            self.training
            and self.momentum is not None
            and all(tensor is not None and tensor.dtype == torch.float32 for tensor in own)
            and input.is_cuda
            and input.dtype in (torch.float32, torch.bfloat16, torch.float16)
            and input.is_contiguous(memory_format=torch.channels_last)
            and input.numel() > input.shape[1]
            and (skip is None or (skip.dtype == input.dtype and skip.stride() == input.stride()))
        )
