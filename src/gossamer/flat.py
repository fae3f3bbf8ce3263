"""A model's trainable parameters as one flat vector, and its buffers as another.

Tied weights are there once, frozen parameters not at all. Parameters keep their memory format: one in channels_last
lies in the vector in channels_last order. Several dtypes share one vector of the widest of them. Each tensor begins at
a multiple of 16 bytes, since some of a GPU's kernels (cuDNN's batch norm) take that for granted: what lies between two
of them is zero, stays zero, and is nobody's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor, nn

from gossamer.errors import InputError

ALIGNMENT = 16
"""Bytes."""


@dataclass(frozen=True)
class Part:
    """Where one tensor lies in the vector, and how to see it there."""

    name: str
    start: int
    end: int
    laid_out: tuple[int, ...]
    """Its shape in the order in which it lies in memory."""
    order: tuple[int, ...]
    """The permutation that brings ``laid_out`` to its own shape."""
    dtype: torch.dtype

    def view(self, vector: Tensor) -> Tensor:
        """This tensor as a view of the vector's last dimension, in the vector's dtype."""
        piece = vector[..., self.start : self.end]
        lead = piece.dim() - 1
        piece = piece.reshape(piece.shape[:-1] + self.laid_out)
        return piece.permute((*range(lead), *(lead + axis for axis in self.order)))


def aligned(length: int, dtype: torch.dtype) -> int:
    """So many elements or a few more, up to the next that begins at a multiple of 16 bytes."""
    unit = max(1, ALIGNMENT // dtype.itemsize)
    return -(-length // unit) * unit


class Flat:
    """The layout of named tensors in one flat vector."""

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        self.parts: list[Part] = []
        tensors = list(named)
        self.dtype = reduce(torch.promote_types, (tensor.dtype for _, tensor in tensors), torch.bfloat16)
        if not tensors:
            self.dtype = torch.get_default_dtype()
        self.size = 0
        for name, tensor in tensors:
            # Axes by falling stride: the order in which a dense tensor lies in memory.
            strides = tensor.stride()
            axes = sorted(range(tensor.dim()), key=lambda axis: (-strides[axis], axis))
            laid_out = tuple(tensor.shape[axis] for axis in axes)
            order = tuple(axes.index(axis) for axis in range(tensor.dim()))
            start = aligned(self.size, self.dtype)
            self.size = start + tensor.numel()
            self.parts.append(Part(name, start, self.size, laid_out, order, tensor.dtype))

    @classmethod
    def of_parameters(cls, model: nn.Module) -> Flat:
        """The layout of what ``model`` trains."""
        flat = cls((name, p.detach()) for name, p in model.named_parameters() if p.requires_grad)
        if flat.size == 0:
            raise InputError(f"{type(model).__name__} has no trainable parameters: nothing to train")
        return flat

    @classmethod
    def of_buffers(cls, model: nn.Module) -> Flat:
        """The layout of the floating-point buffers of ``model``, such as batch norm's running statistics."""
        return cls((name, b) for name, b in model.named_buffers() if b.is_floating_point())

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """The named tensors as views of ``vector`` (copies where their dtype differs)."""
        return {part.name: part.view(vector).to(part.dtype) for part in self.parts}

    def pack(self, named: dict[str, Tensor], out: Tensor) -> Tensor:
        """Write named tensors into ``out``, which is zero between them."""
        for part in self.parts:
            part.view(out).copy_(named[part.name].detach())
        return out

    def unpack(self, vector: Tensor, named: dict[str, Tensor]) -> None:
        """Write ``vector`` into named tensors."""
        with torch.no_grad():
            for part in self.parts:
                named[part.name].copy_(part.view(vector))
