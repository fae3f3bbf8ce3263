"""State transfer: a member that is behind the others takes over the state of one that is not.

A JSON header describes the state, then its tensors follow. Nothing is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol

import torch
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


def transfer_state(move: Callable[[Tensor], Tensor], state: TransferableState, sends: bool, takes: bool) -> None:
    """Move the state of the member that ``sends`` to the others; those that are to take it over ``takes``.

    ``move(tensor)`` sends the tensor, or receives one of the same shape and dtype into it, and returns it.
    """
    tensors, rest = state.export_state() if sends else ({}, {})
    header = _header(tensors, rest)
    length = int(move(torch.tensor([len(header)])))
    if not 0 < length <= MAX_HEADER_BYTES:
        raise RuntimeError(f"the header of a state has {length} bytes: expected at most {MAX_HEADER_BYTES}")
    text = torch.frombuffer(bytearray(header), dtype=torch.uint8) if sends else torch.empty(length, dtype=torch.uint8)
    layout = json.loads(bytes(move(text).tolist()))
    for name, (shape, dtype) in layout["tensors"].items():
        tensor = tensors[name] if sends else torch.empty(shape, dtype=getattr(torch, dtype))
        tensors[name] = move(tensor) if tensor.numel() else tensor
    if takes:
        state.import_state(tensors, layout["rest"])


def _header(tensors: dict[str, Tensor], rest: dict[str, Any]) -> bytes:
    layout = {name: (list(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in tensors.items()}
    return json.dumps({"tensors": layout, "rest": rest}).encode()
