"""How one worker fares."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Metrics:
    """How this worker fares."""

    steps: int = 0
    exchanges: int = 0
    bytes_sent: int = 0
    idle_s: float = 0.0
    consensus: float = 0.0
    """Estimate of sqrt(mean_i ‖x_i − x̄‖²) from the newest exchange: of two workers at distance d."""
    peers_alive: int = 0
    lost: int = 0
    """Connections that broke."""
    refused: int = 0
    """Messages that were not finite or absurdly large."""
