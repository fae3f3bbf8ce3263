"""The methods, in one table by name.

To add a method, write one file in this folder and add one row here. The command line, the virtual cluster, the planner
and the tests that every method must pass find it in the table. No module here imports torch when it is imported: the
command line lists methods and their options without it.
"""

from __future__ import annotations

from gossamer.errors import unknown
from gossamer.methods.a2cid2 import A2CiD2
from gossamer.methods.allreduce import AllReduce
from gossamer.methods.diloco import DiLoCo
from gossamer.methods.divisible import Divisible
from gossamer.methods.gossip import Gossip
from gossamer.methods.lasgd import LASGD
from gossamer.methods.localsgd import LocalSGD
from gossamer.methods.method import Method, MethodConfig
from gossamer.methods.noloco import NoLoCo
from gossamer.methods.overlap import Overlap
from gossamer.methods.sgp import SGP

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (A2CiD2, Gossip, Overlap, LASGD, Divisible, AllReduce, LocalSGD, DiLoCo, NoLoCo, SGP)
}

__all__ = ["METHODS", "Method", "MethodConfig", "find"]


def find(name: str) -> type[Method]:
    """Return the method called ``name``. Raise an ``InputError`` that lists the table if there is none."""
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    return METHODS[name]
