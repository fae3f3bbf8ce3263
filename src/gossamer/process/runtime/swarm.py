"""What ``gossamer.join`` returns: this worker's part in training one model on many workers."""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from torch import Tensor

from gossamer.errors import InputError
from gossamer.process.collectives.call import Call
from gossamer.process.collectives.membership import FOREGROUND, StepRetry
from gossamer.process.events import EventKind, Events
from gossamer.process.metrics import Metrics
from gossamer.process.runtime.final_average import FinalAverage
from gossamer.process.runtime.run_output import RunOutput, checked
from gossamer.process.runtime.shared_batches import shared_batches
from gossamer.process.runtime.worker_runtime import WorkerRuntime

Batch = TypeVar("Batch")


class Swarm:
    """The handle of this worker in a job. ``gossamer.join`` returns it.

    Used as a context manager it calls ``finish`` at the end of the block, or ``close`` if an exception ends it.
    """

    def __init__(self, runtime: WorkerRuntime, output: RunOutput | None = None) -> None:
        self._runtime, self._output = runtime, output
        self._averaging = False
        # The threads of a worker that is interrupted, or that never finishes, must not outlive its interpreter.
        atexit.register(self.close)

    @property
    def events(self) -> Events:
        """What happened to this worker, oldest first: workers that died or came back, messages refused, weights taken
        over. Each event has a time, a rank and a kind; ``str(event)`` is a line of text."""
        return self._runtime.state.events

    def metrics(self) -> Metrics:
        """Return this worker's counters: steps, exchanges, bytes sent, seconds waited, consensus, peers alive."""
        runtime = self._runtime
        runtime.metrics.lost = runtime.exchanges.peers.num_lost
        runtime.metrics.peers_alive = len(runtime.everybody) - 1 - len(runtime.heartbeats.lost)
        return runtime.metrics

    def log(self, **values: float | Tensor) -> None:
        """Log figures of this worker: numbers, or tensors with one element. GPU tensors are read later, elsewhere.

        ``loss`` is that of a mini-batch, ``accuracy`` that of this worker's own model; inside ``averaged()`` and after
        ``finish()`` both are the averaged model's. Other names go to the tracker and the worker's file. Without ``out``
        and ``tracker`` of ``join`` nothing is kept.
        """
        figures = checked(values)
        if self._output is not None:
            self._output.log(figures, of_average=self._averaging or self._runtime.lifecycle.closed)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this worker that is not in the model's and the optimizer's own ``state_dict``.

        Waits for communication in flight; the result contains its answers. It consists of tensors and JSON data in
        nested dictionaries, so ``torch.load(…, weights_only=True)`` reads it.
        """
        return {**self._runtime.state.state_dict(), "batches": self._runtime.num_batches_taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what ``state_dict`` returned.

        Every worker must load its own state, right after ``join`` and before its first step. Load the model and the
        optimizer too.
        """
        runtime = self._runtime
        if runtime.metrics.steps or runtime.driver.background_started:
            raise InputError("load_state_dict comes too late: call it right after join, before the first step")
        runtime.state.load_state_dict(state)
        runtime.num_batches_taken = state["batches"]
        runtime.store.compare_set("batches", str(runtime.num_batches_taken))
        if self._output is not None:
            self._output.resumed(runtime.worker.step)

    def batches(self, loader: Iterable[Batch], total_steps: int) -> Iterator[Batch]:
        """Yield mini-batches of ``loader`` until all workers together have done ``total_steps`` steps.

        Fast workers do more of them than slow ones. An exhausted loader is iterated again.
        """
        return shared_batches(self._runtime, loader, total_steps)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Evaluate the mean of all workers' models, including buffers, inside this block.

        All workers must enter it; with a method in lockstep, after the same step. At its end each worker gets its own
        model back. If a worker is lost meanwhile, the block runs with this worker's own model, and ``events`` says so.
        """
        runtime, flat_model = self._runtime, self._runtime.flat_model
        with runtime.state.lock:
            weights, buffers = flat_model.weights.clone(), flat_model.buffer_vector()
            x = flat_model.x.clone()
        # Communication in flight must not see the averaged weights.
        runtime.effects.drain()
        mean, mean_buffers = self._host_means(x, buffers)
        with runtime.state.lock:
            flat_model.load_weights(mean)
            flat_model.load_buffers(mean_buffers)
        self._averaging = True
        try:
            yield
        finally:
            self._averaging = False
            with runtime.state.lock:
                flat_model.load_weights(weights)
                flat_model.load_buffers(buffers)

    def mean(self, tensor: Tensor) -> Tensor:
        """Return the mean of a tensor of any shape over all workers, for example of a score. All must call it."""
        (mean,) = self._host_means(tensor.detach().flatten().double())
        return mean.to(tensor.dtype).reshape(tensor.shape).to(tensor.device)

    def _host_means(self, *vectors: Tensor) -> list[Tensor]:
        """Return the means in host memory; our own vectors if a worker is lost meanwhile."""
        groups = self._runtime.groups
        try:
            groups.averaged.begin()
            return [
                groups.mean(groups.averaged, FOREGROUND, vector.to("cpu"), Call("Mean", "swarm", at)).mean
                if len(vector)
                else vector
                for at, vector in enumerate(vectors)
            ]
        except StepRetry:
            # The others may have their mean already and have gone on: it cannot be repeated.
            text = "a worker was lost while the mean was taken: using our own model instead"
            self.events.add(EventKind.NOT_AVERAGED, text)
            return [vector.to("cpu", copy=True) for vector in vectors]

    def finish(self) -> None:
        """End the training: wait for the other workers alive and average all models exactly.

        Afterwards all workers have the same weights and buffers, and all connections and threads are closed. A worker
        that calls it early serves the exchanges of the others until they call it too.
        """
        if self._runtime.lifecycle.closed:
            return
        if self._output is not None:
            self._output.training_ended()
        self._runtime.finish_training()
        FinalAverage(self._runtime).run()
        if self._output is not None:
            self._output.finish()
        self.close()

    def close(self) -> None:
        """Leave the job at once, without the final average. The other workers continue."""
        self._close(None)

    def _close(self, error: BaseException | None) -> None:
        atexit.unregister(self.close)
        if self._output is not None:
            self._output.close(error)
        self._runtime.close()

    def __enter__(self) -> Swarm:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if kind is None:
            self.finish()
        else:
            self._close(error)
