"""Strict readers of what other processes publish in the store. What cannot be read counts as not published."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class ComparesAndSets(Protocol):
    def compare_set(self, key: str, value: str, expected: str | bytes = "") -> bytes | None: ...


class Counts(ComparesAndSets, Protocol):
    def get(self, key: str) -> bytes | None: ...
    def add(self, key: str, amount: int) -> int | None: ...


MAX_NUMBER_DIGITS = 15
MAX_NUMBER = 1 << 62
"""Beyond all numbers that workers count up to: whoever goes on counting from a larger one may leave 64 bits."""

MAX_PROCESS = 1 << 53
"""Of the numbers of processes, which are times in microseconds: in the year 2255."""

MAX_JUMP = 1 << 40
"""By how much the number of a view that somebody names may be ahead of what is known."""

MAX_TEXT_CHARS = 1 << 14
MAX_COUNT = 10**14
"""Of a counter in the store: it can be added to for long."""

MAX_PORT = 65535


def read_number(value: bytes | None) -> int | None:
    """Return a whole number that is not negative."""
    if value is None or len(value) > MAX_NUMBER_DIGITS or not value.isdigit():
        return None
    return int(value)


def is_plausible(number: int, known: int) -> bool:
    """Return whether a count may have come so far, where ``known`` is what this worker has heard of."""
    return number <= known + MAX_JUMP and number < MAX_NUMBER


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


def read_text(value: bytes | None) -> str | None:
    """Return a line of text that can be shown."""
    try:
        text = (value or b"").decode()
    except ValueError:
        return None
    return text if text and len(text) <= MAX_TEXT_CHARS and text.isprintable() else None


def read_json(value: bytes | None) -> Any:
    """Return what JSON says; None if it is none."""
    try:
        return json.loads(value or b"")
    except (ValueError, RecursionError):
        return None


def read_ranks(value: bytes | None, everybody: Container[int]) -> list[int] | None:
    """Return a list of ranks in ascending order, at least one."""
    ranks = read_json(value)
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

    def agreed(self, store: ComparesAndSets, key: str, own: str, parse: Callable[[bytes | None], T | None]) -> T | None:
        """Return what the first worker has published under ``key``, ours if it is that; None if no store answers.

        What cannot be read is replaced by ours.
        """
        published = store.compare_set(key, own)
        if self.checked(key, published, parse(published)) is None and published is not None:
            published = store.compare_set(key, own, published)
        return parse(published)

    def add(self, store: Counts, key: str, amount: int, own: int) -> int | None:
        """Add to a counter and return its new value; None if no store answers.

        One that cannot be read, or is beyond all that workers count, is replaced by ``own`` first.
        """
        value = store.add(key, amount)
        if value is not None and amount <= value <= MAX_COUNT:
            return value
        published = store.get(key)
        count = read_number(published)
        if published is None:
            return None
        if count is None or count > MAX_COUNT:
            self.refuse(key, f"refused what the store has at {key}")
            store.compare_set(key, str(own), published)
        return store.add(key, amount)

    def refuse(self, key: str, text: str) -> None:
        """Count something that cannot be read; say so, unless something of the same key was refused before."""
        self.count += 1
        if key not in self._reported:
            self._reported.add(key)
            self._report(f"{text}: it cannot be read")
