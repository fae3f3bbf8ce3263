"""What ``gossamer.join`` returns: this worker's part in training one model on many workers."""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from torch import Tensor

from gossamer.errors import InputError
from gossamer.process.collectives.call import Call
from gossamer.process.collectives.membership import FOREGROUND
from gossamer.process.events import Events
from gossamer.process.metrics import Metrics
from gossamer.process.runtime.final_average import FinalAverage
from gossamer.process.runtime.gathering import (
    decode_tensor,
    decode_value,
    encode_tensor,
    encode_value,
    gather_bytes,
)
from gossamer.process.runtime.series import UserSeries
from gossamer.process.runtime.shared_batches import shared_batches
from gossamer.process.runtime.worker_runtime import WorkerRuntime

Batch = TypeVar("Batch")


class Swarm:
    """The handle of this worker in a job. ``gossamer.join`` returns it.

    Used as a context manager it calls ``finish`` at the end of the block, or ``close`` if an exception ends it.
    """

    def __init__(self, runtime: WorkerRuntime) -> None:
        self._runtime = runtime
        self._series = UserSeries(runtime)
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

    def batches(self, loader: Iterable[Batch], total_steps: int) -> Iterator[Batch]:
        """Yield mini-batches of ``loader`` until all workers together have done ``total_steps`` steps.

        Fast workers do more of them than slow ones. An exhausted loader is iterated again.
        """
        return shared_batches(self._runtime, loader, total_steps)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Evaluate the mean of all workers' models, including buffers, inside this block.

        All workers must enter it; with a method in lockstep, after the same step. At its end each worker gets its own
        model back. A worker that is lost meanwhile does not count. If the others went on without this worker, the block
        runs with its own model, and ``events`` says so.
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
        try:
            yield
        finally:
            with runtime.state.lock:
                flat_model.load_weights(weights)
                flat_model.load_buffers(buffers)

    def mean(self, tensor: Tensor) -> Tensor:
        """Return the mean of a tensor of any shape over all workers, for example of a score. All must call it."""
        (mean,) = self._host_means(tensor.detach().flatten().double())
        return mean.to(tensor.dtype).reshape(tensor.shape).to(tensor.device)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all workers alive, in rank order. All must call it; shapes may differ.

        Workers that are done or dead are not waited for, and their tensors are left out. If the others went on without
        this worker, the list holds only its own tensor, and ``events`` says so.
        """
        messages = self.gather_bytes(encode_tensor(tensor))
        return [decode_tensor(message, rank).to(tensor.device) for rank, message in messages.items()]

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Return the ``value`` of worker ``source``, or of the first worker alive if that one is gone.

        All must call it. ``value`` is JSON data: numbers, strings, booleans, None, and lists and dictionaries of them.
        If the others went on without this worker, it gets its own value back, and ``events`` says so.
        """
        messages = self.gather_bytes(encode_value(value))
        chosen = source if source in messages else min(messages)
        return decode_value(messages[chosen], chosen)

    def gather_bytes(self, message: bytes) -> dict[int, bytes]:
        """Return the messages of all workers alive, by rank, as ``gather`` does with tensors."""
        return gather_bytes(self._runtime, self._series, message)

    def _host_means(self, *vectors: Tensor) -> list[Tensor]:
        """Return the means in host memory; our own vectors if the others went on without this worker."""
        groups = self._runtime.groups

        def means() -> list[Tensor]:
            return [
                groups.mean(groups.averaged, FOREGROUND, vector.to("cpu"), Call("Mean", "swarm", at)).mean
                if len(vector)
                else vector
                for at, vector in enumerate(vectors)
            ]

        averaged = self._series.run(means, "a mean was taken")
        return [vector.to("cpu", copy=True) for vector in vectors] if averaged is None else averaged

    def finish(self) -> None:
        """End the training: wait for the other workers alive and average all models exactly.

        Afterwards all workers have the same weights and buffers, and all connections and threads are closed. A worker
        that calls it early serves the exchanges of the others until they call it too.
        """
        if self._runtime.lifecycle.closed:
            return
        self._runtime.finish_training()
        FinalAverage(self._runtime).run()
        self.close()
        self._runtime.flat_model.release()

    def close(self) -> None:
        """Leave the job at once, without the final average. The other workers continue."""
        atexit.unregister(self.close)
        self._runtime.close()

    def __enter__(self) -> Swarm:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if kind is None:
            self.finish()
        else:
            self.close()
