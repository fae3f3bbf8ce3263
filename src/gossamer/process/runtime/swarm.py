"""What ``gossamer.join`` returns: this worker's part in training one model on many workers."""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from gossamer.errors import InputError
from gossamer.process.collectives.call import Call
from gossamer.process.collectives.membership import FOREGROUND, StepRetry
from gossamer.process.data.worker_data import WorkerData
from gossamer.process.events import EventKind, Events
from gossamer.process.metrics import Metrics
from gossamer.process.runtime.final_average import FinalAverage
from gossamer.process.runtime.worker_runtime import WorkerRuntime

Batch = TypeVar("Batch")


class Swarm:
    """The handle of this worker in a job. ``gossamer.join`` returns it.

    Used as a context manager it calls ``finish`` at the end of the block, or ``close`` if an exception ends it.
    """

    def __init__(self, runtime: WorkerRuntime) -> None:
        self._runtime = runtime
        self._data = WorkerData(runtime)
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
        return {**self._runtime.state.state_dict(), **self._data.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what ``state_dict`` returned.

        Every worker must load its own state, right after ``join`` and before its first step. Load the model and the
        optimizer too.
        """
        runtime = self._runtime
        if runtime.metrics.steps or runtime.driver.background_started:
            raise InputError("load_state_dict comes too late: call it right after join, before the first step")
        runtime.state.load_state_dict(state)
        self._data.load_state_dict(state)

    # Data and schedules

    def shard(
        self, data: Any, batch_size: int | None = None, *, shuffle: bool = True, drop_last: bool = False
    ) -> DataLoader[Any]:
        """Return a loader of this worker's share of the data.

        In every epoch each example goes to one worker, in an order that all workers draw from the seed of the run:
        there is no ``set_epoch`` to call. All workers get the same number of batches. When a worker dies, the others
        get its share from their next epoch on; when it comes back, it gets one again.

        Args:
            data: A ``DataLoader``, the same on all workers. The result has its settings: batch size, shuffling, worker
                processes, ``collate_fn``, its sampler or batch sampler. Or a data set, with ``batch_size``. Each worker
                reads all of an ``IterableDataset`` and keeps every n-th item.
            batch_size: Examples per batch and worker, if ``data`` is a data set.
            shuffle: Whether to shuffle a data set.
            drop_last: Whether to leave out a last batch that is smaller, if ``data`` is a data set.
        """
        return self._data.shard(data, batch_size, shuffle, drop_last)

    def epochs(self, total: int) -> Iterator[int]:
        """Yield the epochs 0 … ``total`` - 1, or those that are left: ``for epoch in swarm.epochs(10):``.

        After ``load_state_dict`` it goes on where the checkpoint was written, and in a worker that came back at the
        epoch of the others.
        """
        return self._data.epochs(total)

    def batches(
        self, loader: Iterable[Batch], total_steps: int | None = None, *, epochs: int | None = None
    ) -> Iterator[Batch]:
        """Yield mini-batches of ``loader`` until all workers together have done ``total_steps`` steps.

        Fast workers do more of them than slow ones. The batches of a ``DataLoader`` are dealt from one common order, so
        that no two workers get the same. Those of any other iterable, of a loader with a ``DistributedSampler`` and of
        one from ``shard`` are this worker's own; such a loader is iterated again when it is exhausted.

        Args:
            loader: The loader, the same on all workers.
            total_steps: Steps of all workers together.
            epochs: Instead of ``total_steps``: passes of all workers together over the loader.
        """
        return self._data.batches(loader, total_steps, epochs)

    @property
    def progress(self) -> float:
        """How much of the work is done, from 0 to 1: of the steps of all workers in ``batches``, of this worker's own
        epochs in ``epochs``. The batch that the loop works on counts as done."""
        return self._data.progress

    def schedule(
        self, shape: str | Callable[[float], float] = "cosine", *, warmup: float = 0.0, min_factor: float = 0.0
    ) -> LRScheduler:
        """Return a learning-rate schedule of the optimizer that follows ``progress``. Call its ``step()`` as usual.

        A schedule of a number of steps ends too early on fast workers and never on slow ones. This one is at its end
        on all workers when the work is done.

        Args:
            shape: ``cosine``, ``linear``, ``step``, ``constant``, or a function from progress to a factor on the
                learning rate.
            warmup: Share of the work over which the learning rate first rises from 0.
            min_factor: The factor at the end.
        """
        return self._data.schedule(shape, warmup, min_factor)

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
        self._runtime.finish_training()
        FinalAverage(self._runtime).run()
        self.close()

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
