"""Looks into the store for what concerns the ranks of live processes: questions of others, and the claim to its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from gossamer.errors import InputError
from gossamer.process.net.connection import Address
from gossamer.process.store.rank_claim import (
    QUESTION,
    Question,
    RankClaim,
    given_twice,
    look_interval_s,
    read_claim,
    read_question,
)

MIN_HEARTBEATS = 5
"""A process is alive if its counter has moved so far since the question: less may have been on its way when it died."""

MAX_QUESTIONS = 16
"""That a process keeps at a time; one more drops the oldest."""

NAMESAKE_S, NAMESAKE_PAUSE_S = 30.0, 5.0
"""How long a process may hear of another of its rank, without longer pauses, while each has the rank in a store of its
own. Then one of them ends."""


class Namesake(NamedTuple):
    """Another live process of this rank."""

    address: Address
    since: float
    """Since when messages tell of it without longer pauses."""
    heard_at: float


class ClaimWatch:
    """Answers the questions of other processes, and ends this one if its rank belongs to another."""

    def __init__(
        self,
        claim: RankClaim,
        heartbeats_of: Callable[[int, Address], int | None],
        on_given_twice: Callable[[InputError], None],
    ) -> None:
        """``heartbeats_of(rank, address)``: the counter of the process of ``rank`` that listens at ``address``, as far
        as it has been heard here; None if it is dead or another one has its place. ``on_given_twice(error)``: this
        process has to end."""
        self._claim, self._heartbeats_of, self._on_given_twice = claim, heartbeats_of, on_given_twice
        self._look_at = 0.0
        self._questions: dict[Question, int] = {}
        """Those that are not answered yet, and the counter when they were seen. Oldest first."""
        self._last: Question | None = None
        self._checking = False
        self._over = False
        self._namesake: Namesake | None = None

    def poll(self) -> None:
        """Look into the store if that is due. Runs in the thread that follows the store."""
        if self._over:
            return
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + look_interval_s(self._claim.workers())
            self._look()
            self._check_namesake()
        for question, counted in list(self._questions.items()):
            counter = self._heartbeats_of(question.rank, question.address)
            if counter is None:
                del self._questions[question]
            elif counter >= counted + MIN_HEARTBEATS:
                self._claim.store.set(question.answer_key, "1")
                del self._questions[question]

    def _look(self) -> None:
        claim = self._claim
        asked, published = claim.store.get_all([QUESTION, claim.key])
        question = read_question(asked)
        if question is not None and question != self._last:
            self._last = question
            counter = self._heartbeats_of(question.rank, question.address)
            if counter is not None:
                self._questions[question] = counter
                if len(self._questions) > MAX_QUESTIONS:
                    del self._questions[next(iter(self._questions))]
        other = read_claim(published)
        if other is not None and other != claim.own and not self._checking:
            self._checking = True
            # It takes seconds to find out whether the other one is alive.
            threading.Thread(target=self._check, name="gossamer-claim", daemon=True).start()

    def _check(self) -> None:
        try:
            self._claim.republish()
        except InputError as error:
            self._end(error)
        finally:
            self._checking = False

    def hear_of_namesake(self, address: Address) -> None:
        """Messages tell of another live process of this rank, which listens at ``address``. From any thread."""
        now, last = time.monotonic(), self._namesake
        goes_on = last is not None and last.address == address and now - last.heard_at <= NAMESAKE_PAUSE_S
        self._namesake = Namesake(address, last.since if last is not None and goes_on else now, now)

    def _check_namesake(self) -> None:
        """End if both processes have lived on for long. Whoever has no claim in a common store ends before.

        If each has one in another store, the one with the higher address ends.
        """
        other = self._namesake
        if other is None or other.heard_at - other.since < NAMESAKE_S or self._claim.own.address < other.address:
            return
        self._end(given_twice(self._claim.rank, f"{other.address[0]}:{other.address[1]} is alive"))

    def _end(self, error: InputError) -> None:
        if not self._over:
            self._over = True
            self._on_given_twice(error)
