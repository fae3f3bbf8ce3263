"""What the ranks of a replica agree on before each step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Turn:
    """What the ranks of a replica do next."""

    go: bool
    """Make one more step."""
    evaluate: bool = False
    checkpoint: int = 0
    """The newest checkpoint that was requested, by its number of steps."""
    stopping: bool = False
    """A rank was asked to stop."""
