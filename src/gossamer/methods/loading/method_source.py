"""Finds methods that are not built in: in the user's own Python file, or in an installed package.

A package offers methods by entry points of the group ``gossamer.methods``, whose names are those of the methods::

    [project.entry-points."gossamer.methods"]
    mine = "my_package.my_module:Mine"

They are loaded when they are used.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from gossamer.errors import InputError, MethodError, unknown
from gossamer.methods.loading.method_contract import check_declaration
from gossamer.methods.method import Method, MethodConfig
from gossamer.methods.quasi_global import AveragingConfig, QuasiGlobal
from gossamer.settings import field_types
from gossamer.topology import Topology
from gossamer.user_file import blame, blaming, describe, execute, importable, path_of

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "gossamer.methods"

NAME = re.compile(r"\w[\w.+-]*")
"""The name of a method: it is also that of a folder."""

OPTION_TYPES = (int, float, str, bool)


@dataclass(frozen=True)
class Source:
    """A method and where it comes from."""

    method: type[Method]
    name: str
    spec: str
    """What finds it again, in any process of this machine: its name, or the absolute ``path.py:Class``."""
    origin: str
    """The package or the file that it comes from."""


# Files


def is_file(spec: str) -> bool:
    """Return whether a method is given as a file: ``path.py``, or ``path.py:Class``."""
    return spec.endswith(".py") or ".py:" in spec


def from_file(spec: str) -> Source:
    """Return the method that a Python file defines. ``InputError`` if the file has none, or several and no name."""
    path, name = _split(spec)
    if not path.is_file():
        raise InputError(
            f"method file {path} does not exist: expected a Python file that defines a subclass of gossamer.Method"
        )
    try:
        source = path.read_bytes()
    except OSError as error:
        raise InputError(f"method file {path} cannot be read: {error.strerror}") from None
    module = _module(path, source)
    methods = {member.__name__: member for member in vars(module).values() if _is_defined_in(module, member)}
    if not name:
        method = _only(path, methods)
    elif name in vars(module):
        method = vars(module)[name]
    else:
        raise unknown(f"method in {path}", name, methods)
    check_class(method, f"{name} in {path}")
    return Source(method, method.name, f"{os.path.abspath(path)}:{name or method.__name__}", str(path))


def _split(spec: str) -> tuple[Path, str]:
    if spec.endswith(".py"):
        return Path(spec), ""
    path, _, name = spec.rpartition(":")
    return Path(path), name


# With the file's content: a file that has changed is loaded again, one that has not keeps its classes.
@lru_cache(maxsize=64)
def _module(path: Path, source: bytes) -> ModuleType:
    with blaming(path), importable(path.resolve().parent):
        return execute(path)


def _is_defined_in(module: ModuleType, member: Any) -> bool:
    return isinstance(member, type) and issubclass(member, Method) and member.__module__ == module.__name__


def _only(path: Path, methods: dict[str, type[Method]]) -> type[Method]:
    """Return the only method of a file; bases of it that have no name do not count."""
    if not methods:
        raise InputError(f"{path} defines no method: expected a subclass of gossamer.Method, and none that is imported")
    named = [method for method in methods.values() if hasattr(method, "name")] or list(methods.values())
    if len(named) > 1:
        names = ", ".join(method.__name__ for method in named)
        raise InputError(f"{path} defines several methods ({names}): name one of them, as {path}:{named[0].__name__}")
    return named[0]


# Installed packages


def plugins() -> dict[str, list[EntryPoint]]:
    """Return the entry points of installed packages by the name of the method, without loading them."""
    from importlib.metadata import entry_points

    by_name: dict[str, list[EntryPoint]] = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value)):
        by_name.setdefault(entry.name, []).append(entry)
    return by_name


@lru_cache(maxsize=64)
def from_package(name: str) -> Source | None:
    """Return the method called ``name`` of an installed package, None if there is none.

    ``InputError`` if the package does not work.
    """
    entries = plugins().get(name)
    if not entries:
        return None
    origins = " and ".join(package_of(entry) for entry in entries)
    if len(entries) > 1:
        raise InputError(f"method {name} is offered by {origins}: uninstall all of them but one")
    (entry,) = entries
    try:
        method = entry.load()
    except (Exception, SystemExit) as error:
        raise InputError(
            f"method {name} of {origins} cannot be loaded ({describe(error)}): update or uninstall the package"
        ) from error
    check_class(method, f"{entry.value} of {origins}")
    if method.name != name:
        raise InputError(
            f"{origins} offers a method as {name}, but {entry.value} is called {method.name}: "
            "the entry point needs the name of the method"
        )
    return Source(method, name, name, origins)


def package_of(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.module


# Checks


def check_class(method: Any, what: str) -> None:
    """Raise ``InputError`` if ``method`` is no class of a method whose options the command line can derive."""
    if not isinstance(method, type) or not issubclass(method, Method):
        kind = f"the class {method.__name__}" if isinstance(method, type) else f"a {type(method).__name__}"
        raise InputError(f"{what} is {kind}: expected a subclass of gossamer.Method")
    name = getattr(method, "name", None)
    if not isinstance(name, str) or not NAME.fullmatch(name):
        given = "no name" if name is None else f"the name {name!r}"
        raise MethodError(f'method {method.__name__} has {given}: give its class one, such as name = "mine"')
    check_declaration(method)
    for problem in _config_problems(method.Config):
        raise MethodError(f"Config of method {name} {problem}")


def _config_problems(config: Any) -> Iterator[str]:
    if not isinstance(config, type) or not issubclass(config, MethodConfig):
        yield f"is {config!r}: expected a subclass of gossamer.MethodConfig"
        return
    if "__dataclass_fields__" not in vars(config) and vars(config).get("__annotations__"):
        yield "is not a dataclass: decorate it with @dataclass(frozen=True, kw_only=True)"
        return
    try:
        types = field_types(config)
    except NameError as error:
        yield f"has a type that does not exist: {error}"
        return
    for field in dataclasses.fields(config):
        if types[field.name] not in OPTION_TYPES:
            yield f"has an option {field.name} of type {field.type}: expected int, float, str or bool"
        if field.default is dataclasses.MISSING:
            yield f'has an option {field.name} without a default: declare it as option(1.0, "what it is")'


def build(method: type[Method], config: MethodConfig, topology: Topology) -> Method:
    """Return a method with these settings, which declares what the worlds need to know."""
    try:
        built = method(config, topology)
    except InputError:
        raise
    except Exception as error:
        path = path_of(method)
        if path is None:
            raise
        raise blame(path, error) from error
    check_declaration(built)
    if isinstance(config, AveragingConfig) and config.quasi_global > 0:
        return QuasiGlobal(built, config.quasi_global)
    return built


def check_ready(method: Method, workers: int | None, options: Iterable[str]) -> Topology:
    """Return the topology of a method that the user has built. ``InputError`` if that is not of so many workers.

    Its settings are those that it was built with: ``options`` are refused.
    """
    check_declaration(method)
    topology = getattr(method, "topology", None)
    if not isinstance(topology, Topology):
        raise MethodError(f"method {method.name} has no topology: call super().__init__(config, topology)")
    if workers not in (None, topology.workers):
        raise InputError(f"method {method.name} was built for {topology.workers} workers, but there are {workers}")
    for option in options:
        raise InputError(f"{option} is given besides a method that is built already: give it to the method's Config")
    return topology
