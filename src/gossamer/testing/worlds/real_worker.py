"""One real worker of the checks: what each of their processes runs."""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import os
import signal
import time
import traceback
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gossamer.effects import MethodGenerator, yields
from gossamer.errors import InputError
from gossamer.methods import Method
from gossamer.methods.loading.method_contract import declared
from gossamer.process.runtime.swarm import Swarm
from gossamer.process.runtime.worker_runtime import WorkerRuntime
from gossamer.process.store.rank_info import RankInfo
from gossamer.testing.subject import Subject
from gossamer.testing.worlds.quadratic import flat, half_square, quadratic
from gossamer.train.launcher import orphaned

STEP_S = 0.002
"""How long a gradient takes at least, so that the background has time to exchange."""

WANTED_EXCHANGES = 2
PATIENCE_S = 60.0
"""Workers train until all have exchanged, but no longer than this."""

LAST_STEPS = 10
"""Steps that all workers make after the one that came back has exchanged."""


@dataclass(frozen=True)
class Job:
    """What a job of the checks is, as plain data."""

    script: str
    subject: dict[str, Any]
    graph: str
    workers: int
    steps: int
    """Steps in all, for methods whose run is the same every time; 0: until all have exchanged."""
    half: int
    """The step after which a checkpoint is taken."""
    seed: int = 5

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def main(text: str, rank_info: RankInfo) -> int:
    """Run as one worker of the job that ``text`` describes; return the exit code."""
    job = Job(**json.loads(text))
    board = rank_info.connect_store()
    board.set(f"started/{rank_info.rank}", "1")
    try:
        worker = RealWorker(job, rank_info, board)
        result = {"train": worker.train, "rejoin": worker.rejoin}[job.script]()
        board.set(f"result/{rank_info.rank}", json.dumps(result))
        return 0
    except Exception as error:
        board.set(f"failed/{rank_info.rank}", describe_failure(error))
        traceback.print_exc()
        return 1
    finally:
        board.close()


def describe_failure(error: Exception) -> str:
    message = " ".join(str(error).split())
    if isinstance(error, InputError):
        return message
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {message} ({os.path.basename(frame.filename)}, line {frame.lineno})"


class Session:
    """One join: a model, its optimizer, and an account of what happens to them."""

    def __init__(self, job: Job, rank_info: RankInfo, name: str) -> None:
        subject = Subject.from_reference(job.subject)
        self.task, self.rank = quadratic(job.workers, job.seed), rank_info.rank
        torch.manual_seed(job.seed)
        self.model = self.task.model()
        self.optimizer = subject.make_optimizer(self.model.parameters())
        method = subject.build(job.graph, job.workers, job.seed)
        method.check_optimizer(self.optimizer)
        watch_finish(method, self._note_end)
        self.added = torch.zeros_like(flat(self.optimizer))
        """Sum of what the optimizer has added."""
        self.conserved_end: Tensor | None = None
        # Hooks run in the order of their registration: these two just before and just after the optimizer itself.
        self.optimizer.register_step_post_hook(lambda *_: self._after_update())
        self.runtime = WorkerRuntime(
            self.model,
            self.optimizer,
            method,
            method.topology,
            dataclasses.replace(rank_info, prefix=f"{rank_info.prefix}{name}/"),
            job.seed,
        )
        self.optimizer.register_step_pre_hook(lambda *_: self._before_update())
        self.swarm, self.worker = Swarm(self.runtime), self.runtime.worker
        self.conserved_start = method.conserved(self.worker).clone()
        self._before = flat(self.optimizer)

    def _before_update(self) -> None:
        self._before = flat(self.optimizer)

    def _after_update(self) -> None:
        self.added += flat(self.optimizer) - self._before

    def _note_end(self, method: Method) -> None:
        self.conserved_end = method.conserved(self.worker).clone()

    def step(self) -> Tensor:
        """Take one step; return the worker's parameters after it."""
        if orphaned():
            raise SystemExit(1)
        self.optimizer.zero_grad()
        sample = slice(self.rank, self.rank + 1)
        half_square(self.model(self.task.train[0][sample]), self.task.train[1][sample]).backward()
        self.optimizer.step()
        return self.worker.x.clone()

    def weights(self) -> list[float]:
        return flat(self.optimizer).tolist()


