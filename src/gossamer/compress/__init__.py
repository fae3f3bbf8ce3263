"""Compressors: averaging a vector over all workers with messages smaller than the vector."""

from gossamer.compress.compressor import Averaging, Compressor
from gossamer.compress.feedback import average_with_feedback
from gossamer.compress.int8 import Int8
from gossamer.compress.lowrank import LowRank
from gossamer.compress.none import Dense
from gossamer.compress.randomblock import RandomBlock
from gossamer.compress.sign import Sign
from gossamer.compress.table import COMPRESSORS, describe, make, names
from gossamer.compress.topk import TopK

__all__ = [
    "COMPRESSORS",
    "Averaging",
    "Compressor",
    "Dense",
    "Int8",
    "LowRank",
    "RandomBlock",
    "Sign",
    "TopK",
    "average_with_feedback",
    "describe",
    "make",
    "names",
]
