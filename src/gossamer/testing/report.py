"""What ``check_method`` found out."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field

PASSED, FAILED, GIVEN_UP, SKIPPED = "passed", "failed", "given up", "skipped"

WIDTH = 110


@dataclass(frozen=True)
class CheckResult:
    """The outcome of one check."""

    name: str
    """The name of the check."""
    rule: str
    """What must hold."""
    outcome: str
    """``passed``, ``failed``, ``given up`` (by ``Method.gives_up``) or ``skipped``."""
    detail: str = ""
    """What happened, or why it was skipped."""
    seconds: float = 0.0
    """How long it took."""

    def __str__(self) -> str:
        return f"{self.outcome:8}  {self.name}" + (f": {self.detail}" if self.detail else "")


@dataclass(frozen=True)
class MethodReport:
    """The outcome of all checks of a method. ``print(report)`` shows it."""

    method: str
    """The name of the method."""
    results: list[CheckResult] = field(default_factory=list)
    """One per check, in the order in which they ran."""

    @property
    def failures(self) -> list[CheckResult]:
        """The checks that failed."""
        return [result for result in self.results if result.outcome == FAILED]

    def outcome(self, name: str) -> str:
        """Return the outcome of the check called ``name``."""
        return next(result.outcome for result in self.results if result.name == name)

    def __str__(self) -> str:
        return "\n".join(
            [
                f"method {self.method}: {self._summary()}",
                *(f"  {result}" for result in self.results),
            ]
        )

    def _summary(self) -> str:
        counts = dict.fromkeys((PASSED, FAILED, GIVEN_UP, SKIPPED), 0)
        for result in self.results:
            counts[result.outcome] += 1
        return ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)

    def explain(self) -> str:
        """Return in words what does not hold."""
        verdict = "does not pass all checks" if self.failures else "passes all checks"
        lines = [f"method {self.method} {verdict}: {self._summary()}"]
        for result in self.failures:
            lines += ["", f"{result.name}: {result.rule}", _indented(result.detail)]
        return "\n".join(lines)


def _indented(text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent="    ", subsequent_indent="    ")


class MethodCheckError(AssertionError):
    """A method does not pass all checks. The text says in words what does not hold; ``report`` has everything."""

    def __init__(self, report: MethodReport) -> None:
        super().__init__(report.explain())
        self.report = report
