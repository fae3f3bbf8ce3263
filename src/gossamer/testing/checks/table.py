"""The table of all checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gossamer.testing.checks import contract_checks as contract
from gossamer.testing.checks import failure_checks as failure
from gossamer.testing.checks import invariant_checks as invariant
from gossamer.testing.checks import real_checks as real
from gossamer.testing.checks.context import Context

DECLARED, CONTRACT, INVARIANT, REAL, DETAIL = range(5)
"""Stages. If a check fails, those of later stages say little and are skipped."""


@dataclass(frozen=True)
class Check:
    """One check of a method."""

    run: Callable[[Context], None]
    stage: int
    invariant: str = ""
    """The name in ``Method.gives_up`` with which a method gives it up; empty: no method may."""

    @property
    def name(self) -> str:
        return self.run.__name__

    @property
    def rule(self) -> str:
        """What must hold, in a sentence."""
        return " ".join((self.run.__doc__ or "").split())

    @property
    def real(self) -> bool:
        """Whether it starts processes."""
        return self.stage >= REAL


CHECKS = {
    check.name: check
    for check in (
        Check(contract.declaration, DECLARED),
        Check(contract.effects, CONTRACT),
        Check(contract.collectives, CONTRACT),
        Check(contract.in_flight, CONTRACT),
        Check(contract.seed, CONTRACT),
        Check(contract.state, CONTRACT),
        Check(invariant.exchanges, INVARIANT),
        Check(invariant.workers, INVARIANT),
        Check(invariant.alone, INVARIANT, "alone"),
        Check(invariant.mean, INVARIANT, "mean"),
        Check(invariant.end, INVARIANT),
        Check(invariant.replicas, INVARIANT, "replicas"),
        Check(invariant.consensus, INVARIANT, "consensus"),
        Check(invariant.optimum, INVARIANT, "optimum"),
        Check(failure.failures, INVARIANT),
        Check(failure.shared, INVARIANT),
        Check(failure.joiner, INVARIANT, "optimum"),
        Check(real.processes, REAL),
        Check(real.twins, DETAIL),
        Check(real.bytes_sent, DETAIL),
        Check(real.real_mean, DETAIL, "mean"),
        Check(real.checkpoint, DETAIL),
        Check(real.rejoin, DETAIL),
    )
}
"""All checks by name, in the order in which they run."""

INVARIANTS = tuple(dict.fromkeys(check.invariant for check in CHECKS.values() if check.invariant))
"""What a method may give up by design (``Method.gives_up``)."""
