"""What communication costs real workers, beside torch DDP and decent-dp. Prints markdown tables.

    python benchmarks/process.py                          # everything, three quarters of an hour
    python benchmarks/process.py --only steps,straggler   # some of it

Four workers, a process each, on this machine; where a link is slow, each is a host of its own (a network namespace:
needs root and iproute2). The same processes train with all contenders in turns, so a busy moment meets all of them;
every ratio is taken within a turn, every figure is the median of ``--repeats`` turns. Writes nothing but what --json
asks for, and the environment in which decent-dp is installed, under build/. ``benchmarks/README.md`` keeps the results.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gossamer.methods import METHODS
from gossamer.process.store.rank_info import free_port
from hosts import Hosts
from tables import table

ROOT = Path(__file__).resolve().parents[1]
WORKER = Path(__file__).with_name("process_worker.py")
WORKERS = 4
SIZE = 5_000_000
WAIT_S = 0.1
SLOW_MBIT = 200
GIGABIT_MBIT = 1000
STRAGGLER = (3, 5.0)
DECENT_DP = "decent-dp==0.2.3"
ANSWER_S = 240.0
"""No turn takes so long."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Contender:
    """A way to train."""

    name: str
    optimizer: str = "sgd"
    lockstep: bool = True
    cycle: int = 8
    """After so many steps everything recurs."""
    settings: dict[str, Any] = field(default_factory=dict)
    warm_up_steps: int = 4

    @property
    def alone(self) -> str:
        """What it is compared with: the same optimizer and nothing joined."""
        return f"none {self.optimizer}"

    @property
    def key(self) -> str:
        return {"none": self.alone, "ddp": self.ddp}.get(self.name, self.name)

    @property
    def ddp(self) -> str:
        """DDP with the same optimizer; with SGD beside accumadam, which it is not measured with."""
        return "ddp adam" if self.optimizer == "adam" else "ddp"


def contenders(*names: str) -> list[Contender]:
    """All of them, or those named."""
    period = 32
    divisible = {"ratio": 128.0, "period": period, "warmup": 2}
    found = [
        Contender("none", lockstep=False),
        Contender("ddp"),
        Contender("allreduce"),
        Contender("localsgd"),
        Contender("lasgd", lockstep=False),
        Contender("gossip", lockstep=False),
        Contender("a2cid2", lockstep=False),
        Contender("none", "accumadam", lockstep=False),
        Contender("overlap", "accumadam"),
        Contender("decent-dp", "accumadam"),
        Contender("none", "adam", lockstep=False),
        Contender("ddp", "adam"),
        Contender("divisible", "adam", cycle=period, settings=divisible, warm_up_steps=period + 4),
    ]
    assert all(one.name in METHODS or one.name in ("none", "ddp", "decent-dp") for one in found)
    return [one for one in found if not names or one.key in names or (one.name == "none" and "none" in names)]


class Crew:
    """Four workers that wait for orders, on this machine or on hosts of their own."""

    def __init__(self, python: Path, hosts: Hosts | None, errors: Any, environment: dict[str, str]) -> None:
        port = str(free_port())
        self.errors = errors
        self.number = 0
        self.processes: list[subprocess.Popen[str]] = []
        for rank in range(WORKERS):
            variables = {
                "RANK": str(rank),
                "WORLD_SIZE": str(WORKERS),
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": hosts.address(0) if hosts else "127.0.0.1",
                "MASTER_PORT": port,
                "GLOO_SOCKET_IFNAME": "eth0" if hosts else "lo",
                "OMP_NUM_THREADS": "1",
                **environment,
            }
            command = [*(hosts.prefix(rank) if hosts else []), str(python), str(WORKER)]
            self.processes.append(
                subprocess.Popen(
                    command,
                    env={**os.environ, **variables},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
            )

    def turn(self, job_spec: dict[str, Any]) -> list[dict[str, Any]]:
        """Let all workers carry out a job; their answers by rank."""
        self.number += 1
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps({**job_spec, "number": self.number}) + "\n")
            process.stdin.flush()
        # Nothing is waited for for ever: workers that are killed answer with an empty line.
        watch = threading.Timer(ANSWER_S, self.kill)
        watch.start()
        try:
            return [self._answer(process, job_spec) for process in self.processes]
        finally:
            watch.cancel()

    def _answer(self, process: subprocess.Popen[str], job_spec: dict[str, Any]) -> dict[str, Any]:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            self.errors.seek(0)
            sys.exit(
                f"a worker ended, or took longer than {ANSWER_S:.0f} s, with {job_spec}:\n{self.errors.read()[-3000:]}"
            )
        return dict(json.loads(line))

    def kill(self) -> None:
        for process in self.processes:
            process.kill()

    def end(self) -> None:
        self.kill()
        for process in self.processes:
            process.communicate()


