"""How soon a killed worker is back, beside torchft. Prints a markdown table.

    python benchmarks/comeback.py                                  # all contenders, 5 turns: 15 minutes
    python benchmarks/comeback.py --only a2cid2,torchft --turns 3
    python benchmarks/comeback.py --before ../other/checkout       # our methods of another checkout beside these

Four workers train with steps of 100 ms. One gets SIGKILL, its process is started again at once, and what is measured is
the time from that start until it has contributed: until a gradient that it computed has been averaged with others. The
model is small: the workers share the cores of this machine, and the exchanges of a large one slow down the start of the
new process. All contenders take turns; every figure is the median over the turns. Torchft runs in an environment of its
own, which is made under build/. ``benchmarks/README.md`` keeps the results.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gossamer.process.store.rank_info import free_port
from tables import table

ROOT = Path(__file__).resolve().parents[1]
WORKER = Path(__file__).with_name("comeback_worker.py")
WORKERS, KILLED = 4, 2
WAIT_S = 0.1
WARM_UP_STEPS = 10
LIMIT_S = 180.0
"""No stage takes so long."""

TORCHFT = ("torchft==0.2.0", "torch==2.13.0", "numpy")
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
    timeouts: dict[str, float] = field(default_factory=dict)
    """Of torchft's manager, in seconds."""
    use_async_quorum: bool = True
    lighthouse: tuple[str, ...] = ()
    """Options of torchft's coordinator."""


OURS = ("a2cid2", "gossip", "lasgd", "allreduce", "overlap")
TUNED = {"timeout": 2.0, "quorum_timeout": 10.0, "connect_timeout": 5.0, "heartbeat_interval": 0.05}
TUNED_LIGHTHOUSE = ("--join_timeout_ms", "1000", "--quorum_tick_ms", "10", "--heartbeat_timeout_ms", "1000")
REFERENCE = "torchft, tuned time-outs"
THEIRS = (
    Contender("torchft", label="torchft, default time-outs"),
    Contender("torchft-tuned", label=REFERENCE, timeouts=TUNED, lighthouse=TUNED_LIGHTHOUSE),
    Contender(
        "torchft-tuned-sync",
        label="torchft, tuned, synchronous quorum",
        timeouts=TUNED,
        lighthouse=TUNED_LIGHTHOUSE,
        use_async_quorum=False,
    ),
)


class Late(Exception):
    """A worker did not reach a stage in time."""


class Worker:
    """A process and the file to which it reports."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], folder: Path, number: str) -> None:
        self.reports_file, self.errors_file = folder / f"{number}.jsonl", folder / f"{number}.log"
        self.started = time.time()
        with self.reports_file.open("w") as out, self.errors_file.open("w") as errors:
            self.process = subprocess.Popen(command, stdout=out, stderr=errors, env=environment)

    def reports(self) -> list[dict[str, Any]]:
        lines = self.reports_file.read_text().split("\n")[:-1]
        return [json.loads(line) for line in lines]

    def times(self, at: str) -> list[float]:
        return [report["time"] for report in self.reports() if report["at"] == at]

    def wait_for(self, at: str, count: int = 1) -> None:
        until = time.monotonic() + LIMIT_S
        while len(self.times(at)) < count:
            if time.monotonic() > until or self.process.poll() is not None:
                errors = self.errors_file.read_text()[-2000:]
                raise Late(f"no {at} in {LIMIT_S:.0f} s, exit status {self.process.poll()}:\n{errors}")
            time.sleep(0.05)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def lighthouse(contender: Contender, python: Path, folder: Path) -> Iterator[str]:
    """Run torchft's coordinator and yield its address."""
    port = free_port()
    command = [str(python.with_name("torchft_lighthouse")), "--bind", f"[::]:{port}", "--min_replicas", "1"]
    with (folder / "lighthouse.log").open("w") as log:
        process = subprocess.Popen([*command, *contender.lighthouse], stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def measure(contender: Contender, torchft_python: Path | None, parameters: int) -> Turn:
    """Kill and restart one worker of a run; return the seconds to each stage of its new process."""
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
        "timeouts": contender.timeouts,
        "use_async_quorum": contender.use_async_quorum,
    }
    python = sys.executable
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gossamer-comeback-")))
        if contender.source is None:
            assert torchft_python is not None
            python = str(torchft_python)
            job_spec["lighthouse"] = stack.enter_context(lighthouse(contender, torchft_python, folder))
        else:
            environment["PYTHONPATH"] = str(contender.source / "src")

        def start(rank: int, number: str) -> Worker:
            command = [python, str(WORKER), json.dumps({**job_spec, "rank": rank})]
            worker = Worker(command, {**environment, "RANK": str(rank)}, folder, number)
            stack.callback(worker.kill)
            return worker

        workers = [start(rank, str(rank)) for rank in range(WORKERS)]
        for worker in workers:
            worker.wait_for("step", WARM_UP_STEPS)
        workers[KILLED].kill()
        killed_at = time.time()
        back = start(KILLED, "back")
        back.wait_for("contributed")
        times = {stage: back.times(stage)[0] - back.started for stage in COLUMNS}
        survivors = [worker for rank, worker in enumerate(workers) if rank != KILLED]
        return {**times, "pause": max(longest_pause(worker, killed_at) for worker in survivors)}


def longest_pause(worker: Worker, since: float) -> float:
    """Return the longest time between two steps of a survivor, up to now."""
    steps = [report["time"] for report in worker.reports() if report["at"].startswith("step")]
    steps = [*[at for at in steps if at < since][-1:], *(at for at in steps if at >= since), time.time()]
    return max(after - before for before, after in itertools.pairwise(steps))


def make_torchft(folder: Path) -> Path | None:
    """Install torchft in an environment of its own; return its Python, or None if that is impossible."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    if not (folder / "bin" / "torchft_lighthouse").exists():
        install = [str(python), "-m", "pip", "install", "--quiet", *TORCHFT]
        done = subprocess.run(install, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"torchft cannot be installed: {done.stderr.strip()[-500:]}\n", file=sys.stderr)
            return None
    return python


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
    parser.add_argument("--torchft", type=Path, default=ROOT / "build" / "torchft", help="torchft's environment")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    chosen = set(options.only.split(",")) if options.only else {*OURS, *(each.name for each in THEIRS)}
    contenders = []
    for name in OURS:
        if name in chosen and options.before is not None:
            contenders.append(Contender(name, options.before.resolve(), f"`{name}` before"))
        if name in chosen:
            contenders.append(Contender(name, ROOT, f"`{name}`"))
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
