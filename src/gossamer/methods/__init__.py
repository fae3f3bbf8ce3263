"""The methods, in one table by name.

To add a method, write one file in this folder and add one row here. The command line, the virtual cluster, the planner
and the tests that every method must pass find it in the table. No module here imports torch when it is imported: the
command line lists methods and their options without it.
"""

from __future__ import annotations

from gossamer.errors import unknown
from gossamer.methods.a2cid2 import A2CiD2
from gossamer.methods.allreduce import AllReduce
from gossamer.methods.contract import check_declaration
from gossamer.methods.divisible import Divisible
from gossamer.methods.gossip import Gossip
from gossamer.methods.lasgd import LASGD
from gossamer.methods.localsgd import LocalSGD
from gossamer.methods.method import Method, MethodConfig
from gossamer.methods.overlap import Overlap
from gossamer.methods.quasi_global import AveragingConfig, QuasiGlobal
from gossamer.topology import Topology

METHODS: dict[str, type[Method]] = {
    method.name: method for method in (A2CiD2, Gossip, Overlap, LASGD, Divisible, AllReduce, LocalSGD)
}

__all__ = ["METHODS", "Method", "MethodConfig", "build", "find"]


def find(name: str) -> type[Method]:
    """Return the method called ``name``. Raise an ``InputError`` that lists the table if there is none."""
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    return METHODS[name]


def build(method_class: type[Method], config: MethodConfig, topology: Topology) -> Method:
    """Return the method with these settings. Raise ``MethodError`` if it does not declare what the worlds need."""
    method = method_class(config, topology)
    check_declaration(method)
    if isinstance(config, AveragingConfig) and config.quasi_global > 0:
        return QuasiGlobal(method, config.quasi_global)
    return method
