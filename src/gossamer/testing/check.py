"""``check_method``: runs the checks of the table on a method."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

from gossamer.errors import InputError, unknown
from gossamer.testing.checks.context import Context
from gossamer.testing.checks.table import CHECKS, Check
from gossamer.testing.report import FAILED, GIVEN_UP, PASSED, SKIPPED, CheckResult, MethodCheckError, MethodReport
from gossamer.testing.subject import Subject, Tested
from gossamer.testing.violations import Broken, NotApplicable
from gossamer.testing.worlds.real_run import warm_up
from gossamer.user_file import describe

DEFAULT_SEEDS = range(6)
DEFAULT_WORKERS = 3


def check_method(
    method: Tested,
    *,
    real: bool = True,
    only: str | Iterable[str] = (),
    workers: int = DEFAULT_WORKERS,
    seeds: Iterable[int] = DEFAULT_SEEDS,
    callback: Callable[[CheckResult], None] | None = None,
    **options: Any,
) -> MethodReport:
    """Check a method against its contract, in the virtual cluster and with real processes.

    A call is all that a test needs:

    ```python
    def test_my_method():
        gossamer.testing.check_method(MyMethod, rate=2.0)
    ```

    Args:
        method: The class of the method, its name, the path of its file (``path.py`` or ``path.py:Class``), or a
            function that builds it for a topology.
        real: Whether to start processes, too. They import the method, so it must be defined in a file, and a script
            calls ``check_method`` below ``if __name__ == "__main__":``.
        only: The names of some checks (``CHECKS``); empty: all.
        workers: Number of real processes.
        seeds: Seeds of the random clusters and orders of events that are tried; more seeds find more.
        callback: Called with the result of each check.
        **options: Settings of the method by name.

    Returns:
        What was checked, with the outcome.

    Raises:
        MethodCheckError: If the method does not pass all checks. An ``AssertionError``.
        InputError: If the method cannot be found, or cannot be built with these settings.
    """
    chosen = _choose(only, real)
    subject = Subject(method, options)
    if any(check.real for check in chosen):
        _check_can_start(subject)
        warm_up()
    context = Context(subject, tuple(seeds), workers)
    report = MethodReport(subject.name)
    for check in chosen:
        report.results.append(_outcome(check, context, report))
        if callback is not None:
            callback(report.results[-1])
    if report.failures:
        raise MethodCheckError(report)
    return report


def _choose(only: str | Iterable[str], real: bool) -> list[Check]:
    names = [only] if isinstance(only, str) else list(only)
    for name in names:
        if name not in CHECKS:
            raise unknown("check", name, CHECKS)
    return [check for check in CHECKS.values() if (check.name in names if names else real or not check.real)]


def _check_can_start(subject: Subject) -> None:
    """Raise ``InputError`` if new processes could not import the method."""
    if subject.origin.problem:
        raise InputError(
            f"{subject.origin.problem}, where a new process cannot import it: move it to a Python file, or leave the "
            "checks with real processes out by real=False"
        )
    # Multiprocessing itself refuses to start processes then, in many words.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise InputError(
            'check_method is called while a new process imports its file: put the call below if __name__ == "__main__":'
        )


def _outcome(check: Check, context: Context, report: MethodReport) -> CheckResult:
    began = time.monotonic()
    try:
        outcome, detail = _run(check, context, report)
    except NotApplicable as reason:
        outcome, detail = SKIPPED, str(reason)
    except (Broken, InputError) as error:
        outcome, detail = FAILED, str(error)
    except Exception as error:
        outcome, detail = FAILED, f"{describe(error)} ({_origin(error)})"
    return CheckResult(check.name, check.rule, outcome, detail, time.monotonic() - began)


def _run(check: Check, context: Context, report: MethodReport) -> tuple[str, str]:
    failed = [result.name for result in report.failures if CHECKS[result.name].stage < check.stage]
    if failed:
        raise NotApplicable(f"because of {', '.join(failed)}")
    if check.invariant and check.invariant in context.method.gives_up:
        return GIVEN_UP, ""
    check.run(context)
    return PASSED, ""


def _origin(error: Exception) -> str:
    """Return the line of the method that raised, or of whatever did."""
    frames = traceback.extract_tb(error.__traceback__)
    own = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    outside = [frame for frame in frames if not frame.filename.startswith(own)] or frames
    return f"{os.path.basename(outside[-1].filename)}, line {outside[-1].lineno}"
