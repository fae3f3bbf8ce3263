"""What happens to the workers of ``benchmarks/peers.py``: one is killed and comes back, or one is slow."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from environments import ROOT
from peers_contenders import WAIT_S, Contender
from torchft_coordinator import lighthouse
from worker_processes import Late, Worker, free_port, longest_step

WORKER = Path(__file__).with_name("peers_worker.py")
WORKERS, PARAMETERS = 4, 5_000_000
KILLED = 2
SLOW, SLOW_FACTOR = 3, 10.0
STEPS_AFTER = 20
"""That every survivor makes before the killed worker is started again."""
LIMIT_S = 180.0
"""No stage takes so long."""
WORKER_LIMIT_S = 5 * LIMIT_S
POLL_S = 0.1

Outcome = dict[str, float | str]
"""Figures by name, ``problem`` where there is none, and perhaps a ``note``."""
Start = Callable[[int, str], Worker]


@contextlib.contextmanager
def workers_of(contender: Contender, python: Path, warm_up_steps: int, slow: int | None = None) -> Iterator[Start]:
    """Yield a function that starts the worker of a rank; all workers are killed in the end."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(WORKERS),
        "LOCAL_WORLD_SIZE": str(WORKERS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(ROOT / "src"),
    }
    job_spec = {
        "contender": contender.name,
        "kind": contender.kind,
        "optimizer": contender.optimizer,
        "settings": contender.settings,
        "in_background": contender.in_background,
        "averages_of": contender.averages_of,
        "workers": WORKERS,
        "parameters": PARAMETERS,
        "warm_up_steps": warm_up_steps,
        "limit_s": WORKER_LIMIT_S,
    }
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gossamer-peers-")))
        job_spec["folder"] = str(folder)
        if contender.torchft is not None:
            address = stack.enter_context(lighthouse(contender.torchft, python, folder))
            job_spec |= {"lighthouse": address, **contender.torchft.for_worker()}

        def start(rank: int, name: str) -> Worker:
            mine = {"rank": rank, "wait_s": WAIT_S * (SLOW_FACTOR if rank == slow else 1.0)}
            command = [str(python), str(WORKER), json.dumps({**job_spec, **mine})]
            worker = Worker(command, {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, folder, name)
            stack.callback(worker.kill)
            return worker

        yield start


def kill(contender: Contender, python: Path, moment: float) -> Outcome:
    """Kill a worker, at a moment between 0 and 1 of a round; some seconds later start its process again."""
    outcome: Outcome = {}
    with workers_of(contender, python, warm_up_steps=12) as start:
        try:
            workers = [start(rank, str(rank)) for rank in range(WORKERS)]
            for worker in workers:
                worker.wait_for("joint training", limit_s=LIMIT_S)
            time.sleep(moment * contender.round_s)
            workers[KILLED].kill()
            survivors = workers[:KILLED] + workers[KILLED + 1 :]
            killed_at = time.time()
            watch(survivors, contender.watch_s)
            left = [worker for worker in survivors if not worker.ended()]
            if not left:
                return {"problem": "the job ends"}
            if len(left) < len(survivors):
                outcome["note"] = f"{len(survivors) - len(left)} of {len(survivors)} survivors ended"
            if not all(steps_since(worker, killed_at) for worker in left):
                return {"problem": f"no step in {LIMIT_S:.0f} s"}
            outcome["longest step"] = longest_step(left, killed_at)
            back = start(KILLED, "back")
            back.wait_for("contribution", limit_s=LIMIT_S)
            outcome["return"] = back.times("contribution")[0] - back.started
            outcome["longest step during return"] = longest_step(left, back.started)
        except Late as error:
            outcome["problem"] = said(contender, error)
    return outcome


def watch(survivors: list[Worker], seconds: float) -> None:
    """Wait until all survivors that have not ended have made some steps, and for some seconds at least."""
    since = time.time()
    while time.time() < since + LIMIT_S:
        left = [worker for worker in survivors if not worker.ended()]
        enough = all(steps_since(worker, since) >= STEPS_AFTER for worker in left)
        if not left or (enough and time.time() > since + seconds):
            return
        time.sleep(POLL_S)


def steps_since(worker: Worker, since: float) -> int:
    return sum(at > since for at in worker.steps())


def straggler(contender: Contender, python: Path, _moment: float) -> Outcome:
    """Count the steps of all workers while the slow one makes a number of steps."""
    with workers_of(contender, python, warm_up_steps=3, slow=SLOW) as start:
        try:
            workers = [start(rank, str(rank)) for rank in range(WORKERS)]
            for worker in workers:
                worker.wait_for("joint training", limit_s=LIMIT_S)
            first = len(workers[SLOW].steps())
            last = first + contender.straggler_steps
            workers[SLOW].wait_for("step", last + 1, LIMIT_S)
            slow_steps = workers[SLOW].steps()
            since, until = slow_steps[first], slow_steps[last]
            made = sum(since < at <= until for worker in workers for at in worker.steps())
            return {"steps per second": made / (until - since)}
        except Late as error:
            return {"problem": said(contender, error)}


def said(contender: Contender, error: Late) -> str:
    """Print what is known about a worker that did not get there; return the first line."""
    print(f"{contender.name}: {error}", file=sys.stderr, flush=True)
    return str(error).split("\n", 1)[0].rstrip(":")


CASES: dict[str, Callable[[Contender, Path, float], Outcome]] = {"kill": kill, "straggler": straggler}
