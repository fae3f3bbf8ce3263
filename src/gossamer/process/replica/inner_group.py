"""The ranks of one replica as a group of their own."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from gossamer.errors import InputError


class InnerGroup:
    """The ranks of one replica, connected by a gloo group of their own: the user's groups are left alone."""

    def __init__(self, ranks: Sequence[int], shard: int, timeout_s: float) -> None:
        """``ranks``: those of the replica in the user's process group. ``shard``: the number of this one among them."""
        self.ranks, self.shard = list(ranks), shard
        self._group = None
        if len(self.ranks) > 1:
            timeout = timedelta(seconds=timeout_s)
            self._group = dist.new_group(self.ranks, timeout, "gloo", use_local_synchronization=True)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def gather(self, own: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks of the replica, in order. All must have the same shape and dtype."""
        if self._group is None:
            return [own]
        parts = [torch.empty_like(own) for _ in self.ranks]
        try:
            dist.all_gather(parts, own, group=self._group)
        except RuntimeError as error:
            cause = str(error).strip().splitlines()[0]
            raise InputError(
                f"a rank of this replica (ranks {self.ranks}) died or left, so the replica is gone and the other "
                f"replicas go on without it: restart the whole replica ({cause[:100]})"
            ) from None
        return parts

    def gather_bytes(self, message: bytes) -> list[bytes]:
        sizes = [int(size) for size in self.gather(torch.tensor([len(message)]))]
        padded = torch.zeros(max(1, *sizes), dtype=torch.uint8)
        if message:
            padded[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        return [part[:size].numpy().tobytes() for part, size in zip(self.gather(padded), sizes, strict=True)]
