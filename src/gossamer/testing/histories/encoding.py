"""Messages as the bytes that travel between real workers."""

from __future__ import annotations

from gossamer.process.liveness.records import Message, from_bytes, to_bytes
from gossamer.process.views import messages
from gossamer.process.views.messages import ViewMessage


def encoded(message: Message | ViewMessage) -> bytes:
    return messages.to_bytes(message) if isinstance(message, ViewMessage) else to_bytes(*message)


def travelled(message: Message | ViewMessage, workers: int) -> Message | ViewMessage:
    """Return the message as it arrives."""
    parsed: Message | ViewMessage | None
    if isinstance(message, ViewMessage):
        parsed = messages.from_bytes(encoded(message), workers)
    else:
        parsed = from_bytes(encoded(message), workers)
    assert parsed is not None
    return parsed
