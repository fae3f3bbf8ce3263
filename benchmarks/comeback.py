"""How soon a killed worker is back, beside torchft. Prints a markdown table.

    python benchmarks/comeback.py                                  # all contenders, 5 turns: 15 minutes
    python benchmarks/comeback.py --only a2cid2,torchft --turns 3
    python benchmarks/comeback.py --before ../other/checkout       # our methods of another checkout beside these

Four workers train with steps of 100 ms. One gets SIGKILL, its process is started again at once, and what is measured is
the time from that start until it has contributed: until a gradient that it computed has been averaged with others. The
model is small: the workers share the cores of this machine, and the exchanges of a large one slow down the start of the
new process. With ``gossamer launch``, which starts the dead worker again itself, the time begins with the SIGKILL.
All contenders take turns; every figure is the median over the turns. Torchft runs in an environment of its
own, which is made under build/. ``benchmarks/README.md`` keeps the results.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environments import ROOT, TORCHFT, CannotInstall
from tables import table
from torchft_coordinator import DEFAULT, TUNED, TUNED_SYNCHRONOUS, TorchftSettings, lighthouse
from worker_processes import POLL_S, Late, Reports, Worker, free_port, longest_step

WORKER = Path(__file__).with_name("comeback_worker.py")
WORKERS, KILLED = 4, 2
WAIT_S = 0.1
WARM_UP_STEPS = 10
LIMIT_S = 180.0
"""No stage takes so long."""

COLUMNS = {
    "main": "python",
    "torch": "import torch",
    "library": "import library",
    "model": "model, optimizer",
    "joined": "join",
    "exchanged": "exchange",
    "contributed": "contribution",
}
"""The stages that a worker reports, and what it does until then."""

Turn = dict[str, float]
"""Seconds from the start of the process to each stage, and the longest pause of the survivors."""


@dataclass(frozen=True)
class Contender:
    name: str
    """A method of ours, or ``torchft`` and which of its settings."""
    source: Path | None = None
    """The checkout whose ``src`` is used; None: torchft."""
    label: str = ""
    torchft: TorchftSettings = DEFAULT
    launched: bool = False
    """By ``gossamer launch``, which starts a worker that dies again."""


OURS = ("a2cid2", "gossip", "lasgd", "allreduce", "overlap")
REFERENCE = "torchft, tuned time-outs"
THEIRS = (
    Contender("torchft", label="torchft, default time-outs"),
    Contender("torchft-tuned", label=REFERENCE, torchft=TUNED),
    Contender("torchft-tuned-sync", label="torchft, tuned, synchronous quorum", torchft=TUNED_SYNCHRONOUS),
)


def measure(contender: Contender, torchft_python: Path | None, parameters: int) -> Turn:
    """Kill and restart one worker of a run; return the seconds to each stage of its new process."""
    if contender.launched:
        return measure_launched(contender, parameters)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(WORKERS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    job_spec = {
        "contender": contender.name,
        "wait_s": WAIT_S,
        "parameters": parameters,
        "workers": WORKERS,
        **contender.torchft.for_worker(),
    }
    python = sys.executable
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gossamer-comeback-")))
        if contender.source is None:
            assert torchft_python is not None
            python = str(torchft_python)
            job_spec["lighthouse"] = stack.enter_context(lighthouse(contender.torchft, torchft_python, folder))
        else:
            environment["PYTHONPATH"] = str(contender.source / "src")

        def start(rank: int, number: str) -> Worker:
            command = [python, str(WORKER), json.dumps({**job_spec, "rank": rank})]
            worker = Worker(command, {**environment, "RANK": str(rank)}, folder, number)
            stack.callback(worker.kill)
            return worker

        workers = [start(rank, str(rank)) for rank in range(WORKERS)]
        for worker in workers:
            worker.wait_for("step", WARM_UP_STEPS, LIMIT_S)
        workers[KILLED].kill()
        killed_at = time.time()
        back = start(KILLED, "back")
        back.wait_for("contributed", limit_s=LIMIT_S)
        times = {stage: back.times(stage)[0] - back.started for stage in COLUMNS}
        survivors = [worker for rank, worker in enumerate(workers) if rank != KILLED]
        return {**times, "pause": longest_step(survivors, killed_at)}


def measure_launched(contender: Contender, parameters: int) -> Turn:
    """Kill a worker that ``gossamer launch`` started; return the seconds from then to each stage of its new process."""
    assert contender.source is not None
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(contender.source / "src")}
    job_spec = {"contender": contender.name, "wait_s": WAIT_S, "parameters": parameters, "workers": WORKERS}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gossamer-comeback-")))
        command = [sys.executable, "-m", "gossamer", "launch", "--workers", str(WORKERS), "--logs", str(folder)]
        launcher = Worker([*command, str(WORKER), json.dumps(job_spec)], environment, folder, "launcher")
        stack.callback(launcher.kill)
        workers = [Reports(folder / f"{rank}.log") for rank in range(WORKERS)]

        def wait_for(worker: Reports, at: str, count: int = 1, since: float = 0.0) -> None:
            until = time.monotonic() + LIMIT_S
            while not worker.reports_file.exists() or len(worker.times(at, since)) < count:
                if launcher.ended() or time.monotonic() > until:
                    raise Late(f"no {at}:\n{launcher.errors()}")
                time.sleep(POLL_S)

        for worker in workers:
            wait_for(worker, "step", WARM_UP_STEPS)
        killed = workers[KILLED]
        (pid,) = [report["pid"] for report in killed.reports() if report["at"] == "main"]
        killed_at = time.time()
        os.kill(pid, signal.SIGKILL)
        wait_for(killed, "contributed", since=killed_at)
        times = {stage: killed.times(stage, killed_at)[0] - killed_at for stage in COLUMNS}
        survivors = [worker for rank, worker in enumerate(workers) if rank != KILLED]
        return {**times, "pause": longest_step(survivors, killed_at)}


def make_torchft(folder: Path | None) -> Path | None:
    """Install torchft in an environment of its own; return its Python, or None if that is impossible."""
    try:
        return TORCHFT.python(folder)
    except CannotInstall as error:
        print(f"torchft cannot be installed: {error}\n", file=sys.stderr)
        return None


def row(label: str, turns: list[Turn | None], references: list[Turn | None]) -> dict[str, Any]:
    """Return the medians over the turns that ended, and of the ratio to the reference in the same turn."""

    def median(figure: Callable[[Turn], float]) -> str:
        return f"{statistics.median(figure(turn) for turn in turns if turn is not None):.2f}"

    found: dict[str, Any] = {"contender": label}
    for before, (stage, column) in zip(("", *COLUMNS), COLUMNS.items(), strict=False):
        found[column] = median(lambda turn, before=before, stage=stage: turn[stage] - turn.get(before, 0.0))  # type: ignore[misc]
    found["beyond torch"] = median(beyond_torch)
    found["start to exchange"] = median(lambda turn: turn["exchanged"])
    found["start to contribution"] = f"**{median(lambda turn: turn['contributed'])}**"
    whole = [turn["contributed"] for turn in turns if turn is not None]
    found["range"] = f"{min(whole):.2f} to {max(whole):.2f}"
    pairs = [(turn, other) for turn, other in zip(turns, references, strict=True) if turn and other]
    ratios = [turn["contributed"] / other["contributed"] for turn, other in pairs]
    found["over torchft tuned"] = f"{statistics.median(ratios):.2f}" if ratios else "–"
    found["longest pause of the others"] = median(lambda turn: turn["pause"])
    return found


def beyond_torch(turn: Turn) -> float:
    """Return the seconds until the contribution without Python's start, ``import torch`` and the optimizer."""
    return turn["library"] - turn["torch"] + turn["contributed"] - turn["model"]


