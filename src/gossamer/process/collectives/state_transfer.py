"""How a member that is behind the others comes level with them: it takes over the state of one that is not.

A state is described by a header in JSON, then come its tensors: nothing is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

HEADER_LIMIT = 1 << 24


class State(Protocol):
    """What a member that is behind takes over."""

    def position(self, channel: str) -> int:
        """How far this worker is, as the thread that uses ``channel`` sees it; −1 if it is new."""

    def portable(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything that is taken over: tensors in host memory, and facts that JSON can hold."""

    def take(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Go on from these."""

    def on_membership_change(self) -> None:
        """There is a new generation: drop what was under way in the old one."""


def level(group: Any, finish: Callable[[dist.Work], None], state: State, source: int, behind: bool) -> None:
    """Send the state of the member at ``source`` to those that are behind."""

    def broadcast(tensor: Tensor) -> Tensor:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        finish(group.broadcast([tensor], options))
        return tensor

    leads = group.rank() == source
    tensors, facts = state.portable() if leads else ({}, {})
    header = _header(tensors, facts)
    length = int(broadcast(torch.tensor([len(header)])))
    if length > HEADER_LIMIT:
        raise RuntimeError(f"a state's description of {length} bytes is too long")
    text = torch.frombuffer(bytearray(header), dtype=torch.uint8) if leads else torch.empty(length, dtype=torch.uint8)
    described = json.loads(bytes(broadcast(text).tolist()))
    for name, (shape, dtype) in described["tensors"].items():
        tensors[name] = broadcast(tensors[name] if leads else torch.empty(shape, dtype=getattr(torch, dtype)))
    if behind:
        state.take(tensors, described["facts"])


def _header(tensors: dict[str, Tensor], facts: dict[str, Any]) -> bytes:
    layout = {name: (list(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in tensors.items()}
    return json.dumps({"tensors": layout, "facts": facts}).encode()
