"""What travels: the content of an effect that communicates, its size, and whether the contents of two workers fit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gossamer.effects import Gather, Mean, Shift, Swap
from gossamer.errors import MethodError
from gossamer.virtual.compute.rows import Row, Temporary
from gossamer.virtual.compute.tensor_like import TensorLike

Collective = Mean | Gather | Shift

SCALAR_BYTES = 8


def size_bytes(effect: Collective | Swap) -> int:
    """Return how many bytes one worker sends to one other."""
    if isinstance(effect, Gather):
        return sum(tensor.nbytes for tensor in effect.tensors)
    return effect.vector.nbytes + SCALAR_BYTES * len(effect.scalars)


def signature(effect: Collective | Swap) -> tuple[Any, ...]:
    """Return what has to be equal on all workers: lengths and dtypes, and the number of scalars."""
    if isinstance(effect, Gather):
        return tuple((tuple(tensor.shape), tensor.dtype) for tensor in effect.tensors)
    return len(effect.vector), effect.vector.dtype, len(effect.scalars)


def content_text(effect: Collective | Swap) -> str:
    """Describe the content: ``12 float32 and 1 scalar``."""
    if isinstance(effect, Gather):
        return " and ".join(_vector_text(tensor) for tensor in effect.tensors) or "nothing"
    count = len(effect.scalars)
    return _vector_text(effect.vector) + (f" and {count} scalar{'s' if count > 1 else ''}" if count else "")


def _vector_text(tensor: Any) -> str:
    return f"{'x'.join(map(str, tensor.shape)) or '1'} {str(tensor.dtype).removeprefix('torch.')}"


def text(effect: Collective | Swap) -> str:
    """Name the effect: ``Mean 'model' round 5``."""
    if isinstance(effect, Swap):
        return f"Swap with worker {effect.peer}"
    group = "" if isinstance(effect, Shift) or effect.group is None else f" of workers {_listed(effect.group)}"
    return f"{type(effect).__name__} {effect.topic!r} round {effect.round}{group}"


def _listed(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]}, {ranks[1]}, … {ranks[-1]}"


def check_content(method: str, part: str, rank: int, effect: Collective | Swap, device: torch.device) -> None:
    """Raise ``MethodError`` if an effect has something else than vectors on the worker's device."""
    if isinstance(effect, Gather):
        vectors: tuple[Any, ...] = effect.tensors
    elif type(effect.vector) in (Row, Temporary):
        return
    else:
        vectors = (effect.vector,)
    where = f"{part} of method {method} on worker {rank} yielded {type(effect).__name__} of"
    for vector in vectors:
        if not isinstance(vector, (Tensor, TensorLike)):
            raise MethodError(f"{where} {type(vector).__name__}: expected a tensor")
        like = vector.memory() if isinstance(vector, TensorLike) else vector
        if like.dim() != 1 and not isinstance(effect, Gather):
            shape = tuple(like.shape)
            raise MethodError(f"{where} a tensor of shape {shape}: expected a vector; use view(-1)")
        # A device without an index is the current one.
        if like.device.type != device.type or (device.index is not None and like.device.index != device.index):
            raise MethodError(f"{where} a tensor on {like.device}: expected one on the worker's device, {device}")


def check_fits(method: str, one: int, sent: Collective | Swap, other: int, theirs: Collective | Swap) -> None:
    """Raise ``MethodError`` if two workers of one communication do not send the same lengths and dtypes."""
    if signature(sent) != signature(theirs):
        raise MethodError(
            f"method {method}: worker {one} sends {content_text(sent)} in {text(sent)}, worker {other} sends "
            f"{content_text(theirs)}: both must send the same lengths and dtypes"
        )
