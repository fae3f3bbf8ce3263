"""A worker leaves for good: it hands over what it has, tells the others, and is taken off the roster."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from gossamer.effects import WaitSteps
from gossamer.errors import InputError
from gossamer.methods.loading.method_contract import declared
from gossamer.process.events import EventKind
from gossamer.process.lifecycle import Phase
from gossamer.process.runtime.worker_runtime import WorkerRuntime

HAND_OVER_S = 10.0
"""How long a worker takes part in averages and exchanges without steps of its own, so that the others get its last."""

STOP_AGAIN_S = 0.5
"""How often what still waits afterwards is told to stop."""

TOLD_S = 0.1
"""How long the others have to hear of it before connections break."""


def leave_for_good(runtime: WorkerRuntime) -> None:
    """Leave the run before its end: the others share this worker's place. Only ``close`` is left to do."""
    runtime.driver.abandon_step()
    # Such as: another process has this rank, which is not this one's to give up then.
    runtime.driver.raise_background_error()
    shared = _share_last_steps(runtime)
    runtime.driver.raise_background_error()
    if not shared:
        text = "left before the next average or exchange: the others do not have this worker's last steps"
        runtime.state.events.add(EventKind.NOT_AVERAGED, text)
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


def _share_last_steps(runtime: WorkerRuntime) -> bool:
    """Return whether the others have what this worker did, or there is nobody who could."""
    if not runtime.driver.begun or runtime.others_done():
        return True
    share = _in_background if runtime.method.background is not None else _in_steps
    until = time.monotonic() + HAND_OVER_S
    with _waiting_no_longer_than(runtime, until):
        return share(runtime, until) or runtime.others_done()


@contextlib.contextmanager
def _waiting_no_longer_than(runtime: WorkerRuntime, until: float) -> Iterator[None]:
    """From ``until`` on, let nothing wait for other workers in the block: they may take part in a collective late."""
    over = threading.Event()

    def watch() -> None:
        wait_s = max(0.0, until - time.monotonic())
        while not over.wait(wait_s):
            # Again and again: the step in progress may just begin to wait.
            runtime.driver.stop_waiting()
            wait_s = STOP_AGAIN_S

    watching = threading.Thread(target=watch, name="gossamer-leave", daemon=True)
    watching.start()
    try:
        yield
    finally:
        over.set()
        watching.join()


def _in_steps(runtime: WorkerRuntime, until: float) -> bool:
    """Make the steps until the next average, without updates. The others make them at their own pace."""
    worker, metrics = runtime.worker, runtime.metrics
    count = runtime.method.steps_until_shared(worker.step)
    step_s = (runtime.state.history.busy_s + metrics.idle_s) / max(1, metrics.steps)
    if time.monotonic() + count * step_s > until:
        return False
    last = worker.step + count
    # A step is made again if others die or leave meanwhile.
    while worker.step < last and time.monotonic() < until and not runtime.others_done():
        runtime.driver.step_without_update()
    return worker.step >= last


def _in_background(runtime: WorkerRuntime, until: float) -> bool:
    """Wait for one more average or exchange."""
    effects, metrics = runtime.effects, runtime.metrics
    exchanges, waits = metrics.exchanges, WaitSteps in declared(runtime.method, "background")
    effects.leaving = True
    effects.notify_step()
    while time.monotonic() < until and not runtime.others_done():
        if effects.last_steps_shared.is_set() if waits else metrics.exchanges > exchanges:
            return True
        time.sleep(0.01)
    return False
