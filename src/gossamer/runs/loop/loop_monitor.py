"""The monitor of a loop of one's own: in the worker that has the role, a thread that writes the run folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from gossamer.errors import InputError, one_line
from gossamer.process.runtime.worker_runtime import WorkerRuntime
from gossamer.recording.trace import join
from gossamer.report.tracking import Tracker, scalars
from gossamer.results import Point, WorkerPoint
from gossamer.runs.loop.loop_config import shown_command
from gossamer.runs.loop.loop_request import LoopRequest
from gossamer.runs.monitor import RunFacts, RunMonitor, TrainingResult
from gossamer.runs.monitor_role import MonitorRole
from gossamer.runs.monitor_thread import LAST_POLL_S, MonitorThread
from gossamer.runs.point_writer import PointWriter
from gossamer.runs.run_folder import RUN, TRACE, WORKERS, RunFolder, save_model
from gossamer.runs.status import DONE, LEFT, STARTING, TRAINING, StatusBoard, WorkerStatus
from gossamer.vectors.flat import is_sharded

POLL_S = 0.5
"""How often a worker publishes its status, and the monitor reads that of all. It takes time from the loop."""

READ_ALL = "output/read"
"""The entry of a monitor that has read the last status of all workers."""

LAST_STATUS_S = 10.0
"""How long the monitor waits for the others' last status, which comes right after the final average."""

LAST_TO_LEAVE_S = 2.0
"""How long a worker that leaves tries to take over from a monitor that has left right before it."""

PUBLISHES_S = 2.0
"""A dead worker whose status is newer than this is there again."""


