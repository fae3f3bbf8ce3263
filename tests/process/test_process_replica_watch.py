"""What a rank of a replica hears of the others that end."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from gossamer.errors import InputError
from gossamer.process.replica.boundary import Boundary
from gossamer.process.replica.watch import ReplicaWatch
from gossamer.train.replica.step_decision import SentDecisions, StepDecision


class Inner:
    size, ranks = 2, [0, 1]

    def __init__(self, shard: int, published: list[bytes], there: threading.Event) -> None:
        self.shard, self.published, self.there = shard, published, there

    def gather_bytes(self, message: bytes) -> list[bytes]:
        """Return what the first rank has published."""
        if self.shard == 0:
            self.published.append(message)
            self.there.set()
        assert self.there.wait(20)
        return self.published


def decide(watch: ReplicaWatch) -> Any:
    decisions = SentDecisions(SimpleNamespace(shard=1, watch=watch))  # type: ignore[arg-type]
    return lambda: decisions.agree(StepDecision(True))


def cross(watch: ReplicaWatch) -> Any:
    boundary = Boundary(watch, SimpleNamespace(closed=False), lambda peer, number: None)  # type: ignore[arg-type]
    return lambda: boundary.cross(0)


@pytest.mark.parametrize("waiting_in", [decide, cross])
def test_a_rank_ends_soon_if_the_first_one_leaves_without_a_word(waiting_in: Any) -> None:
    published, there, watches = list[bytes](), threading.Event(), dict[int, ReplicaWatch]()

    def connect(shard: int) -> None:
        watches[shard] = ReplicaWatch(Inner(shard, published, there), "127.0.0.1")  # type: ignore[arg-type]

    threads = [threading.Thread(target=connect, args=(shard,), daemon=True) for shard in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    first, second = watches[0], watches[1]
    try:
        wait = waiting_in(second)
        first.on_message = {"step": lambda text: None, "decision": lambda text: None, "line": lambda text: None}
        first.start()
        second.start()
        # An exception of its task: it closes the swarm without ``finish``.
        threading.Timer(0.2, first.close, (False,)).start()
        # It would end after half a minute otherwise, and the whole process with it.
        with pytest.raises(InputError, match="rank 0 of this replica left: the replica"):
            wait()
    finally:
        second.close(True)
        first.close(True)
