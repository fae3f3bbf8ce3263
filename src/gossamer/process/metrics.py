"""Counters of one worker, as ``Swarm.metrics`` returns them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Metrics:
    """Counters of one worker since it joined."""

    steps: int = 0
    """Optimizer steps."""
    repeated: int = 0
    """Steps that were made again: another worker died or came back in them, or this worker's weights were replaced."""
    dropped: int = 0
    """Those of them whose gradient was dropped: the step was made again with that of the next mini-batch."""
    discarded: int = 0
    """Steps that were in this worker's model and are in no model any more: it had nothing in common with others."""
    exchanges: int = 0
    """Pairwise exchanges and collectives that this worker took part in."""
    bytes_sent: int = 0
    """Bytes sent by this worker."""
    idle_s: float = 0.0
    """Seconds that training waited for other workers."""
    consensus: float = 0.0
    """Estimate of sqrt(mean_i ‖x_i − x̄‖²) from the newest exchange: ‖x_i − x_j‖/√2 of its two workers."""
    peers_alive: int = 0
    """Other workers that are alive."""
    lost: int = 0
    """Connections to neighbours that broke because the peer died or an exchange failed."""
    void_blocks: int = 0
    """Parts of messages that were encoded on the wire and could not be decoded: they had no effect."""
    refused: int = 0
    """Messages that were not finite or absurdly large."""
    refused_connections: int = 0
    """Connections that were refused: not from a process of the run, or not greeted in time."""
