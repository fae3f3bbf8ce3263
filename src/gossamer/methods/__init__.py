"""The methods, in one table by name; those of the user's own files and of installed packages are found as well.

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
from gossamer.methods.loading.method_contract import check_declaration
from gossamer.methods.loading.method_source import Source, build, check_class, from_file, from_package, is_file, plugins
from gossamer.methods.localsgd import LocalSGD
from gossamer.methods.method import Method, MethodConfig
from gossamer.methods.noloco import NoLoCo
from gossamer.methods.overlap import Overlap
from gossamer.methods.sgp import SGP

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (A2CiD2, Gossip, Overlap, LASGD, Divisible, AllReduce, LocalSGD, DiLoCo, NoLoCo, SGP)
}

BUILT_IN = "gossamer"
"""Where the methods of the table come from."""

AnyMethod = str | type[Method] | Method
"""How a program gives a method: its name or file, its class, or the method itself."""

__all__ = ["BUILT_IN", "METHODS", "AnyMethod", "Method", "MethodConfig", "Source", "build", "find", "locate"]


def find(method: AnyMethod) -> type[Method]:
    """Return the class of a method. ``InputError`` if there is none, with the names that there are."""
    return locate(method).method


def locate(method: AnyMethod) -> Source:
    """Return the class of a method, and where it comes from.

    Args:
        method: A name of the table or of a method in an installed package, ``path.py``, ``path.py:Class``, a class, or
            a method.
    """
    if isinstance(method, Method):
        check_declaration(method)
        return Source(type(method), method.name, method.name, type(method).__module__)
    if not isinstance(method, str):
        check_class(method, "the method")
        return Source(method, method.name, method.name, method.__module__)
    if method in METHODS:
        return Source(METHODS[method], method, method, BUILT_IN)
    if is_file(method):
        return from_file(method)
    source = from_package(method)
    if source is None:
        raise unknown("method", method, (*METHODS, *plugins(), "path/to/your_method.py"))
    return source
