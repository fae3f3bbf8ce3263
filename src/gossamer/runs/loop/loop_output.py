"""The run folder, the tracker and the trace of a loop of one's own, of one worker.

Every worker publishes its status and writes its own files, in its status thread. One of them also monitors the run
(``monitor_role``): it writes what is about all workers, and calls the tracker. What fails is an event, and training
goes on.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gossamer.errors import InputError, one_line
from gossamer.process.events import EventKind
from gossamer.process.runtime.swarm import Swarm
from gossamer.process.runtime.worker_runtime import WorkerRuntime
from gossamer.recording import Recorder
from gossamer.runs.loop.loop_log import LoopLog
from gossamer.runs.loop.loop_monitor import POLL_S, LoopMonitor
from gossamer.runs.loop.loop_request import LoopRequest, PathArgument, TrackerArgument
from gossamer.runs.output_agreement import agreed_problem
from gossamer.runs.recording_file import RecordingFile
from gossamer.runs.status import DONE, LEFT, STARTING, TRAINING, StatusBoard, WorkerStatus
from gossamer.runs.status_reporter import StatusReporter
from gossamer.vectors.vector_math import rounded_distance

CLOSING_S = 1.0
"""How long a monitor that leaves waits for the others to leave too: then the run is over."""


class LoopOutput:
    """What ``join`` leaves behind (a ``process.runtime.run_output.RunOutput``)."""

    def __init__(
        self, out: PathArgument | None, tracker: TrackerArgument | None, trace: bool | PathArgument, resume: bool
    ) -> None:
        self.request = LoopRequest(out, tracker, trace, resume)
        self._log = LoopLog()
        self._lock = threading.Lock()
        """Held while the status is changed."""
        self._running = self._trained = False
        self._left_because = ""
        self._error_before = getattr(sys, "last_value", None)
        self._own_weights: Tensor | None = None

    def recorder(self, rank: int) -> Recorder:
        return self.request.recorder(rank)

    def start(self, swarm: Swarm, runtime: WorkerRuntime, config: Mapping[str, Any]) -> None:
        """Begin to write, once all workers have joined. ``config``: the settings of the run (``loop_config``).

        Raise the same ``InputError`` on every worker if one of them cannot write its files.
        """
        try:
            self._start(swarm, runtime, config)
        except BaseException:
            swarm.close()
            raise

    def _start(self, swarm: Swarm, runtime: WorkerRuntime, config: Mapping[str, Any]) -> None:
        self._runtime, self._metrics, rank = runtime, swarm.metrics, runtime.rank
        self._board = StatusBoard(runtime.store)
        if runtime.came_back:
            self.request.resumed = False
        self._before = self._earlier_status() or WorkerStatus(rank)
        """The counts of an earlier process of this worker; its steps come with the checkpoint if the run is resumed."""
        if self.request.resumed:
            self._before.steps = 0
        self.status = WorkerStatus(rank, steps=self._before.steps)
        self.status.loss_sum, self.status.loss_count = self._before.loss_sum, self._before.loss_count
        self._monitor = LoopMonitor(self.request, runtime, self._board, config, self.say)
        problem = self._prepare()
        if not runtime.came_back:
            self._agree(problem)
        elif problem:
            self.say(f"{problem}; training goes on without it")
        self._reporter = StatusReporter(self._board, self.request.folder, self._open_recording(), self.status, self.say)
        self._began = time.monotonic()
        self._running = True
        self._monitor.begin()
        self._update()
        self._reporter.start(self._update, threading.Event(), runtime.state.events, self._at_end, POLL_S)

    def say(self, text: str) -> None:
        """Add an event, once: what fails is tried again."""
        # Messages about the run folder name the command's option.
        text = text.removeprefix("--")
        if all(str(event) != text for event in self._runtime.state.events):
            self._runtime.state.events.add(EventKind.NOT_WRITTEN, text)

    def _earlier_status(self) -> WorkerStatus | None:
        runtime, request = self._runtime, self.request
        if not runtime.came_back and not request.resumed:
            return None
        # The store may be new: it dies with the worker that hosts it.
        return self._board.get(runtime.rank) or request.last_status(runtime.rank)

    def _prepare(self) -> str:
        """Create the folder, on rank 0 load the tracker too; return what is wrong."""
        try:
            if self._runtime.came_back and self.request.folder is not None:
                self.request.folder.mkdir(parents=True, exist_ok=True)
            elif not self._runtime.came_back:
                self.request.make_folder()
            if self._runtime.rank == 0:
                self._monitor.open_tracker()
        except (InputError, OSError) as error:
            return one_line(error).removeprefix("--")
        return ""

    def _agree(self, problem: str) -> None:
        """Raise the same error on every worker if one of them has a problem."""
        line = agreed_problem(self._runtime, problem)
        if line:
            self.request.remove_empty_folder()
            raise InputError(line)

    def _open_recording(self) -> RecordingFile | None:
        request, runtime = self.request, self._runtime
        if request.folder is None:
            return None
        try:
            recording = RecordingFile(request.folder, runtime.rank, request.has_trace, runtime.recorder)
            recording.begin()
            return recording
        except (OSError, InputError) as error:
            self.say(f"{one_line(error)}; training goes on without a recording")
            return None

    # While it trains

    def log(self, values: Mapping[str, float | Tensor], of_average: bool) -> None:
        self._log.add(values, of_average)
        if self._trained and not self._running:
            # After finish: the summary is there already, and these are figures of the final model.
            with self._lock:
                self._log.update(self.status)
            self._monitor.amend(self.status)

    def resumed(self, step: int) -> None:
        with self._lock:
            self._before.steps = self.status.resumed_at = step

    def _update(self) -> None:
        """Bring the status up to date. Runs in the status thread."""
        with self._lock:
            self._log.update(self.status)
            if not self._trained:
                self._measure()
        self._monitor.poll()

    def _measure(self) -> None:
        status, before, metrics = self.status, self._before, self._metrics()
        if status.state == STARTING and (metrics.steps or not self.request.resumed):
            status.state = TRAINING
        status.steps = before.steps + metrics.steps
        status.seconds = before.seconds + time.monotonic() - self._began
        status.step_s = self._runtime.worker.step_s
        status.idle_s, status.consensus = before.idle_s + metrics.idle_s, metrics.consensus
        status.lost, status.peers_alive = before.lost + metrics.lost, metrics.peers_alive
        self._measure_exchanges()

    def _measure_exchanges(self) -> None:
        status, before, metrics = self.status, self._before, self._metrics()
        status.exchanges = before.exchanges + metrics.exchanges
        status.bytes_sent = before.bytes_sent + metrics.bytes_sent
        status.refused = before.refused + metrics.refused

    # The end

    def training_ended(self) -> None:
        with self._lock:
            self._measure()
            self._trained = True
        self._own_weights = self._runtime.flat_model.x.to("cpu", copy=True)

    def finish(self) -> None:
        self._reporter.stop()
        self._running = False
        with self._lock:
            self._log.update(self.status)
            self._measure_exchanges()
            assert self._own_weights is not None
            apart = rounded_distance(self._own_weights, self._runtime.flat_model.x.to("cpu"))
            self.status.consensus = apart if self._runtime.state.replica is None else self._metrics().consensus
            self.status.state = DONE
        self._own_weights = None
        self._reporter.publish_last()
        self._monitor.finish()

    def close(self, error: BaseException | None) -> None:
        if not self._running:
            return
        self._running = False
        last = getattr(sys, "last_value", None)
        if error is None and last is not self._error_before:
            # The interpreter ends because nobody caught this.
            error = last
        if error is not None and not isinstance(error, KeyboardInterrupt | SystemExit):
            self._left_because = one_line(error)
        # The status thread does the rest.
        self._reporter.stop()

    def _at_end(self) -> None:
        """Runs in the status thread when that ends."""
        if self._running:
            return
        with self._lock:
            self._log.update(self.status)
            if not self._trained:
                self._measure()
            self.status.state, self.status.interrupted, self.status.error = LEFT, True, self._left_because
        self._reporter.publish_last(ended=False)
        self._monitor.leave(CLOSING_S)
