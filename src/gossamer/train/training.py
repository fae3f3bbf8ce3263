"""One worker's part in a run, from joining the others to its last report."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict

import torch

from gossamer.config import Run
from gossamer.process.place import Place
from gossamer.process.swarm import Swarm
from gossamer.runfolder import WORKERS, save_model
from gossamer.seeds import stream
from gossamer.train.gate import Gate
from gossamer.train.job import Job, LossMeter
from gossamer.train.order import Order
from gossamer.train.pace import Pace
from gossamer.train.report import DONE, TRAINING, Board, Report
from gossamer.virtual.simulation import plain

TELL_S = 0.2
"""How often a worker reports, beside its training."""

LINE_S = 1.0
"""The least time between two lines of a worker's own metrics; long runs take them further apart."""

ROUNDING = 1e-6
"""How far the mean of models that are alike may be from them, relative to their length."""

HOPELESS = 10
"""So many losses in a row that are not finite: nobody's weights have helped."""


class Training:
    """What one worker does in one run."""

    def __init__(self, order: Order, run: Run, place: Place, board: Board, gate: Gate, orphaned: Callable[[], bool]):
        self.order, self.run, self.place, self.board, self.gate = order, run, place, board, gate
        self._orphaned = orphaned
        self.report = Report(place.rank, steps=order.made_before)
        self.job = Job(run, place.rank)
        c = run.config
        rng = stream(c.seed, "compute", place.rank)
        self.pace = Pace(order.compute(c.workers), order.waits, place.rank, rng, gate.asked)
        self.losses = LossMeter(self.job.device)
        self.lockstep = run.method().lockstep
        self.swarm: Swarm | None = None
        self._began = 0.0
        self._trained = False
        self._measuring = threading.Lock()
        self._ended = threading.Event()
        self.news: list[str] = []
        self._next_line_s = 0.0

    # The training itself

    def whole(self) -> Report:
        """Join, train, average, look at the outcome; returns the last report, which is on the board too."""
        self.board.put(self.report)
        swarm = self.swarm = Swarm(
            self.job.model, self.job.optimizer, self.run.method(), self.run.topology, self.place, self.run.config.seed
        )
        try:
            self._start_apart()
            self._began = time.monotonic()
            self.report.state = TRAINING
            teller = threading.Thread(target=self._tell, name="gossamer-tell", daemon=True)
            teller.start()
            for _ in self._turns():
                number = self.made
                if not self.gate.passes(number):
                    break
                self._step(number)
            self._end(swarm)
        except BaseException:
            if self._began:
                self._measure()
            swarm.close()
            raise
        finally:
            self._ended.set()
        teller.join()
        self._say()
        return self.report

    @property
    def made(self) -> int:
        """The steps of this worker so far, those before a restart included."""
        assert self.swarm is not None
        return self.swarm.worker.step + (0 if self.lockstep else self.order.made_before)

    def _turns(self) -> Iterator[None]:
        """One per step that this worker shall make."""
        assert self.swarm is not None
        c = self.run.config
        if not self.lockstep:
            yield from self.swarm.batches(itertools.repeat(None), total_steps=c.steps * c.workers)
        while self.lockstep and self.made < c.steps:
            yield None

    def _step(self, number: int) -> None:
        began = time.monotonic()
        loss = self.job.gradient(number)
        if loss is not None:
            self.losses.add(loss)
        if not self.pace.natural:
            self.job.settle()
            self.pace.keep(began)
        self.job.update(number)
        every = self.run.config.eval_every
        if every and self.made % every == 0 and self.made > number:
            self.report.own_loss, self.report.own_accuracy = self.job.scores()

    def _start_apart(self) -> None:
        """Tasks may start every worker from a place of its own: move there from where all are."""
        task = self.run.task
        if task.start is not None and self.swarm is not None:
            away = torch.as_tensor(task.start(self.place.rank, stream(self.run.config.seed, "start", self.place.rank)))
            with self.swarm._lock:
                for vector in {id(v): v for v in (self.swarm.binding.x, self.swarm.binding.weights)}.values():
                    vector.add_(away.to(vector))

    def _end(self, swarm: Swarm) -> None:
        """The last average, and what the test set says before and after it."""
        self.job.settle()
        with self._measuring:
            self._measure()
            self._trained = True
        self.report.interrupted = self.gate.asked.is_set() and self.report.diverged_at is None
        self.report.own_loss, self.report.own_accuracy = self.job.scores()
        own = _vector(self.job)
        swarm.finish()
        self.report.consensus = _distance(own, _vector(self.job))
        self.report.loss, self.report.accuracy = self.job.scores()
        self.report.state = DONE
        folder = self.order.path
        if folder is not None and self.board.agree("model", self.place.rank) == self.place.rank:
            save_model(folder, self.job.weights(), self._facts())

    def _facts(self) -> dict[str, str]:
        c = self.run.config
        facts = {"method": c.method, "topology": c.topology, "workers": c.workers, "seed": c.seed, "steps": c.steps}
        return {name: str(value) for name, value in facts.items()}

    # Beside the training

    def _tell(self) -> None:
        assert self.swarm is not None
        while not self._ended.wait(TELL_S if not self.gate.asked.is_set() else 0.02):
            if self._orphaned():
                self.gate.asked.set()
            with self._measuring:
                if not self._trained:
                    self._measure()
            if self.losses.bad_in_a_row() >= HOPELESS and self.report.diverged_at is None:
                self.report.diverged_at = self.made
                self.gate.asked.set()
            self._put()
            self._line()
            self.gate.tend(self.board, self._gone)

    def _gone(self, rank: int) -> bool:
        """Whether a worker takes part in nothing any more."""
        assert self.swarm is not None
        said = self.board.get(rank)
        return self.swarm.beats.dead(rank) or (said is not None and said.state == DONE)

    def _measure(self) -> None:
        """Bring the report up to date; only while training, since the end has figures of its own."""
        assert self.swarm is not None
        report, metrics = self.report, self.swarm.metrics()
        report.steps, report.seconds = self.made, time.monotonic() - self._began
        report.idle_s, report.consensus = metrics.idle_s, metrics.consensus
        report.loss_sum, report.loss_count = self.losses.sum(), self.losses.count()
        report.exchanges, report.bytes_sent = metrics.exchanges, metrics.bytes_sent
        report.peers_alive, report.lost, report.refused = metrics.peers_alive, metrics.lost, metrics.refused

    def _line(self) -> None:
        """Add a line to this worker's own metrics, now and then."""
        if self.report.seconds >= self._next_line_s:
            self._next_line_s = self.report.seconds + max(LINE_S, self.report.seconds / 200)
            self._write_line()

    def _write_line(self) -> None:
        folder = self.order.path
        if folder is None:
            return
        line = {name: value for name, value in asdict(self.report).items() if name != "news"}
        path = folder / WORKERS / f"{self.place.rank}.jsonl"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(plain(line)) + "\n")
        except OSError as error:
            self._tell_once(f"{path} cannot be written to: {error.strerror}; training goes on")

    def _tell_once(self, news: str) -> None:
        if news not in self.news:
            self.news.append(news)

    def _say(self) -> None:
        """The last word."""
        self._write_line()
        self._put()

    def _put(self) -> None:
        assert self.swarm is not None
        self.report.news = [*self.swarm.news, *self.news]
        self.board.put(self.report)


def _vector(job: Job) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in job.model.parameters() if p.requires_grad])


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """How far apart two models are; 0 for those that are alike up to the rounding of a mean."""
    distance = float(torch.linalg.vector_norm(a - b))
    return distance if distance > ROUNDING * float(torch.linalg.vector_norm(b)) else 0.0