def watch_finish(method: Method, seen: Any) -> None:
    """Let ``method`` call ``seen(method)`` at the end of its ``finish``."""
    inner = method.finish

    @yields(*declared(method, "finish"))
    def finish(worker: Any) -> MethodGenerator:
        if inner is not None:
            yield from inner(worker)
        seen(method)

    method.finish = finish


class RealWorker:
    def __init__(self, job: Job, rank_info: RankInfo, board: Any) -> None:
        self.job, self.rank_info, self.board = job, rank_info, board

    def train(self) -> dict[str, Any]:
        """Train in one go; then again, with a stop in the middle from which it goes on."""
        whole = Session(self.job, self.rank_info, "whole")
        trajectory = [x.tolist() for x in self._steps(whole)]
        whole.swarm.finish()
        metrics = whole.swarm.metrics()
        result = {
            "trajectory": trajectory,
            "steps": metrics.steps,
            "exchanges": metrics.exchanges,
            "bytes_sent": metrics.bytes_sent,
            "conserved_start": whole.conserved_start.tolist(),
            "conserved_end": None if whole.conserved_end is None else whole.conserved_end.tolist(),
            "added": whole.added.tolist(),
            "weights": whole.weights(),
        }
        return result | self._resume()

    def _steps(self, session: Session) -> list[Tensor]:
        if self.job.steps:
            return [session.step() for _ in range(self.job.steps)]
        ranks, seen = range(self.job.workers), []
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            seen.append(session.step())
            time.sleep(STEP_S)
            if session.swarm.metrics().exchanges >= WANTED_EXCHANGES:
                self.board.set(f"exchanged/{self.rank_info.rank}", "1")
                if all(self.board.get(f"exchanged/{rank}") for rank in ranks):
                    break
        return seen[:1]

    def _resume(self) -> dict[str, Any]:
        half = Session(self.job, self.rank_info, "half")
        for _ in range(self.job.half):
            half.step()
        state = half.swarm.state_dict()
        moments = copy.deepcopy(half.optimizer.state_dict())
        half.swarm.finish()
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        state = torch.load(file, weights_only=True)

        resumed = Session(self.job, self.rank_info, "resumed")
        resumed.optimizer.load_state_dict(moments)
        resumed.swarm.load_state_dict(copy.deepcopy(state))
        differing = [name for name in state if not same(state[name], resumed.swarm.state_dict()[name])]
        for _ in range(max(self.job.steps - self.job.half, 3)):
            resumed.step()
        resumed.swarm.finish()
        return {"differing": differing, "in_flight": sorted(state["in_flight"]), "resumed": resumed.weights()}

    def rejoin(self) -> dict[str, Any]:
        """Train; the last worker is killed, comes back, and all train until it has exchanged."""
        rank, victim = self.rank_info.rank, self.job.workers - 1
        came_back = self.board.get("killed") is not None
        session = Session(self.job, self.rank_info, "run")
        until, steps = time.monotonic() + PATIENCE_S, 0
        while time.monotonic() < until:
            session.step()
            steps += 1
            time.sleep(STEP_S)
            if rank == victim and not came_back and steps == self.job.half:
                self.board.set("killed", "1")
                os.kill(os.getpid(), signal.SIGKILL)
            if came_back and session.swarm.metrics().exchanges:
                self.board.compare_set("last", str(session.worker.step + LAST_STEPS))
            last = self.board.get("last")
            # Workers in lockstep are at the same step; the others stop when they hear of it.
            if last is not None and (not session.runtime.method.lockstep or session.worker.step >= int(last)):
                break
        exchanges = session.swarm.metrics().exchanges
        session.swarm.finish()
        return {"weights": session.weights(), "exchanges": exchanges, "came_back": came_back}


def same(one: Any, other: Any) -> bool:
    """Return whether two values of a checkpoint are equal."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