class LoopMonitor:
    """This worker's part in monitoring a run: all of it, or nothing as long as another worker has the role."""

    def __init__(
        self,
        request: LoopRequest,
        runtime: WorkerRuntime,
        board: StatusBoard,
        config: Mapping[str, Any],
        say: Callable[[str], None],
    ) -> None:
        """``config``: the settings of the run; ``say``: called with events."""
        self.request, self.runtime, self.board, self.config, self._say = request, runtime, board, config, say
        self.role = MonitorRole(runtime.rank, runtime.store, runtime.heartbeats, self._has_left)
        self._tracker: Tracker | None = None
        self._tracker_opened = self._tracker_failed = False
        self._monitor: RunMonitor | None = None
        self._thread: MonitorThread | None = None
        self._writer: PointWriter | None = None
        self._result: TrainingResult | None = None
        self._processes: dict[int, tuple[str, int]] = {}
        """The process of each worker."""

    def _has_left(self, rank: int) -> bool:
        status = self.board.get(rank)
        return status is not None and status.state in (DONE, LEFT)

    def open_tracker(self) -> None:
        if not self._tracker_opened:
            self._tracker_opened = True
            self._tracker = self.request.open_tracker()

    def begin(self) -> None:
        """Take the role at the start of a run: rank 0 has it then."""
        if self.runtime.rank == 0 and not self.runtime.came_back:
            self.role.check(take_over_s=0.0)

    def poll(self) -> None:
        """Take the role over, or give it up, if that is due. Runs in the status thread."""
        if self.role.poll():
            self._begin()
        else:
            self._step_down()

    def _step_down(self) -> None:
        """Stop monitoring, if this worker does: another one goes on."""
        if self._thread is not None:
            self._thread.stop()
            self._thread = None
        if self._writer is not None and self._writer.run_folder is not None:
            self._writer.run_folder.leave()

    # Monitoring

    def _begin(self, timeout_s: float = 0.0) -> None:
        """Start to monitor, if this worker does not yet and all others have published their status.

        With a timeout, wait for those and then start in any case.
        """
        if self._thread is not None:
            return
        until = time.monotonic() + timeout_s
        while not self._know_history():
            if not timeout_s:
                return
            if time.monotonic() > until:
                break
            time.sleep(LAST_POLL_S)
        request, runtime = self.request, self.runtime
        published = [self.board.get(rank) for rank in range(runtime.everybody.value.largest + 1)]
        try:
            self.open_tracker()
        except InputError as error:
            self._say(f"{error}; training goes on without it")
        history, run_folder = request.history(), None
        if request.resumed:
            total = sum(status.resumed_at for status in published if status is not None)
            history = [point for point in history if point.total_steps <= total]
        is_continued = request.resumed or runtime.came_back or runtime.rank != 0
        if request.folder is not None:
            is_continued = is_continued or (request.folder / RUN).exists()
            run_folder = RunFolder(
                request.folder,
                self.config,
                shown_command(),
                method=runtime.method.name,
                world="process",
                history=history if is_continued else None,
            )
        self._writer = PointWriter(run_folder, self._track, self._say)
        facts = RunFacts(
            method=runtime.method.name,
            topology=str(self.config["topology"]),
            workers=runtime.everybody.value.first,
            seed=int(self.config["seed"]),
            pairwise=runtime.method.pairwise,
        )
        origin = runtime.recorder.origin
        self._monitor = RunMonitor(facts, self.board, self._writer, history, began=origin)
        if is_continued:
            # The store may be new: it dies with the worker that hosts it.
            self._monitor.take_over([status or request.last_status(rank) for rank, status in enumerate(published)])
        self._thread = MonitorThread(self._monitor, self._why_gone, self._show, POLL_S)

    def _know_history(self) -> bool:
        """Return whether all workers of a resumed run have loaded their checkpoints: how much of it counts is known."""
        if not self.request.resumed:
            return True
        living = [rank for rank in self.runtime.everybody if rank not in self.runtime.heartbeats.lost]
        published = [self.board.get(rank) for rank in living]
        return all(status is not None and status.state != STARTING for status in published)

    def _why_gone(self, rank: int) -> str:
        return "no heartbeat" if rank in self.runtime.heartbeats.lost else ""

    def _show(self, events: list[str]) -> None:
        """Note who has left and who is back, and put all events into this worker's recording: those have times."""
        monitor = self._monitor
        assert monitor is not None
        for status in monitor.status:
            rank, process = status.rank, (status.host, status.pid)
            if status.state == LEFT and rank not in monitor.gone:
                events.append(monitor.mark_gone(rank, status.error or "left"))
            is_new = self._processes.get(rank, process) != process
            publishes = status.state == TRAINING and monitor.silent_s[rank] < PUBLISHES_S and not self._why_gone(rank)
            if publishes and (is_new or rank in monitor.gone):
                events.append(monitor.mark_restarted(rank))
            if status.state != STARTING:
                self._processes[rank] = process
        for event in events:
            self.runtime.recorder.add_event(time.monotonic(), event)

    def _track(self, point: Point, workers: Sequence[WorkerPoint]) -> None:
        if self._tracker is None:
            return
        try:
            self._tracker(point.steps, scalars(point, workers))
        except Exception as error:
            if not self._tracker_failed:
                self._tracker_failed = True
                self._say(f"the tracker failed: {one_line(error)}; training goes on, and later errors are not reported")

    # The end

    def finish(self) -> None:
        """Complete the run folder, if this worker monitors the run, or nobody alive does."""
        store = self.runtime.store
        if self._takes_part(LAST_STATUS_S):
            assert self._thread is not None
            self._thread.finish(LAST_STATUS_S)
            store.set(READ_ALL, "1")
            self._complete(self.runtime.flat_model.model)
        elif store.hosted_here:
            # The monitor has to read the last status of all workers there.
            until = time.monotonic() + LAST_STATUS_S
            while time.monotonic() < until and not self.role.is_vacant() and store.get(READ_ALL) is None:
                time.sleep(0.02)

    def leave(self, timeout_s: float) -> None:
        """Leave before the end. If all others leave within ``timeout_s``, the run is over; else another monitors it."""
        until = time.monotonic() + LAST_TO_LEAVE_S
        while not self._takes_part(timeout_s):
            # The monitor has left just now, and its store with it: that this worker is the last one is known soon.
            if not self.role.is_vacant() or time.monotonic() > until:
                return
            time.sleep(LAST_POLL_S)
        assert self._thread is not None
        if self._thread.wait(timeout_s):
            self._thread.finish(0.0)
            self._complete(None)
        else:
            self._step_down()
            self.role.release()

    def _takes_part(self, timeout_s: float) -> bool:
        """Return whether this worker monitors the run, at its end; a short run may end before that has begun."""
        if not self.role.check(take_over_s=0.0):
            self._step_down()
            return False
        self._begin(timeout_s)
        return self._thread is not None

    def _complete(self, model: nn.Module | None) -> None:
        """Write the final average, the summary and the joined trace."""
        assert self._monitor is not None
        done = any(status.state == DONE for status in self._monitor.status)
        errors = [f"worker {status.rank}: {status.error}" for status in self._monitor.status if status.error]
        self._result = self._monitor.result("" if done or not errors else errors[0])
        self._result.interrupted = not done and not errors
        for part in (lambda: self._save(model), self._end, self._join_traces):
            try:
                part()
            except InputError as error:
                self._say(str(error))

    def _save(self, model: nn.Module | None) -> None:
        if self.request.folder is not None and model is not None and self._result is not None:
            about = {name: str(self.config[name]) for name in ("method", "topology", "workers", "seed")}
            save_model(self.request.folder, _weights(model), {**about, "steps": str(self._result.final.steps)})

    def _end(self) -> None:
        if self._writer is not None and self._result is not None:
            self._writer.end(self._result)

    def _join_traces(self) -> None:
        folder, path = self.request.folder, self.request.trace_path
        traces = [] if folder is None else sorted((folder / WORKERS).glob(f"*.{TRACE}"))
        if path is not None and traces:
            join(traces, path)

    def amend(self, status: WorkerStatus) -> None:
        """Add figures of the final average, which the loop logged after the end, to the summary."""
        if self._result is None:
            return
        final = replace(self._result.final, loss=status.loss, accuracy=status.accuracy)
        self._result.final = self._result.history[-1] = final
        try:
            self._end()
        except InputError as error:
            self._say(str(error))


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the model's state_dict in host memory."""
    tensors = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    if any(map(is_sharded, tensors.values())):
        raise InputError(
            "the run folder gets no model.safetensors, since this rank has a part of each weight only: save the model "
            "after finish(), with torch.distributed.checkpoint"
        )
    return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
