"""State transfer: a member that is behind the others takes over the state of one that is not.

A JSON header describes the state, then its tensors follow. Nothing is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

MAX_HEADER_BYTES = 1 << 24


class TransferableState(Protocol):
    """What a member that is behind takes over."""

    def position(self, channel: str) -> int:
        """Return the step of this worker, as the thread that uses ``channel`` sees it; −1 if it has no state yet."""

    def export_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the whole state: tensors in host memory, and the rest as JSON data."""

    def import_state(self, tensors: dict[str, Tensor], rest: dict[str, Any]) -> None:
        """Continue from this state."""

    def on_membership_change(self) -> None:
        """Drop what is in flight: a new generation has begun."""


def transfer_state(
    group: Any, wait: Callable[[dist.Work], None], state: TransferableState, source: int, behind: bool
) -> None:
    """Broadcast the state of member ``source``; members that are ``behind`` take it over."""

    def broadcast(tensor: Tensor) -> Tensor:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        wait(group.broadcast([tensor], options))
        return tensor

    sends = group.rank() == source
    tensors, rest = state.export_state() if sends else ({}, {})
    header = _header(tensors, rest)
    length = int(broadcast(torch.tensor([len(header)])))
    if length > MAX_HEADER_BYTES:
        raise RuntimeError(f"the header of a state has {length} bytes, more than {MAX_HEADER_BYTES}")
    text = torch.frombuffer(bytearray(header), dtype=torch.uint8) if sends else torch.empty(length, dtype=torch.uint8)
    layout = json.loads(bytes(broadcast(text).tolist()))
    for name, (shape, dtype) in layout["tensors"].items():
        tensors[name] = broadcast(tensors[name] if sends else torch.empty(shape, dtype=getattr(torch, dtype)))
    if behind:
        state.import_state(tensors, layout["rest"])


def _header(tensors: dict[str, Tensor], rest: dict[str, Any]) -> bytes:
    layout = {name: (list(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in tensors.items()}
    return json.dumps({"tensors": layout, "rest": rest}).encode()
