"""Staging: copies between the device that trains and the host memory that travels.

On the CPU they are the same memory. On CUDA, unless NCCL sends tensors from the GPU itself, copies to and from host
memory run on a stream of their own, through pinned buffers that are allocated once. The communicating thread waits for
these copies, the training stream never does. The arithmetic of a method's background part runs on the training stream,
between two kernels of the training: that orders it with the optimizer's steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from gossamer.vectors import memory


class Staging:
    """Moves tensors of one worker to and from host memory."""

    def __init__(self, device: torch.device, nccl: bool = False) -> None:
        self.device = device
        self._cuda = device.type == "cuda"
        self._nccl = nccl
        self._nccl_channel: str | None = None
        self._buffers: dict[tuple[str, torch.Size, torch.dtype], Tensor] = {}
        if self._cuda:
            self._copy_stream = torch.cuda.Stream(device)
            self._training_stream = torch.cuda.current_stream(device)

    def note_training_stream(self) -> None:
        """Remember the current stream as the training's. Called by the training thread."""
        if self._cuda:
            self._training_stream = torch.cuda.current_stream(self.device)

    @contextlib.contextmanager
    def on_training_stream(self) -> Iterator[None]:
        """Queue the kernels of this block on the training stream. For other threads than the training's."""
        if self._cuda:
            with torch.cuda.stream(self._training_stream):
                yield
        else:
            yield

    def host_buffer(self, name: str, like: Tensor, length: int | None = None) -> Tensor:
        """Return the host buffer called ``name``, the same one every time: in the shape of ``like``, or a vector of
        ``length`` elements."""
        shape = like.shape if length is None else torch.Size([length])
        key = (name, shape, like.dtype)
        if key not in self._buffers:
            if self._cuda:
                self._buffers[key] = torch.empty(shape, dtype=like.dtype, pin_memory=True)
            elif length is None:
                self._buffers[key] = memory.zeros_like(like)
            else:
                self._buffers[key] = memory.zeros(length, like.dtype, like.device)
        return self._buffers[key]

    def to_host(self, tensor: Tensor, name: str) -> Tensor:
        """Return ``tensor`` in host memory: itself, or a copy in the buffer called ``name``."""
        if tensor.device.type != "cuda":
            return tensor
        buffer = self.host_buffer(name, tensor)
        self._copy_stream.wait_stream(self._training_stream)
        with torch.cuda.stream(self._copy_stream):
            buffer.copy_(tensor, non_blocking=True)
        self._copy_stream.record_event().synchronize()
        return buffer

    @contextlib.contextmanager
    def sending(self, channel: str, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield the tensors as they travel over ``channel``: in host memory, or on the GPU with NCCL."""
        if not self._uses_nccl(channel):
            yield tuple(self.to_host(tensor, f"{channel} {index}") for index, tensor in enumerate(tensors))
            return
        self._copy_stream.wait_stream(self._training_stream)
        with torch.cuda.stream(self._copy_stream):
            yield tensors
        self._copy_stream.record_event().synchronize()

    def _uses_nccl(self, channel: str) -> bool:
        """Return whether ``channel`` uses NCCL: only the first one that sends, since two of them could deadlock.

        The method decides which channel is the first, so it is the same one on all workers.
        """
        if self._nccl and self._nccl_channel is None:
            self._nccl_channel = channel
        return self._nccl and self._nccl_channel == channel

    def to_device(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` on the training device: itself, or a copy."""
        if not self._cuda:
            return tensor
        if tensor.device.type == "cuda":
            tensor.record_stream(self._training_stream)
            return tensor
        with torch.cuda.stream(self._copy_stream):
            copied = tensor.to(self.device, non_blocking=True)
        self._copy_stream.record_event().synchronize()
        # Allocated on one stream and used on another: its memory is free only once that one is through with it.
        copied.record_stream(self._training_stream)
        return copied
