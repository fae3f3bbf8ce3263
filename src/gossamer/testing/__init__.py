"""Checks of methods: ``check_method(MyMethod)`` says in words which rule of its contract a method does not keep.

Each check has a name and a rule, in one sentence (``CHECKS``). They run in the virtual cluster, in a world that answers
in any order (``any_order``), and with real processes. What a method gives up by design it declares in
``Method.gives_up``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gossamer.testing.check import check_method
    from gossamer.testing.checks.table import CHECKS, INVARIANTS, Check
    from gossamer.testing.report import CheckResult, MethodCheckError, MethodReport

__all__ = ["CHECKS", "INVARIANTS", "Check", "CheckResult", "MethodCheckError", "MethodReport", "check_method"]

_EXPORTS = {
    "gossamer.testing.check": ("check_method",),
    "gossamer.testing.checks.table": ("CHECKS", "INVARIANTS", "Check"),
    "gossamer.testing.report": ("CheckResult", "MethodCheckError", "MethodReport"),
}
_MODULES = {name: module for module, names in _EXPORTS.items() for name in names}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used: ``gossamer.testing.histories`` needs neither torch nor numpy."""
    if name not in _MODULES:
        raise AttributeError(f"module 'gossamer.testing' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
