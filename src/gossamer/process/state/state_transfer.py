"""State transfer: a member that is behind the others takes over the state of one that is not.

A JSON header describes the state, then its tensors follow. Nothing is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from gossamer.process.roster.roster import KnownRoster, Roster
from gossamer.process.state.lineage import Lineage

MAX_HEADER_BYTES = 1 << 24


class TransferableState(Protocol):
    """What a member that is behind takes over."""

    def position(self, channel: str) -> int:
        """Return the step of this worker, as the thread that uses ``channel`` sees it; −1 if it has no state yet."""

    roster: KnownRoster
    """Who belongs to the run, as far as this worker knows."""
    lineage: Lineage | None
    """Which steps are in the model, if all members are in lockstep."""

    @property
    def lockstep(self) -> bool:
        """Whether all members make the same steps, so that models that were trained separately must be merged."""

    def checksum(self) -> float:
        """Return a number that tells different weights apart."""

    def on_merge(self, text: str) -> None:
        """The models of workers that trained separately were averaged."""

    def on_discard(self, steps: int, text: str) -> None:
        """Models of some members had nothing in common with the others and are gone; ``steps``: of this worker."""

    def export_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the whole state: tensors in host memory, and the rest as JSON data."""

    def import_state(self, tensors: dict[str, Tensor], rest: dict[str, Any]) -> None:
        """Continue from this state."""

    def on_membership_change(self, roster: Roster | None = None) -> None:
        """Drop what is in flight: a new generation has begun. ``roster``: which all members follow from now on."""


def transfer_state(move: Callable[[Tensor], Tensor], state: TransferableState, sends: bool, takes: bool) -> None:
    """Move the state of the member that ``sends`` to the others; those that are to take it over ``takes``.

    ``move(tensor)`` sends the tensor, or receives one of the same shape and dtype into it, and returns it.
    """
    tensors, rest = move_state(move, state.export_state() if sends else None)
    if takes:
        state.import_state(tensors, rest)


def move_state(
    move: Callable[[Tensor], Tensor], exported: tuple[dict[str, Tensor], dict[str, Any]] | None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the state that was moved. ``exported``: that of the member that sends it; ``None`` on the others."""
    sends = exported is not None
    tensors, rest = exported or ({}, {})
    header = _header(tensors, rest)
    length = int(move(torch.tensor([len(header)])))
    if not 0 < length <= MAX_HEADER_BYTES:
        raise RuntimeError(f"the header of a state has {length} bytes: expected at most {MAX_HEADER_BYTES}")
    text = torch.frombuffer(bytearray(header), dtype=torch.uint8) if sends else torch.empty(length, dtype=torch.uint8)
    layout = json.loads(bytes(move(text).tolist()))
    for name, (shape, dtype) in layout["tensors"].items():
        tensor = tensors[name] if sends else torch.empty(shape, dtype=getattr(torch, dtype))
        tensors[name] = move(tensor) if tensor.numel() else tensor
    return tensors, layout["rest"]


def _header(tensors: dict[str, Tensor], rest: dict[str, Any]) -> bytes:
    layout = {name: (list(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in tensors.items()}
    return json.dumps({"tensors": layout, "rest": rest}).encode()
