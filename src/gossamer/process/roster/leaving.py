"""A worker leaves for good: it hands over what it has, tells the others, and is taken off the roster."""

from __future__ import annotations

import time

from gossamer.errors import InputError
from gossamer.process.lifecycle import Phase
from gossamer.process.runtime.worker_runtime import WorkerRuntime

HAND_OVER_S = 2.0
"""How long a worker waits for one more exchange."""

TOLD_S = 0.1
"""How long the others have to hear of it before connections break."""


def leave_for_good(runtime: WorkerRuntime) -> None:
    """Leave the run before its end: the others share this worker's place. Only ``close`` is left to do."""
    runtime.driver.abandon_step()
    _hand_over(runtime)
    runtime.lifecycle.advance(Phase.DONE)
    runtime.peer_watch.ended = True
    runtime.everybody.learn_left(runtime.rank)
    runtime.roster_store.publish()
    runtime.heartbeats.publish_retired()
    for membership in (runtime.groups.train, runtime.groups.averaged):
        membership.request(membership.requested + 1)
    time.sleep(TOLD_S)
    # Those that wait for this worker in a collective notice at once.
    runtime.groups.disconnect()


def give_up(runtime: WorkerRuntime, rank: int) -> None:
    """Take a dead worker off the roster. InputError if it is alive, or is on the roster no more."""
    if rank == runtime.rank or rank not in runtime.everybody or not runtime.heartbeats.dead(rank):
        dead = sorted(set(runtime.everybody) & runtime.heartbeats.lost)
        raise InputError(
            f"rank {rank} is no dead worker of this run: expected one of {dead or 'none, all are alive'}; one that is "
            "alive leaves by itself, with swarm.leave()"
        )
    runtime.everybody.learn_left(rank)
    runtime.roster_store.publish()
    if runtime.method.lockstep:
        # All members follow after the same step.
        runtime.groups.train.request(runtime.groups.train.requested + 1)


def _hand_over(runtime: WorkerRuntime) -> None:
    """In the background, wait for one more exchange: others get a part in this worker's last steps."""
    if runtime.method.background is None or not runtime.driver.background_started or runtime.others_done():
        return
    done, until = runtime.metrics.exchanges, time.monotonic() + HAND_OVER_S
    while runtime.metrics.exchanges == done and time.monotonic() < until:
        time.sleep(0.01)
