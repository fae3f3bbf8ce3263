"""One history: faults drawn from a seed, then a whole network and the end; and what must hold in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from gossamer.seeds import text_stream
from gossamer.testing.histories.invariants import Violated
from gossamer.testing.histories.network import LinkQuality
from gossamer.testing.histories.process import Parts
from gossamer.testing.histories.world import TIMING, World

KNOWN_AFTER_S = 4.0
"""So long after the last fault everybody knows who is alive."""

HUNG_KNOWN_AFTER_S = TIMING.hung_s + 2.0

CUT_KNOWN_AFTER_S = TIMING.cut_s + 1.0
"""So long after workers meet they know which of their links are cut: one link after the other, if they meet so."""

MAX_ONE_WAY_S = 3.0
"""A link that is cut one way carries messages the other way no longer than this: they are not acknowledged."""

ENDS_AFTER_S = 6.0
"""So long after the last step everybody has the final average and has left."""


@dataclass(frozen=True)
class Result:
    """What a history came to."""

    seed: int
    violation: str | None
    num_messages: int
    num_notices: int
    num_steps: int
    num_merges: int
    num_discarded: int
    num_repeated: int
    simulated_s: float


def run_history(
    seed: int, parts: Parts | None = None, log: Callable[[str], None] | None = None, logs_messages: bool = False
) -> Result:
    """Run the history of ``seed``. ``log`` is told what happens, line by line: with ``logs_messages`` messages too."""
    history = History(seed, parts, log, logs_messages)
    violation = None
    try:
        history.run()
    except Violated as error:
        violation = f"{error} (after {history.world.now:.3f} s)"
    world = history.world
    return Result(
        seed,
        violation,
        world.network.num_messages,
        world.num_notices,
        world.num_steps,
        world.num_merges,
        world.num_discarded,
        world.num_repeated,
        world.now,
    )


class History:
    def __init__(
        self, seed: int, parts: Parts | None, log: Callable[[str], None] | None, logs_messages: bool = False
    ) -> None:
        self.rng = rng = text_stream(f"history {seed}")
        self.workers = rng.choice((2, 3, 3, 4, 4, 5, 9))
        quality = LinkQuality(
            max_delay_s=rng.choice((0.002, 0.02, 0.1)),
            loss=rng.choice((0.0, 0.0, 0.02, 0.1)),
            duplicates=rng.choice((0.0, 0.0, 0.1)),
        )
        parts = parts or Parts()
        if seed % 4 == 1:
            # As among many workers, where a message does not hold the records of all.
            parts = replace(parts, liveness=partial(parts.liveness, max_records=2))
        step_s = rng.choice((0.05, 0.2, 0.4))
        self.world = World(seed, self.workers, quality, parts, log, step_s=step_s, logs_messages=logs_messages)
        self.world.has_majority_policy = rng.random() < 0.2
        if rng.random() < 0.25:
            self.world.batches = [rng.choice((0, 1, 10, 30, 1_000_000)) for _ in range(self.workers)]
        self._cuts_one_way = seed % 5 == 4
        self._num_cuts = 0
        self._known_at = 0.0
        """When everybody last knew who was alive."""
        self.world.say(f"{self.workers} workers, {quality}")

    def run(self) -> None:
        world, rng = self.world, self.rng
        for rank in range(self.workers):
            world.queue.at(0.5 * rng.random(), lambda rank=rank: world.start(rank))  # type: ignore[misc]
        world.queue.run_until(rng.choice((0.6, 1.5)))
        for _ in range(rng.randrange(1, 6)):
            self._fault()
            self._wait(rng.choice((rng.uniform(0.0, 0.1), rng.uniform(0.1, 1.0), rng.uniform(1.0, 3.0), KNOWN_AFTER_S)))
        self._make_whole()
        self._wait(KNOWN_AFTER_S)
        world.invariants.check_one_model()
        self._end()

    def _wait(self, seconds: float) -> None:
        world = self.world
        settled_at = world.now + seconds
        if seconds >= KNOWN_AFTER_S:
            settled_at = max(settled_at, world.network.one_way_until + KNOWN_AFTER_S)
        world.queue.run_until(settled_at)
        if seconds < KNOWN_AFTER_S:
            return
        if any(process.hung for process in world.processes.values()):
            world.queue.run_until(world.now + HUNG_KNOWN_AFTER_S - KNOWN_AFTER_S)
        elif world.network.down:
            # Who is there is found out first, and only then, which links between them are cut.
            num_meetings = max(self._num_cuts - 1, 0) + (world.processes_changed_at >= self._known_at)
            world.queue.run_until(world.now + num_meetings * CUT_KNOWN_AFTER_S)
        world.invariants.check_known()
        world.invariants.check_progress()
        self._known_at = world.now

    def _end(self) -> None:
        world = self.world
        ranks = [trainer.rank for trainer in world.invariants.running()]
        world.enough = True
        world.say("enough")
        until = world.now + ENDS_AFTER_S
        while world.now < until and any(rank in world.processes for rank in ranks):
            world.queue.run_until(world.now + 0.5)
        world.invariants.check_all_ended(ranks)

    def _fault(self) -> None:
        world, rng, workers = self.world, self.rng, self.workers
        rank, other = rng.randrange(workers), rng.randrange(workers)
        match rng.randrange(14):
            case 0 | 1 | 2:
                world.crash(rank)
                if rng.random() < 0.3:
                    world.start(rank, clock_is_behind=rng.random() < 0.3)
            case 3 | 4:
                for gone in [each for each in range(workers) if each not in world.processes]:
                    world.start(gone)
            case 5:
                side = {each for each in range(workers) if rng.random() < 0.5}
                world.say(f"{sorted(side)} are cut off")
                world.network.separate(side)
                world.disturb()
            case 6 | 7:
                self._cut(rank, other)
            case 8:
                world.stop(rank)
            case 9:
                world.go_on(rank)
            case 10:
                world.hang(rank)
            case 11:
                world.leave(rank)
            case 12:
                world.request_next(rank)
            case _:
                world.finish(rank)

    def _cut(self, one: int, other: int) -> None:
        world, rng = self.world, self.rng
        if one == other:
            return
        one_way_s = rng.uniform(0.0, MAX_ONE_WAY_S) if self._cuts_one_way else 0.0
        still = f"; {one} still reaches {other} for {one_way_s:.1f} s" if one_way_s else ""
        world.say(f"the link between {one} and {other} is cut{still}")
        world.network.cut(one, other, one_way_s)
        self._num_cuts += 1
        world.disturb()
        if one_way_s:
            world.queue.at(world.now + one_way_s, world.disturb)

    def _make_whole(self) -> None:
        world, rng = self.world, self.rng
        world.say("the network is whole")
        if world.network.down:
            world.network.heal()
            world.disturb()
        world.network.quality = LinkQuality(max_delay_s=world.network.quality.max_delay_s)
        for rank in range(self.workers):
            world.go_on(rank)
            if rank not in world.processes and rng.random() < 0.5:
                world.start(rank)
