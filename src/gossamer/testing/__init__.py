"""Checks of methods: ``check_method(MyMethod)`` says in words which rule of its contract a method does not keep.

Each check has a name and a rule, in one sentence (``CHECKS``). They run in the virtual cluster, in a world that answers
in any order (``any_order``), and with real processes. What a method gives up by design it declares in
``Method.gives_up``.
"""

from __future__ import annotations

from gossamer.testing.check import check_method
from gossamer.testing.checks.table import CHECKS, INVARIANTS, Check
from gossamer.testing.report import CheckResult, MethodCheckError, MethodReport

__all__ = ["CHECKS", "INVARIANTS", "Check", "CheckResult", "MethodCheckError", "MethodReport", "check_method"]
