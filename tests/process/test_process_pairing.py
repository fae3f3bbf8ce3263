"""Pairing under any order of threads and messages.

The threads of all workers take turns here, at the points where real threads may overtake each other, in a random order.
Messages of one worker to another arrive in the order in which they were sent, as over a connection.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.process.pairwise import pairing
from gossamer.process.pairwise.pairing import Pairing

EXCHANGES = 20
PATIENCE = 5_000
"""In so many turns something happens, unless somebody waits for what will never come."""


class Turns:
    """Threads of which one runs at a time."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.happened = False
        self._waiting: dict[threading.Thread, threading.Semaphore] = {}
        self._back = threading.Semaphore(0)
        self._given_up = False

    def begin(self, call: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                self._wait()
                call()
            except StopIteration:
                pass
            finally:
                del self._waiting[thread]
                self._back.release()

        thread = threading.Thread(target=run, daemon=True)
        self._waiting[thread] = threading.Semaphore(0)
        thread.start()
        return thread

    def pass_on(self, *_: object) -> None:
        """Others may run now."""
        self._back.release()
        self._wait()

    def _wait(self) -> None:
        self._waiting[threading.current_thread()].acquire()
        if self._given_up:
            raise StopIteration

    def run(self, awaited: list[threading.Thread]) -> bool:
        """Whether those who are awaited have ended, before nothing happened for too long."""
        still = 0
        while still < PATIENCE and any(thread in self._waiting for thread in awaited):
            self.happened = False
            self._one_turn(self.chance.choice(list(self._waiting)))
            still = 0 if self.happened else still + 1
        ended = still < PATIENCE
        self._given_up = True
        for thread in list(self._waiting):
            self._one_turn(thread)
        return ended

    def _one_turn(self, thread: threading.Thread) -> None:
        self._waiting[thread].release()
        self._back.acquire()


class End:
    """One end of an edge, as its worker sees it."""

    open = True

    def __init__(self, peer: int, turns: Turns) -> None:
        self.peer, self.turns = peer, turns
        self.num_exchanges = 0
        self.heard: deque[tuple[int, ...]] = deque()
        self.began = 0
        self.other: End

    def send(self, *words: int) -> None:
        # What was decided may be said later.
        self.turns.pass_on()
        self.other.heard.append(words + (0,) * (4 - len(words)))
        self.turns.pass_on()

    def exchange(self) -> None:
        self.began += 1
        while self.other.began < self.began:
            self.turns.pass_on()
        self.num_exchanges += 1


class Worker:
    def __init__(self, rank: int, ends: dict[int, End], turns: Turns, lifecycle: Any) -> None:
        self.ends, self.turns = ends, turns
        self.exchanges, self.loses_state = 0, False
        peers: Any = SimpleNamespace(connected=lambda: list(ends), edge=ends.get, neighbours=tuple(ends))
        rng = np.random.default_rng(turns.chance.randrange(2**32) + rank)
        self.given = 0
        self.pairing = Pairing(peers, rng, lifecycle, lambda: True, self.give)
        self.pairing._changed = _Changed(turns)  # type: ignore[assignment]

    def give(self, edge: Any) -> None:
        def run() -> None:
            edge.exchange()
            self.given += 1
            self.pairing.given(edge)

        self.turns.begin(run)

    def gossip(self) -> None:
        while (agreement := self.pairing.agree(lambda: self.turns.chance.choice([0.0, 1.0]))) is not None:
            assert not (agreement.gives_state and agreement.takes_state)
            agreement.edge.exchange()  # type: ignore[call-arg]
            self.pairing.needs_state &= not agreement.takes_state
            self.exchanges += 1
            if self.loses_state and self.exchanges % 3 == 0:
                self.pairing.needs_state = True
            self.turns.happened = True

    def listen(self, end: Any) -> None:
        while True:
            self.turns.pass_on()
            if end.heard:
                self.pairing.on_message(end, end.heard.popleft())


class _Changed:
    """A condition among threads of which one runs at a time, and none is interrupted while it holds this."""

    def __init__(self, turns: Turns) -> None:
        self.wait = turns.pass_on

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...
    def notify_all(self) -> None: ...


@pytest.mark.parametrize("count", [2, 3])
@settings(max_examples=40)
@given(seed=st.integers(0, 2**32))
def test_who_begins_an_exchange_is_never_alone_in_it(count: int, seed: int) -> None:
    exchange_often(count, seed, losing=0)


@pytest.mark.parametrize(("count", "losing"), [(2, 1), (3, 1), (3, 2)])
@settings(max_examples=40)
@given(seed=st.integers(0, 2**32))
def test_nobody_is_alone_in_giving_or_taking_a_state(count: int, losing: int, seed: int) -> None:
    workers = exchange_often(count, seed, losing)
    # What was begun at one end of an edge was begun at the other.
    for worker in workers:
        assert all(end.began == end.other.began for end in worker.ends.values())


def exchange_often(count: int, seed: int, losing: int) -> list[Worker]:
    """Let workers make exchanges; the first ``losing`` of them need a state again after every third."""
    turns = Turns(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairing, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=turns.pass_on))
        ends: dict[int, dict[int, End]] = {rank: {} for rank in range(count)}
        for one, other in itertools.permutations(range(count), 2):
            ends[one][other] = End(other, turns)
        for one, other in itertools.permutations(range(count), 2):
            ends[one][other].other = ends[other][one]
        workers: list[Worker] = []

        class StopsAfterExchanges:
            @property
            def stopped(self) -> bool:
                return sum(worker.exchanges for worker in workers) >= 2 * EXCHANGES

        workers += [Worker(rank, ends[rank], turns, StopsAfterExchanges()) for rank in range(count)]
        for worker in workers[:losing]:
            worker.loses_state = worker.pairing.needs_state = True
        gossiping = [turns.begin(worker.gossip) for worker in workers]
        for worker in workers:
            for end in worker.ends.values():
                turns.begin(lambda worker=worker, end=end: worker.listen(end))  # type: ignore[misc]
        assert turns.run(gossiping), "somebody waits for a peer that does not come"
    assert sum(worker.exchanges for worker in workers) >= 2 * EXCHANGES
    return workers
