"""Codecs: vectors that workers exchange or average travel in fewer bytes per number.

| name | bytes per number | what travels |
|---|---|---|
| ``float32`` | 4 | the numbers as they are: no codec |
| ``bfloat16`` | 2 | bfloat16 at the first exchange of two workers; then the 16 bits in which they may differ |
| ``int8`` | 1 | the 8 bits in which two workers may differ, given how far apart they were of late |

Rounding is stochastic, so it is right on average. Both ends of a message know what the receiver decodes from it, and
both use these decoded values, never the sender's original. So what rounding loses stays with the sender, and the mean
of all workers does not move.

``Link`` is one end of a connection between two workers, ``MeanLink`` one member's part in the means over a group. Both
worlds use them; nothing here knows how bytes travel. ``exchange`` and ``average`` do the same for workers that are all
in one process.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gossamer.errors import InputError, unknown

if TYPE_CHECKING:
    from gossamer.wire.codec import Codec
    from gossamer.wire.in_process import average, exchange
    from gossamer.wire.link import Link, Links
    from gossamer.wire.mean import MeanLink

__all__ = [
    "CODECS",
    "Codec",
    "Link",
    "Links",
    "MeanLink",
    "average",
    "exchange",
    "exchange_bytes",
    "find",
    "mean_bytes",
    "names",
]

CODECS = {
    "float32": None,
    "bfloat16": "gossamer.wire.bfloat16.BFloat16",
    "int8": "gossamer.wire.int8.Int8",
}
"""The codecs by name. ``find`` loads the class: the command line needs the names, but not torch."""

_EXPORTS = {
    "Codec": "gossamer.wire.codec",
    "Link": "gossamer.wire.link",
    "Links": "gossamer.wire.link",
    "MeanLink": "gossamer.wire.mean",
    "average": "gossamer.wire.in_process",
    "exchange": "gossamer.wire.in_process",
}


_PARTS = ("name", "block", "headroom", "size_bytes", "first_reach", "encode", "decode")


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def names() -> tuple[str, ...]:
    """Return the names that ``find`` accepts."""
    return tuple(CODECS)


def find(codec: str | Codec) -> Codec | None:
    """Return the codec with this name, or ``codec`` itself if it is one; ``None`` for ``float32``: nothing to encode.

    Examples:
        >>> find("int8").size_bytes(num_elements=1_000_000)
        1004885
    """
    if not isinstance(codec, str):
        missing = [name for name in _PARTS if not hasattr(codec, name)]
        if missing:
            raise InputError(
                f"wire codec {codec!r} has no {', '.join(missing)}: expected one of {', '.join(CODECS)}, or an object "
                "with all that gossamer.wire.Codec has"
            )
        return codec
    if codec not in CODECS:
        raise unknown("wire codec", codec, CODECS)
    path = CODECS[codec]
    if path is None:
        return None
    module, _, class_name = path.rpartition(".")
    found: Codec = getattr(import_module(module), class_name)()
    return found


def exchange_bytes(codec: Codec | None, num_elements: int, itemsize: int = 4) -> int:
    """Return the bytes that each of two workers sends in one exchange of vectors."""
    if codec is None:
        return num_elements * itemsize
    from gossamer.wire.link import message_bytes, verdict_bytes

    return message_bytes(codec, num_elements) + verdict_bytes(codec, num_elements)


def mean_bytes(codec: Codec | None, num_elements: int, size: int, itemsize: int = 4) -> int:
    """Return the bytes that each of ``size`` workers sends in one mean of vectors."""
    if codec is None:
        return round(2 * (size - 1) / size * num_elements * itemsize)
    from gossamer.wire.mean import gather_bytes, scatter_bytes

    return (size - 1) * (scatter_bytes(codec, num_elements, size) + gather_bytes(codec, num_elements, size))
