"""Compressors: they average a vector over all workers with messages smaller than the vector."""

from __future__ import annotations

from dataclasses import fields
from importlib import import_module

from gossamer.compress.compressor import Averaging, Compressor, Part, add_parts, average_with_feedback, check_ratio
from gossamer.errors import unknown

__all__ = ["COMPRESSORS", "Averaging", "Compressor", "Part", "add_parts", "average_with_feedback", "make", "names"]

COMPRESSORS = {
    "topk": "gossamer.compress.topk.TopK",
    "randomblock": "gossamer.compress.randomblock.RandomBlock",
    "sign": "gossamer.compress.quantized.Sign",
    "int8": "gossamer.compress.quantized.Int8",
    "lowrank": "gossamer.compress.lowrank.LowRank",
    "none": "gossamer.compress.compressor.Dense",
}
"""The compressors by name. ``make`` loads the class: the command line needs the names, but not torch."""


def names() -> tuple[str, ...]:
    """Return the names that ``make`` accepts."""
    return tuple(COMPRESSORS)


def make(name: str, ratio: float) -> Compressor:
    """Return the compressor with this name.

    ``ratio`` is the size of the vector divided by the size of the message. It sets ``topk`` (in elements: with the
    indices the message is twice as long), ``randomblock`` and ``lowrank``. The others have a fixed ratio.

    Examples:
        >>> make("topk", ratio=128).size_bytes(num_elements=1_280)
        80
    """
    if name not in COMPRESSORS:
        raise unknown("compressor", name, COMPRESSORS)
    check_ratio(ratio)
    module, _, class_name = COMPRESSORS[name].rpartition(".")
    cls = getattr(import_module(module), class_name)
    takes_ratio = any(field.name == "ratio" for field in fields(cls))
    compressor: Compressor = cls(ratio) if takes_ratio else cls()
    return compressor
