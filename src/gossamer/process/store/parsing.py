"""Strict readers of what other processes publish in the store. What cannot be read counts as not published."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container
from typing import TypeVar

T = TypeVar("T")

MAX_NUMBER_DIGITS = 15
MAX_PORT = 65535


def read_number(value: bytes | None) -> int | None:
    """Return a whole number that is not negative."""
    if value is None or len(value) > MAX_NUMBER_DIGITS or not value.isdigit():
        return None
    return int(value)


def read_time(value: bytes | None) -> float | None:
    """Return a time in seconds."""
    if value is None or not re.fullmatch(rb"[0-9]{1,15}(\.[0-9]{1,9})?", value):
        return None
    return float(value)


def read_address(value: bytes | None) -> tuple[str, int] | None:
    """Return host and port."""
    if value is None or not re.fullmatch(rb"[0-9A-Za-z.:_-]{1,255} [0-9]{1,5}", value):
        return None
    host, port = value.decode().split(" ")
    return (host, int(port)) if 0 < int(port) <= MAX_PORT else None


def read_ranks(value: bytes | None, everybody: Container[int]) -> list[int] | None:
    """Return a list of ranks in ascending order, at least one."""
    try:
        ranks = json.loads(value or b"")
    except ValueError:
        return None
    if not isinstance(ranks, list) or not ranks or not all(type(rank) is int and rank in everybody for rank in ranks):
        return None
    return ranks if ranks == sorted(set(ranks)) else None


class Refusals:
    """Counts what other processes say and cannot be read, and reports each key once."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._reported: set[str] = set()
        self.count = 0

    def checked(self, key: str, value: bytes | None, parsed: T | None) -> T | None:
        """Return ``parsed``; if that is None though there is a value, say so."""
        if value is not None and parsed is None:
            self.refuse(key, f"refused what the store has at {key}")
        return parsed

    def refuse(self, key: str, text: str) -> None:
        """Count something that cannot be read; say so, unless something of the same key was refused before."""
        self.count += 1
        if key not in self._reported:
            self._reported.add(key)
            self._report(f"{text}: it cannot be read")
