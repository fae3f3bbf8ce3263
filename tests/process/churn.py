"""Churn: six workers of which one is killed every few seconds, most often the one with the store, and started again.

Run by ``make churn``; prints a line for each method. A worker that is alive must never stand still for long, the one
that is never killed must not grow, and all must end with the same weights. A gap between two steps that is too long is
explained: what each thread of that worker was at, its events, and who had been killed when.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from fault_checks import bound_s
from real_workers import RealWorker, RealWorkers, Report
from step_watch import StepWatch
from torch import nn

from gossamer.api import join
from gossamer.methods import METHODS

WORKERS = 6
STAYS = WORKERS - 1
"""This one is never killed."""

STORE_SHARE = 0.35
"""So many of the kills are of rank 0, which hosts the store."""

STEP_S = 0.05
SAMPLE_S = 1.0
END_S = 120.0
KEPT_LINES = 60


# A worker


class Watch(StepWatch):
    """Also writes down what all threads are at when no step has ended for too long."""

    def __init__(self, limit_s: float, file: Any) -> None:
        super().__init__()
        self.limit_s, self.file = limit_s, file
        self._dumped_for = 0.0

    def ticked(self, now: float) -> None:
        if now - self.last > 0.8 * self.limit_s and self._dumped_for != self.last:
            self._dumped_for = self.last
            self.file.seek(0)
            self.file.truncate()
            faulthandler.dump_traceback(self.file)


def sizes() -> dict[str, float]:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    megabytes = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    counts = {name: len(os.listdir(f"/proc/self/{folder}")) for name, folder in (("threads", "task"), ("fds", "fd"))}
    return {"MB": megabytes, **counts}


def train(rank: int, environment: dict[str, str], order: dict[str, Any], out: Connection) -> None:
    os.environ.update(environment, RANK=str(rank))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Linear(16, 4)
    targets = torch.randn(16, 4)
    kind = torch.optim.Adam if METHODS[order["method"]].preferred_optimizer == "adam" else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.01)
    began = time.monotonic()
    swarm = join(model, optimizer, method=order["method"], topology="ring")
    out.send({"at": "joined", "after_s": time.monotonic() - began})
    with tempfile.TemporaryFile("w+") as stacks:
        watch = Watch(order["limit_s"], stacks)
        watch.start()
        longest_s, sampled = 0.0, time.monotonic()
        generator = torch.Generator().manual_seed(rank)
        while not order["enough"].exists():
            inputs = torch.randn(16, 16, generator=generator)
            nn.functional.mse_loss(model(inputs), inputs @ targets).backward()
            time.sleep(STEP_S)
            optimizer.step()
            optimizer.zero_grad()
            gap_s, starved_s = watch.stepped()
            longest_s = max(longest_s, gap_s - starved_s)
            now = time.monotonic()
            if gap_s > order["limit_s"]:
                stacks.seek(0)
                events = [f"{time.time() - event.time:.1f} s ago: {event}" for event in list(swarm.events)[-12:]]
                out.send({"at": "gap", "s": gap_s, "starved_s": starved_s, "ended": time.time(), "events": events})
                out.send({"at": "stacks", "text": stacks.read()})
            if now - sampled > SAMPLE_S:
                sampled = now
                out.send({"at": "sample", **sizes(), "longest": longest_s, "steps": swarm.metrics().steps})
    swarm.finish()
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    error = float((model.weight.detach().T - targets).abs().max())
    out.send({"at": "finished", "weights": weights.tolist(), "error": error, "missing": swarm.missing})


# All of them


class Churn:
    """The churn of one method."""

    def __init__(self, method: str, minutes: float, every_s: float, seed: int, folder: Path) -> None:
        self.method, self.minutes, self.every_s = method, minutes, every_s
        self.limit_s = bound_s(method)
        self.rng = random.Random(f"{seed} {method}")
        self.enough = folder / f"{method}-enough"
        self.kills: list[tuple[float, int]] = []
        self.gaps: list[Report] = []
        self.samples: list[Report] = []
        self.longest_s = self.slowest_join_s = 0.0
        self.log: list[str] = []

    def run(self) -> bool:
        """Return whether all is well; ``summary`` and ``log`` say more."""
        order = {"method": self.method, "enough": self.enough, "limit_s": self.limit_s}
        with RealWorkers(WORKERS, script=train, **order) as workers:
            for worker in workers:
                worker.at("joined")
            until = time.monotonic() + 60 * self.minutes
            while time.monotonic() < until:
                self._read(workers, self.rng.expovariate(1 / self.every_s))
                victim = 0 if self.rng.random() < STORE_SHARE else self.rng.randrange(1, STAYS)
                self.kills.append((time.time(), victim))
                self._read_one(workers[victim])
                workers.kill(victim)
                workers.restart(victim)
            for worker in workers:
                self._until(worker, "sample")
            self.enough.touch()
            ends = [self._until(worker, "finished") for worker in workers]
            for worker in workers:
                worker.process.join(END_S)
        self.same = all(end["weights"] == ends[0]["weights"] for end in ends)
        self.complete = all(end["missing"] == [] for end in ends)
        self.error = ends[0]["error"]
        return self.same and self.complete and not self._gaps_of_ours() and self._is_flat()

    def _gaps_of_ours(self) -> list[Report]:
        """Gaps that are too long also without the time in which the machine did not let the process run."""
        return [gap for gap in self.gaps if gap["s"] - gap["starved_s"] > self.limit_s]

    def _is_flat(self) -> bool:
        first, last = self._first_and_last()
        return (
            last["MB"] < first["MB"] + 20
            and last["threads"] <= first["threads"] + 2
            and last["fds"] <= first["fds"] + 8
        )

    def _first_and_last(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the medians over the second tenth of the time, when all has been used once, and over the last."""
        tenth = max(1, len(self.samples) // 10)
        parts = self.samples[tenth : 2 * tenth], self.samples[-tenth:]
        first, last = ({name: sorted(s[name] for s in part)[len(part) // 2] for name in sizes()} for part in parts)
        return first, last

    def _read(self, workers: RealWorkers, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0:
            for worker in workers:
                self._read_one(worker)
            time.sleep(min(left_s, 0.1))

    def _read_one(self, worker: RealWorker) -> None:
        while worker.waiting():
            self._take(worker, worker.next())

    def _until(self, worker: RealWorker, what: str) -> Report:
        until = time.monotonic() + END_S
        while worker.waiting(max(0.0, until - time.monotonic())):
            report = worker.next()
            self._take(worker, report)
            if report["at"] == what:
                return report
        raise AssertionError(f"worker {worker.rank} is not at {what}: {worker.doing()}")

    def _take(self, worker: RealWorker, report: Report) -> None:
        match report["at"]:
            case "joined":
                self.slowest_join_s = max(self.slowest_join_s, report["after_s"])
            case "gap":
                self.gaps.append(report)
                began = report["ended"] - report["s"]
                near = [
                    f"{at - began:+.1f} s worker {rank}" for at, rank in self.kills if -8 < at - began < report["s"]
                ]
                self.log.append(
                    f"{self.method}: worker {worker.rank} stood still for {report['s']:.1f} s "
                    f"({report['starved_s']:.1f} s without a core); killed, from its beginning: {', '.join(near)}"
                )
                self.log += report["events"]
            case "stacks":
                self.log += report["text"].splitlines()[:KEPT_LINES]
            case "sample":
                self.longest_s = max(self.longest_s, report["longest"])
                if worker.rank == STAYS:
                    self.samples.append(report)
        # Nobody asks again: hours of samples would be kept.
        worker.reports.clear()

    def summary(self) -> str:
        first, last = self._first_and_last()
        of_store, ours = sum(rank == 0 for _, rank in self.kills), len(self._gaps_of_ours())
        longest_s = max(sample["longest"] for sample in self.samples)
        parts = [
            f"{self.method}: {self.minutes:g} minutes, {len(self.kills)} kills ({of_store} of the store's host)",
            f"{self.samples[-1]['steps']} steps of worker {STAYS}",
            f"longest gap {longest_s:.2f} s, of all workers {self.longest_s:.2f}",
            f"above {self.limit_s:g} s: {ours}, and {len(self.gaps) - ours} for want of a core",
            f"slowest join {self.slowest_join_s:.1f} s",
            *(f"{name} {first[name]:.0f} to {last[name]:.0f}" for name in first),
            f"weights {'identical' if self.same else 'DIFFER'}, error {self.error:.3f}",
        ]
        return "; ".join(parts)


@contextmanager
def temporary_folder(chosen: Path | None) -> Iterator[Path]:
    if chosen is not None:
        chosen.mkdir(parents=True, exist_ok=True)
        yield chosen
    else:
        with tempfile.TemporaryDirectory() as made:
            yield Path(made)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--at-once", type=int, default=2, help="methods side by side")
    parser.add_argument("--every", type=float, default=2.5, help="seconds between two kills, on average")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="where explanations of gaps are kept")
    args = parser.parse_args()

    def run(method: str) -> bool:
        churn = Churn(method, args.minutes, args.every, args.seed, folder)
        try:
            good = churn.run()
            print(churn.summary(), "ok" if good else "FAILED", flush=True)
        except AssertionError as error:
            good = False
            print(f"{method}: FAILED: {error}", flush=True)
        if args.output is not None and churn.log:
            (folder / f"{method}.log").write_text("\n".join(churn.log))
        elif not good:
            print("\n".join(churn.log), flush=True)
        churn.enough.unlink(missing_ok=True)
        return good

    with temporary_folder(args.output) as folder, ThreadPoolExecutor(args.at_once) as executor:
        return 0 if all(list(executor.map(run, args.methods.split(",")))) else 1


if __name__ == "__main__":
    sys.exit(main())
