"""A model's trainable parameters as one flat vector, and its buffers as another.

Tied weights occur once, frozen parameters not at all. Parameters keep their memory format: a parameter in
channels_last has that order in the vector. If there are several dtypes, the vector has the widest of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.errors import InputError

ALIGNMENT = 16
"""In bytes. Some GPU kernels (cuDNN's batch norm) require that a tensor starts at a multiple of it."""


@dataclass(frozen=True)
class Part:
    """Position, shape and strides of one tensor in the vector."""

    name: str
    start: int
    end: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def view(self, vector: Tensor) -> Tensor:
        """Return the tensor as a view of the vector's last dimension, in the vector's dtype."""
        # One call instead of three: slice, view and permute.
        assert vector.stride(-1) == 1 or vector.shape[-1] <= 1
        strides = vector.stride()[:-1] + self.strides
        return vector.as_strided(vector.shape[:-1] + self.shape, strides, vector.storage_offset() + self.start)


def usable(tensor: Tensor) -> bool:
    """Whether a model can use this tensor where it is in memory; otherwise it needs a copy."""
    return tensor.device.type == "cpu" or tensor.data_ptr() % ALIGNMENT == 0


def is_sharded(tensor: Tensor) -> bool:
    """Return whether this is a DTensor, of which this process holds a part."""
    return hasattr(tensor, "to_local")


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of a DTensor that this process holds, as a tensor that shares its memory; others as they are."""
    with torch.no_grad():
        local: Tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
        return local.detach()


def as_part_of(local: Tensor, whole: Tensor) -> Tensor:
    """Return ``local`` as this process's part of a DTensor that is laid out as ``whole``; itself if that is none."""
    if not is_sharded(whole):
        return local
    from torch.distributed.tensor import DTensor

    layout: Any = whole
    return DTensor.from_local(
        local, layout.device_mesh, layout.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


class Flat:
    """The layout of named tensors in one flat vector."""

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        self.parts: list[Part] = []
        end = 0
        for name, tensor in named:
            # Axes by decreasing stride: the order of a dense tensor in memory.
            memory_strides = tensor.stride()
            axes = sorted(range(tensor.dim()), key=lambda axis: (-memory_strides[axis], axis))
            strides, step = [0] * tensor.dim(), 1
            for axis in reversed(axes):
                strides[axis] = step
                step *= tensor.shape[axis]
            self.parts.append(Part(name, end, end + step, tuple(tensor.shape), tuple(strides), tensor.dtype))
            end += step
        self.size = end
        self.dtype = reduce(torch.promote_types, (part.dtype for part in self.parts), torch.bfloat16)
        if not self.parts:
            self.dtype = torch.get_default_dtype()

    @classmethod
    def of_parameters(cls, model: nn.Module) -> Flat:
        flat = cls((name, local_part(p)) for name, p in model.named_parameters() if p.requires_grad)
        if flat.size == 0:
            raise InputError(f"{type(model).__name__} has no trainable parameters: nothing to train")
        return flat

    @classmethod
    def of_buffers(cls, model: nn.Module) -> Flat:
        """Return the layout of the floating-point buffers of ``model``, such as batch norm's running statistics."""
        return cls((name, b) for name, b in model.named_buffers() if b.is_floating_point())

    def split(self, vector: Tensor) -> tuple[list[Part], list[Part]]:
        """Return the parts that a model can use as views of ``vector``, and those that need memory of their own."""
        viewed = {part.name for part in self.parts if part.dtype == self.dtype and usable(part.view(vector))}
        apart = [part for part in self.parts if part.name not in viewed]
        return [part for part in self.parts if part.name in viewed], apart

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """Return the named tensors as views of ``vector``; copies if their dtype differs or they are not usable."""
        views = ((part.name, part.view(vector).to(part.dtype)) for part in self.parts)
        return {name: view if usable(view) else view.clone() for name, view in views}

    def pack(self, named: dict[str, Tensor], out: Tensor) -> Tensor:
        for part in self.parts:
            part.view(out).copy_(local_part(named[part.name]))
        return out

    def unpack(self, vector: Tensor, named: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for part in self.parts:
                named[part.name].copy_(part.view(vector))