def measured(contender: Contender, torchft_python: Path | None, parameters: int) -> Turn | None:
    """Measure one turn; None if it did not end."""
    try:
        turn = measure(contender, torchft_python, parameters)
    except Late as error:
        print(f"{contender.label}: {error}", file=sys.stderr, flush=True)
        return None
    print(f"{contender.label}: {turn['contributed']:.2f} s", file=sys.stderr, flush=True)
    return turn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5, help="turns (default: 5)")
    parser.add_argument("--parameters", type=int, default=500_000, help="of the model (default: 500,000)")
    parser.add_argument("--only", default="", help="names of contenders, separated by commas")
    parser.add_argument("--before", type=Path, help="another checkout of Gossamer, measured beside this one")
    parser.add_argument("--torchft", type=Path, help="torchft's environment (default: build/torchft)")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    chosen = set(options.only.split(",")) if options.only else {*OURS, *(each.name for each in THEIRS)}
    contenders = []
    for name in OURS:
        if name in chosen and options.before is not None:
            contenders.append(Contender(name, options.before.resolve(), f"`{name}` before"))
        if name in chosen:
            contenders.append(Contender(name, ROOT, f"`{name}`"))
            contenders.append(Contender(name, ROOT, f"`{name}`, `gossamer launch`", launched=True))
    theirs = [contender for contender in THEIRS if contender.name in chosen]
    torchft_python = make_torchft(options.torchft) if theirs else None
    contenders += theirs if torchft_python is not None else []
    results: list[list[Turn | None]] = [[] for _ in contenders]
    for _ in range(options.turns):
        for contender, turns in zip(contenders, results, strict=True):
            turns.append(measured(contender, torchft_python, options.parameters))
    named = {contender.label: turns for contender, turns in zip(contenders, results, strict=True)}
    references = named.get(REFERENCE, [None] * options.turns)
    print(f"Seconds; {os.cpu_count()} cores, Python {platform.python_version()}, {options.turns} turns\n")
    print(table([row(label, turns, references) for label, turns in named.items() if any(turns)]))
    if options.json is not None:
        options.json.write_text(json.dumps(named, indent=1) + "\n")


if __name__ == "__main__":
    main()
