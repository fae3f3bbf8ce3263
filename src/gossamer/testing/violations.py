"""What a check raises."""

from __future__ import annotations


class Broken(AssertionError):
    """A method breaks a rule of the contract."""

    def __init__(self, rule: str, what: str) -> None:
        super().__init__(what)
        self.rule = rule


class NotApplicable(Exception):
    """A check says nothing about this method, for the reason in its text."""
