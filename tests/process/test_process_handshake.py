"""What workers conclude from what the others have published."""

from __future__ import annotations

from typing import Any

import pytest

from gossamer.process.events import Events
from gossamer.process.joining.handshake import Handshake, Verdict


class Store:
    """A store that ends when one of its keys is read, and is replaced by an empty one."""

    def __init__(self, ends_at: str) -> None:
        self.values = {"handshake/differs": b"1", "handshake/rank/0": b"another", "handshake/rank/1": b"a third"}
        self._ends_at = ends_at

    def get(self, key: str) -> bytes | None:
        if key == self._ends_at:
            self.values = {}
        return self.values.get(key)

    def compare_set(self, key: str, value: str) -> bytes:
        return self.values.setdefault(key, value.encode())


@pytest.mark.parametrize(
    ("ends_at", "verdict"),
    [
        ("", Verdict(failed="what worker 0 published cannot be read: install the same version of gossamer on all")),
        ("handshake/facts/another", None),
    ],
)
def test_a_store_that_ends_while_it_is_read_is_no_other_version_of_the_library(
    ends_at: str, verdict: Verdict | None
) -> None:
    parts: dict[str, Any] = {"store": Store(ends_at), "heartbeats": None}
    handshake = Handshake(2, 3, {}, timeout_s=1.0, events=Events(2), **parts)
    assert handshake._decide(set()) == verdict
