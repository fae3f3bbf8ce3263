"""Between the device that trains and the memory that travels.

On the CPU they are the same. On CUDA, unless NCCL takes tensors from where they lie, copies to and from host memory run
on a stream of their own, through pinned buffers that are made once; whoever communicates waits for them, the training
stream never does. The arithmetic of a method's background part is queued on the training stream, between two kernels of
the training: that orders it with the optimizer's steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from gossamer import memory


class Staging:
    """The way of tensors to and from host memory."""

    def __init__(self, device: torch.device, nccl: bool = False) -> None:
        self.device = device
        self._cuda = device.type == "cuda"
        self._nccl = nccl
        self._nccl_channel: str | None = None
        self._buffers: dict[tuple[str, torch.Size, torch.dtype], Tensor] = {}
        if self._cuda:
            self._copies = torch.cuda.Stream(device)
            self._training = torch.cuda.current_stream(device)

    def training_here(self) -> None:
        """Note the stream that the training uses now; called by its thread."""
        if self._cuda:
            self._training = torch.cuda.current_stream(self.device)

    @contextlib.contextmanager
    def beside_training(self) -> Iterator[None]:
        """Queue what is computed inside behind what the training has queued so far; for other threads."""
        if self._cuda:
            with torch.cuda.stream(self._training):
                yield
        else:
            yield

    def host_buffer(self, name: str, like: Tensor) -> Tensor:
        """A buffer in host memory for what ``name`` says; the same one every time."""
        key = (name, like.shape, like.dtype)
        if key not in self._buffers:
            if self._cuda:
                self._buffers[key] = torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
            else:
                self._buffers[key] = memory.zeros_like(like)
        return self._buffers[key]

    def to_host(self, tensor: Tensor, name: str) -> Tensor:
        """``tensor`` in host memory: itself if it is there, else in the buffer of that name."""
        if tensor.device.type != "cuda":
            return tensor
        buffer = self.host_buffer(name, tensor)
        self._copies.wait_stream(self._training)
        with torch.cuda.stream(self._copies):
            buffer.copy_(tensor, non_blocking=True)
        self._copies.record_event().synchronize()
        return buffer

    @contextlib.contextmanager
    def sending(self, channel: str, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """The tensors as they travel from this thread, while they do: in host memory, or with NCCL where they lie."""
        if not self._with_nccl(channel):
            yield tuple(self.to_host(tensor, f"{channel} {at}") for at, tensor in enumerate(tensors))
            return
        self._copies.wait_stream(self._training)
        with torch.cuda.stream(self._copies):
            yield tensors
        self._copies.record_event().synchronize()

    def _with_nccl(self, channel: str) -> bool:
        """Only one thread uses NCCL, the first that sends: two that wait for a place on the GPU could deadlock.

        Which is the first is the method's doing, and so the same on all workers.
        """
        if self._nccl and self._nccl_channel is None:
            self._nccl_channel = channel
        return self._nccl and self._nccl_channel == channel

    def to_device(self, tensor: Tensor) -> Tensor:
        """``tensor`` on the device: itself if it is there."""
        if not self._cuda:
            return tensor
        if tensor.device.type == "cuda":
            tensor.record_stream(self._training)
            return tensor
        with torch.cuda.stream(self._copies):
            arrived = tensor.to(self.device, non_blocking=True)
        self._copies.record_event().synchronize()
        # Made on one stream and used on another: its memory is free only when that one is through with it.
        arrived.record_stream(self._training)
        return arrived