@contextlib.contextmanager
def crews(
    rate_mbit: float | None, with_decent_dp: bool = False, **environment: str
) -> Iterator[Callable[[dict[str, Any]], list[dict[str, Any]]]]:
    """Workers behind links of the given rate; gives the function that hands them a job."""
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(Hosts(WORKERS, rate_mbit)) if rate_mbit is not None else None
        errors = stack.enter_context(tempfile.TemporaryFile("w+"))
        made: dict[bool, Crew] = {}
        for decent in (False, True) if with_decent_dp else (False,):
            python = decent_dp_environment() if decent else Path(sys.executable)
            made[decent] = Crew(python, hosts, errors, environment)
            stack.callback(made[decent].end)
        yield lambda job_spec: made[job_spec["contender"] == "decent-dp"].turn(job_spec)


def decent_dp_environment() -> Path:
    """The Python of an environment with decent-dp and the torch of the constraints; made on first use."""
    folder = ROOT / "build" / DECENT_DP
    python = folder / "bin" / "python"
    done = folder / "installed"
    if not done.exists():
        print(f"installing {DECENT_DP} into {folder.relative_to(ROOT)}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "-c", ROOT / "constraints.txt", DECENT_DP, "numpy"], check=True)
        done.touch()
    return python


def order_for(one: Contender, args: argparse.Namespace, **job: Any) -> dict[str, Any]:
    return {
        "contender": one.name,
        "optimizer": one.optimizer,
        "lr": 1e-3,
        "lockstep": one.lockstep,
        "cycle": one.cycle,
        "settings": one.settings,
        "warm_up_steps": one.warm_up_steps,
        "seed": args.seed,
        **job,
    }


def speeds(args: argparse.Namespace, rate_mbit: float | None, chosen: list[Contender], **job: Any) -> list[Row]:
    """Steps per second of all contenders in turns, against the same optimizer alone; the sum over the workers."""
    turns: dict[str, list[Row]] = {one.key: [] for one in chosen}
    with crews(rate_mbit, any(one.name == "decent-dp" for one in chosen)) as turn:
        for _ in range(args.repeats):
            for one in chosen:
                answers = turn(order_for(one, args, job="speed", seconds=args.seconds, **job))
                made = {name: sum(answer[name] for answer in answers) for name in answers[0]}
                turns[one.key].append(made)
    rows = []
    for one in chosen:
        mine, alone = turns[one.key], turns[one.alone]
        rates = [turn["steps_per_s"] for turn in mine]
        shares = [a["steps_per_s"] / b["steps_per_s"] for a, b in zip(mine, alone, strict=True)]
        beside_ddp, beside_same = (
            [a["steps_per_s"] / b["steps_per_s"] for a, b in zip(mine, turns[ddp], strict=True)]
            for ddp in ("ddp", one.ddp)
        )
        rows.append(
            {
                "contender": "no communication" if one.name == "none" else one.name,
                "optimizer": one.optimizer,
                "steps/s, all workers": statistics.median(rates),
                "share of no communication": statistics.median(shares),
                "spread": f"{min(shares):.3f}–{max(shares):.3f}",
                "times DDP with SGD": statistics.median(beside_ddp),
                "times DDP, same optimizer": statistics.median(beside_same) if one.optimizer != "accumadam" else "–",
                "exchanges/step": statistics.median(turn["exchanges_per_step"] / WORKERS for turn in mine),
                "CPU ms/step": 1e3 * statistics.median(turn["cpu_s_per_step"] / WORKERS for turn in mine),
            }
        )
    return rows


WAITING = {"model": "waiting", "size": SIZE, "wait_s": WAIT_S}


def steps(args: argparse.Namespace) -> list[Row]:
    """No network limit; a gradient takes a fixed wait of 100 ms."""
    return speeds(args, None, chosen(args), **WAITING)


def slow(args: argparse.Namespace) -> list[Row]:
    """Every worker behind a link of 200 Mbit/s; a gradient takes a fixed wait of 100 ms."""
    return speeds(args, SLOW_MBIT, chosen(args), **WAITING)


def gigabit(args: argparse.Namespace) -> list[Row]:
    """Every worker behind a link of 1 Gbit/s; a gradient takes a fixed wait of 100 ms."""
    return speeds(args, GIGABIT_MBIT, chosen(args), **WAITING)


def straggler(args: argparse.Namespace) -> list[Row]:
    """No network limit; a gradient takes a fixed wait of 100 ms, that of one worker 500 ms."""
    return speeds(args, None, chosen(args), straggler=STRAGGLER, **WAITING)


def compute(args: argparse.Namespace) -> list[Row]:
    """No network limit; real gradients of an MLP of 5.0 M parameters, batch 64, one thread each: four workers on as
    many cores as there are."""
    return speeds(args, None, chosen(args), model="mlp", batch=64)


def chosen(args: argparse.Namespace) -> list[Contender]:
    """The contenders that the user wants to see, and what they are compared with."""
    names = args.contenders.split(",") if args.contenders else []
    named = contenders(*names)
    needed = {"ddp", *(one.alone for one in named), *(one.ddp for one in named)}
    return contenders(*needed, *names) if names else named


TASKS = {
    "digits": {"steps": 60, "keep_every": 2, "batch": 32, "target": 0.95},
    "mnist": {"steps": 300, "keep_every": 10, "batch": 32, "target": 0.95},
}
LEARNING_RATES = {"sgd": 0.03, "accumadam": 1e-3, "adam": 1e-3}
FREE = 4
"""Where nobody waits, worker 0 may make so many times as many steps."""


def accuracy(args: argparse.Namespace) -> list[Row]:
    """Seconds until worker 0's own model has 95% of the test set right; real gradients."""
    settings: list[tuple[str, float | None, dict[str, Any]]] = [
        (f"{SLOW_MBIT} Mbit/s", SLOW_MBIT, {}),
        ("one worker 5 times slower", None, {"straggler": STRAGGLER}),
    ]
    rows = []
    for setting, rate_mbit, extra in settings:
        with crews(rate_mbit) as turn:
            for task, job in TASKS.items():
                results = {}
                for one in contenders("ddp", *METHODS):
                    job_spec = order_for(one, args, job="accuracy", task=task, data=args.data, **job, **extra)
                    job_spec["lr"] = LEARNING_RATES[one.optimizer]
                    if not one.lockstep:
                        job_spec["steps"] *= FREE
                        job_spec["keep_every"] *= 2
                    results[one.name] = turn(job_spec)[0]
                ddp = results["ddp"]["reached"]
                for name, result in results.items():
                    reached = result["reached"]
                    row = {"setting": setting, "task": task, "contender": name}
                    row["seconds"] = (
                        reached["seconds"] if reached else f"not in {result['steps']} steps ({result['best']:.1%})"
                    )
                    row["steps of worker 0"] = reached["steps"] if reached else "–"
                    row["times as fast as DDP"] = ddp["seconds"] / reached["seconds"] if reached and ddp else "–"
                    rows.append(row)
    return rows


DOCUMENTED = {
    "allreduce": (0, 2),
    "localsgd": (0, 1),
    "overlap": (1, 0),
    "divisible": (8, 2),
    "lasgd": (2, 1),
    "gossip": (2, 1),
    "a2cid2": (3, 1),
}
"""Vectors of extra memory by the methods' docstrings, and by ``docs/your-own-loop.md`` for real workers beyond that:
the vector that gradients are taken at, the gradient as one vector, the mean."""


def memory(args: argparse.Namespace) -> list[Row]:
    """Peak memory of a worker beyond that of the same loop with nothing joined, in vectors of P numbers."""
    # Large tensors then come from the system and go back to it at once: the allocator keeps nothing.
    with crews(None, MALLOC_MMAP_THRESHOLD_="262144", MALLOC_ARENA_MAX="1") as turn:
        peaks: dict[str, float] = {}
        job = {"job": "memory", "seconds": args.seconds, "model": "waiting", "size": SIZE, "wait_s": 0.03}
        found = [one for one in contenders() if one.name != "decent-dp"]
        for one in found:
            # The first time libraries are loaded too.
            turn(order_for(one, args, **job))
            answers = turn(order_for(one, args, **job))
            peaks[one.key] = statistics.median(answer["peak_bytes"] for answer in answers) / (4 * SIZE)
    return [
        {
            "contender": one.key,
            "peak, vectors": peaks[one.key],
            "no communication, vectors": peaks[one.alone],
            "extra, vectors": peaks[one.key] - peaks[one.alone],
            "its docstring": DOCUMENTED.get(one.name, ("–", "–"))[0],
            "and real workers": DOCUMENTED.get(one.name, ("–", "–"))[1],
        }
        for one in found
        if one.name != "none"
    ]


SECTIONS: dict[str, Callable[[argparse.Namespace], list[Row]]] = {
    "steps": steps,
    "slow": slow,
    "gigabit": gigabit,
    "straggler": straggler,
    "compute": compute,
    "accuracy": accuracy,
    "memory": memory,
}


def machine(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "workers": WORKERS,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "seed": args.seed,
        "repeats": args.repeats,
        "seconds a turn": args.seconds,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default=",".join(SECTIONS), help="some of " + ", ".join(SECTIONS))
    parser.add_argument(
        "--contenders", default="", help="some of none, ddp, ddp adam, decent-dp and the methods; default: all"
    )
    parser.add_argument("--repeats", type=int, default=3, help="turns of every contender")
    parser.add_argument("--seconds", type=float, default=3.0, help="that a turn is measured, at least")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", default=str(ROOT.parent / "shared" / "data"), help="the folder that holds mnist/")
    parser.add_argument("--json", metavar="FILE", help="write the results there too")
    args = parser.parse_args(arguments)
    # Whoever ends this process, its workers and hosts go too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    unknown = set(args.only.split(",")) - set(SECTIONS)
    if unknown:
        parser.error(f"no section {', '.join(sorted(unknown))}: expected some of {', '.join(SECTIONS)}")
    results: dict[str, Any] = {"machine": machine(args)}
    print(", ".join(f"{name} {value}" for name, value in results["machine"].items()), flush=True)
    for section in args.only.split(","):
        measure = SECTIONS[section]
        results[section] = measure(args)
        print(f"\n{(measure.__doc__ or '').strip()}\n\n{table(results[section])}", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
