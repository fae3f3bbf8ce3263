"""One history: faults drawn from a seed, then a whole network; and what must hold in it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from gossamer.process.liveness.liveness import Liveness
from gossamer.process.liveness.records import Stage
from gossamer.testing.histories.network import LinkQuality
from gossamer.testing.histories.world import TIMING, MachineFactory, Violated, World

KNOWN_AFTER_S = 4.0
"""So long after the last fault everybody knows who is alive."""

HUNG_KNOWN_AFTER_S = TIMING.hung_s + 2.0


@dataclass(frozen=True)
class Result:
    """What a history came to."""

    seed: int
    violation: str | None
    num_messages: int
    num_notices: int
    simulated_s: float


def run_history(seed: int, make_machine: MachineFactory = Liveness, log: Callable[[str], None] | None = None) -> Result:
    """Run the history of ``seed``. ``log``: is told what happens, line by line."""
    history = History(seed, make_machine, log)
    violation = None
    try:
        history.run()
    except Violated as error:
        violation = f"{error} (after {history.world.now:.3f} s)"
    world = history.world
    return Result(seed, violation, world.network.num_messages, world.num_notices, world.now)


class History:
    def __init__(self, seed: int, make_machine: MachineFactory, log: Callable[[str], None] | None) -> None:
        self.rng = rng = random.Random(f"history {seed}")
        self.workers = rng.choice((2, 3, 3, 4, 4, 5, 9))
        quality = LinkQuality(max_delay_s=rng.choice((0.002, 0.02, 0.1)), loss=rng.choice((0.0, 0.0, 0.02, 0.1)))
        self.world = World(seed, self.workers, quality, make_machine, log)
        self.world.say(f"{self.workers} workers, {quality}")
        self.generation = 0

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

    def _wait(self, seconds: float) -> None:
        world = self.world
        world.queue.run_until(world.now + seconds)
        if seconds < KNOWN_AFTER_S:
            return
        if any(process.hung for process in world.processes.values()):
            world.queue.run_until(world.now + HUNG_KNOWN_AFTER_S - seconds)
        world.check_known()

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
                self.generation += 1
                world.request(rank, self.generation)
            case _:
                self._finish(rank)

    def _cut(self, one: int, other: int) -> None:
        """Cut a link. If only one way, then nothing gets through the other way either: answers are missing."""
        world = self.world
        if one != other:
            world.say(f"the link {one} → {other} is cut")
            world.network.cut(one, other)
            world.network.cut(other, one)
            world.disturb()

    def _finish(self, rank: int) -> None:
        process = self.world.processes.get(rank)
        if process is not None:
            self.world.say(f"worker {rank} is done")
            self.world._do(process, lambda: process.machine.advance(Stage.DONE))

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
