"""What the checks of one method share."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from gossamer.errors import MethodError
from gossamer.methods import Method
from gossamer.testing.subject import Subject
from gossamer.testing.violations import Broken
from gossamer.testing.worlds.any_order import AnyOrderWorld
from gossamer.testing.worlds.quadratic import DIM
from gossamer.testing.worlds.real_run import RealTraining, train
from gossamer.testing.worlds.virtual_runs import GRAPHS, INSTANT, UNEVEN, make_cluster, models

MAX_REACH = 400
"""Steps in which every worker must have communicated twice."""

LARGEST_CHOICE = 1 << 16


class Context:
    """The method under test, and what is known about it."""

    def __init__(self, subject: Subject, seeds: Sequence[int], workers: int) -> None:
        self.subject, self.seeds, self.workers = subject, seeds, workers

    @cached_property
    def method(self) -> Method:
        """The method on the topology that most checks use."""
        return self.subject.build(*self.ring)

    @cached_property
    def ring(self) -> tuple[str, int]:
        return self.subject.first_fit(("ring", 4), ("ring", 2), ("complete", 4))

    @cached_property
    def reach(self) -> int:
        """The number of steps in which every worker has communicated twice; 0 if that takes too long."""
        cluster = make_cluster(self.subject, *self.ring, **INSTANT)
        for steps in range(1, MAX_REACH + 1):
            cluster.run_until(float(steps))
            if all(worker.exchanges >= 2 for worker in cluster.workers):
                return steps
        return 0

    @property
    def steps(self) -> int:
        """A number of steps in which workers communicate several times."""
        return max(12, 3 * self.reach // 2)

    @cached_property
    def repeatable(self) -> bool:
        """Whether two runs with one seed are the same."""
        return all(self._history(clock) == self._history(clock) for clock in ("hardware", "ideal"))

    def _history(self, clock: str) -> list[Any]:
        cluster = make_cluster(self.subject, *self.ring, seed=3, clock=clock, **UNEVEN)
        history = []
        for time in range(1, self.steps + 1):
            cluster.run_until(float(time))
            history.append([(worker.steps_done, worker.bytes_sent) for worker in cluster.workers])
        cluster.finish()
        return [*history, models(cluster).tolist()]

    @property
    def learning(self) -> tuple[float, int]:
        """A learning rate with which workers stay together between two communications, and steps that suffice."""
        period = max(10.0, self.reach / 2)
        # The steps of Adam do not shrink near the optimum.
        lr, time = (0.6, 6.0) if self.subject.uses_sgd else (0.2, 4.0)
        return lr / period, round(time * period / lr)

    @cached_property
    def broken_in_any_order(self) -> dict[str, str]:
        """What the world of any order finds, by rule: the first violation of each."""
        found: dict[str, str] = {}
        for seed in self.seeds:
            try:
                world, where = self.world(seed)
                try:
                    world.run()
                    world.finish()
                except Broken as broken:
                    found.setdefault(broken.rule, f"{broken} ({where})")
            except MethodError as error:
                found.setdefault("effects", str(error))
        return found

    def world(self, seed: int) -> tuple[AnyOrderWorld, str]:
        """Return a world of any order, and what it is, for people."""
        rng = random.Random(seed)
        graph, workers = rng.choice(GRAPHS), rng.randint(2, 5)
        graph, workers = self.subject.first_fit((graph, workers), ("ring", workers), self.ring)
        method = self.subject.build(graph, workers, seed)
        choices = [rng.randrange(LARGEST_CHOICE) for _ in range(60)]
        world = AnyOrderWorld(method, steps=self._world_steps, choices=choices, seed=seed, dim=DIM)
        return world, f"any order: {workers} workers, topology={graph} seed={seed}"

    @cached_property
    def _world_steps(self) -> int:
        try:
            return max(6, self.reach + 2)
        except Exception:
            # The method fails in the virtual cluster, too. Here the checks find out which rule it breaks.
            return 12

    @cached_property
    def training(self) -> RealTraining:
        """A run with real processes."""
        return train(self.subject, self.workers, self.reach)
