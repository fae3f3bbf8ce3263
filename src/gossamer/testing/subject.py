"""The method under test: builds it for any topology, here and in other processes, with an optimizer that it accepts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property, reduce
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gossamer import optim
from gossamer.errors import InputError
from gossamer.methods import Method, locate
from gossamer.methods import build as build_method
from gossamer.methods.loading.method_source import check_class
from gossamer.settings import from_values
from gossamer.topology import Topology
from gossamer.topology import build as build_topology
from gossamer.user_file import execute, importable

Factory = Callable[[Topology], Method]
"""A function that builds the method for a topology."""

Tested = str | type[Method] | Factory
"""How a method is given: its name or file, its class, or a function that builds it."""


@dataclass(frozen=True)
class Origin:
    """Where a class or a function is defined, as plain data from which another process finds it."""

    module: str
    name: str
    file: str

    @classmethod
    def of(cls, defined: Any) -> Origin:
        module, name = defined.__module__, defined.__qualname__
        return cls(module, name, str(getattr(sys.modules.get(module), "__file__", None) or ""))

    @property
    def problem(self) -> str:
        """Why another process cannot find it; empty if it can."""
        if "<locals>" in self.name or "<lambda>" in self.name:
            return f"{self.name} is defined inside a function"
        if self.module == "__main__" and not self.file:
            return f"{self.name} is defined in an interactive session"
        return ""

    def load(self) -> Any:
        """Return what is defined there. Raise ``InputError`` if this process cannot import it."""
        try:
            if self.module != "__main__":
                return self._in(import_module(self.module))
        except ImportError:
            pass
        if not self.file:
            raise InputError(f"a new process cannot import {self.name} of {self.module}: define it in a Python file")
        path = Path(self.file)
        with importable(path.parent):
            return self._in(execute(path))

    def _in(self, module: Any) -> Any:
        return reduce(getattr, self.name.split("."), module)


class Subject:
    """A method with its settings."""

    def __init__(self, method: Tested, options: Mapping[str, Any]) -> None:
        self.options = dict(options)
        self._factory: Factory | None = None
        self._class: type[Method]
        if isinstance(method, Method):
            raise InputError(
                "check_method builds a method for several topologies: give its class and its options, or a function "
                "that returns it for a topology"
            )
        if isinstance(method, type):
            if not issubclass(method, Method):
                raise InputError(f"the method is the class {method.__name__}: expected a subclass of gossamer.Method")
            self._class = method
        elif isinstance(method, str):
            self._class = locate(method).method
        else:
            self._factory = method
            if options:
                raise InputError(f"{', '.join(options)} given besides a function that builds the method: set it there")
            return
        for option in options:
            known = self._class.Config.__dataclass_fields__
            if option not in known:
                raise InputError(f"{self.name} has no option {option!r}: expected some of {', '.join(known)}")
        if options:
            from_values(self._class.Config, options)  # raises if a value is out of bounds

    @property
    def name(self) -> str:
        if self._factory is not None:
            return self.build(*self.first_fit(("ring", 4), ("ring", 2), ("ring", 1))).name
        return getattr(self._class, "name", self._class.__name__)

    def check_class(self) -> None:
        """Raise ``MethodError`` if the class lacks what a method must declare."""
        if self._factory is None:
            check_class(self._class, "the method")

    # Another process

    @property
    def origin(self) -> Origin:
        return Origin.of(self._factory or self._class)

    def reference(self) -> dict[str, Any]:
        """Return plain data from which ``from_reference`` builds this subject in another process."""
        return {"origin": asdict(self.origin), "options": self.options}

    @classmethod
    def from_reference(cls, reference: Mapping[str, Any]) -> Subject:
        return cls(Origin(**reference["origin"]).load(), reference["options"])

    # Methods

    def build(self, graph: str, workers: int, seed: int = 0) -> Method:
        """Return the method for a topology. ``InputError`` if it cannot work on that one with its settings."""
        topology = build_topology(graph, workers=workers, seed=seed)
        if self._factory is not None:
            return self._factory(topology)
        return build_method(self._class, from_values(self._class.Config, self.options), topology)

    def fits(self, graph: str, workers: int) -> bool:
        try:
            self.build(graph, workers)
        except InputError:
            return False
        return True

    def first_fit(self, *candidates: tuple[str, int]) -> tuple[str, int]:
        """Return the first topology of these (name, workers) on which the method works."""
        for graph, workers in candidates:
            if self.fits(graph, workers):
                return graph, workers
        self.build(*candidates[0])  # raises what is wrong with it
        raise AssertionError

    def make_optimizer(
        self, parameters: Iterable[nn.Parameter], lr: float = 0.05, momentum: float = 0.9
    ) -> torch.optim.Optimizer:
        """Return an optimizer that the method accepts: its preferred one, or SGD if it may be."""
        kind, inertia = self._optimizer_kind
        return optim.make(kind, parameters, lr=lr, momentum=inertia * momentum, weight_decay=0.0, period=1)

    @property
    def uses_sgd(self) -> bool:
        return self._optimizer_kind[0] == "sgd"

    @cached_property
    def _optimizer_kind(self) -> tuple[str, bool]:
        """The name of an optimizer that the method accepts, and whether it may have momentum."""
        method = self.build(*self.first_fit(("ring", 4), ("ring", 2), ("ring", 1)))
        preferred = method.preferred_optimizer
        kinds = [(preferred, True)] if preferred else [("sgd", True), ("sgd", False), ("adam", False)]
        problems = []
        for kind, inertia in kinds:
            parameters = [nn.Parameter(torch.zeros(1, 1))]
            try:
                method.check_optimizer(
                    optim.make(kind, parameters, lr=0.1, momentum=0.9 * inertia, weight_decay=0.0, period=1)
                )
            except InputError as error:
                problems.append(error)
                continue
            return kind, inertia
        raise problems[0]
