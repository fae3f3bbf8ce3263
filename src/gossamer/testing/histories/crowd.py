"""Many workers: how long they take to agree after one is lost, and what they send meanwhile."""

from __future__ import annotations

import time
from dataclasses import dataclass

from gossamer.process.liveness.peer import Timing
from gossamer.testing.histories.network import LinkQuality
from gossamer.testing.histories.world import World

LINK_S = 0.001
STEADY_S = 1.0
STEP_S = 0.3


@dataclass(frozen=True)
class Crowd:
    """What came of it."""

    workers: int
    begun_s: float
    """From the start of the processes to the first view."""
    agreed_s: float
    """From the loss to the view of all others."""
    num_views: int
    """How many different views they have then: one."""
    messages_per_worker: float
    """Per second, while nothing happens."""
    bytes_per_worker: float
    most_bytes: int
    """The longest message."""
    most_received: int
    """How many messages the busiest worker gets in the second after the loss."""
    took_s: float

    def __str__(self) -> str:
        return (
            f"{self.workers} workers on links of {1e3 * LINK_S:.0f} ms: the first view {self.begun_s:.2f} s after "
            f"they start, all agree {self.agreed_s:.2f} s after a loss (views: {self.num_views}); in steady state "
            f"{self.messages_per_worker:.0f} messages and {self.bytes_per_worker / 1e3:.0f} kB per second and worker, "
            f"at most {self.most_bytes / 1e3:.0f} kB each; at most {self.most_received} messages at one worker in the "
            f"second of the loss; simulated in {self.took_s:.0f} s"
        )


def run_crowd(workers: int) -> Crowd:
    """Start workers, kill one in the middle of a step, and wait until the others agree."""
    began = time.monotonic()
    world = World(1, workers, LinkQuality(LINK_S, LINK_S), timing=Timing(), step_s=STEP_S)
    for rank in range(workers):
        world.start(rank)
    begun_s = _until_agreed(world, 30.0)
    world.queue.run_until(world.now + STEADY_S)
    network = world.network
    messages, sent_bytes = network.num_messages, network.num_bytes
    network.sizes = True
    world.queue.run_until(world.now + STEADY_S)
    messages, sent_bytes = network.num_messages - messages, network.num_bytes - sent_bytes
    network.received.clear()
    lost_at = world.now
    world.crash(workers // 3)
    agreed_s = _until_agreed(world, 30.0) - lost_at
    world.queue.run_until(lost_at + 1.0)
    views = {trainer.view and trainer.view.id for trainer in world.invariants.running()}
    return Crowd(
        workers,
        begun_s,
        agreed_s,
        len(views),
        messages / workers / STEADY_S,
        sent_bytes / workers / STEADY_S,
        network.most_bytes,
        max(network.received.values()),
        time.monotonic() - began,
    )


def _until_agreed(world: World, limit_s: float) -> float:
    """Return when all workers that there are are in one view of just these."""
    until = world.now + limit_s
    while world.now < until:
        world.queue.run_until(world.now + 0.005)
        views = {trainer.view.id if trainer.view else None: trainer.view for trainer in world.invariants.running()}
        view = next(iter(views.values()))
        if len(views) == 1 and view is not None and view.ranks == sorted(world.processes):
            break
    return world.now
