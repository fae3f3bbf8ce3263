"""What ``gossamer.join`` returns: this worker's part in training one model on many workers."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from gossamer.errors import InputError
from gossamer.process.averages.final_average import FinalAverage
from gossamer.process.averages.gathering import (
    decode_tensor,
    decode_value,
    encode_tensor,
    encode_value,
    gather_bytes,
    mean_over_workers,
)
from gossamer.process.averages.model_average import COUNTS, EXCLUDED, ModelCopy, average_models
from gossamer.process.averages.recalibration import recalibrate
from gossamer.process.averages.series import UserSeries
from gossamer.process.data.worker_data import WorkerData
from gossamer.process.events import EventKind, Events
from gossamer.process.lifecycle import ignoring_interrupts
from gossamer.process.metrics import Metrics
from gossamer.process.roster.leaving import give_up, leave_for_good
from gossamer.process.runtime.run_output import RunOutput, checked
from gossamer.process.runtime.worker_runtime import WorkerRuntime

Batch = TypeVar("Batch")


class Swarm:
    """The handle of this worker in a job. ``gossamer.join`` returns it.

    Used as a context manager it calls ``finish`` at the end of the block, or ``close`` if an exception ends it.
    """

    def __init__(self, runtime: WorkerRuntime, output: RunOutput | None = None) -> None:
        self._runtime, self._output = runtime, output
        self._data = WorkerData(runtime)
        self._series = UserSeries(runtime)
        # The threads of a worker that is interrupted, or that never finishes, must not outlive its interpreter.
        atexit.register(self._close_at_exit)

    @property
    def rank(self) -> int:
        """The rank of this worker. One that comes later is given its rank when it joins."""
        return self._runtime.rank

    @property
    def events(self) -> Events:
        """What happened to this worker, oldest first: workers that died or came back, messages refused, weights taken
        over. Each event has a time, a rank and a kind; ``str(event)`` is a line of text."""
        return self._runtime.state.events

    @property
    def missing(self) -> list[int]:
        """After ``finish``: workers that are not in the final average. They died, left or could not be reached."""
        return self._runtime.missing

    def metrics(self) -> Metrics:
        """Return this worker's counters: steps, exchanges, bytes sent, seconds waited, consensus, peers alive."""
        runtime, metrics = self._runtime, self._runtime.metrics
        metrics.lost, metrics.refused_connections = runtime.exchanges.peers.num_lost, runtime.store.num_refused
        metrics.peers_alive = len(runtime.everybody) - 1 - len(runtime.heartbeats.lost)
        return metrics

    def log(self, **values: float | Tensor) -> None:
        """Log figures of this worker: numbers, or tensors with one element. GPU tensors are read later, elsewhere.

        ``loss`` is that of a mini-batch, ``accuracy`` that of this worker's own model; inside ``averaged()`` and after
        ``finish()`` both are the averaged model's. Other names go to the tracker and the worker's file. Without ``out``
        and ``tracker`` of ``join`` nothing is kept.
        """
        figures = checked(values)
        if self._output is not None:
            self._output.log(figures, of_average=self._runtime.state.averaging or self._runtime.lifecycle.closed)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this worker that is not in the model's and the optimizer's own ``state_dict``.

        Waits for communication in flight; the result contains its answers. It consists of tensors and JSON data in
        nested dictionaries, so ``torch.load(…, weights_only=True)`` reads it.
        """
        return {**self._runtime.state.state_dict(), **self._data.state_dict(), **self._shard()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what ``state_dict`` returned.

        Every worker must load its own state, right after ``join`` and before its first step. Load the model and the
        optimizer too.
        """
        runtime = self._runtime
        if runtime.metrics.steps or runtime.driver.background_started:
            raise InputError("load_state_dict comes too late: call it right after join, before the first step")
        own, given = self._shard().get("shard"), state.get("shard")
        if own != given:
            raise InputError(f"this state is of shard {given} and this rank is shard {own}: load the rank's own state")
        runtime.state.load_state_dict(state)
        self._data.load_state_dict(state)
        if self._output is not None:
            self._output.resumed(runtime.worker.step)

    def _shard(self) -> dict[str, list[int]]:
        """Return which part of a replica this rank has: its number, and how many there are."""
        replica = self._runtime.state.replica
        return {} if replica is None else {"shard": [replica.shard, replica.size]}

    # Data and schedules

    def _check_deals(self, name: str) -> None:
        if self._runtime.state.replica is not None:
            raise InputError(
                f"swarm.{name} deals data among workers of one rank: with mesh use a DistributedSampler, whose "
                "num_replicas and rank count the ranks that see data of their own"
            )

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
        self._check_deals("shard")
        return self._data.shard(data, batch_size, shuffle, drop_last)

    def epochs(self, total: int) -> Iterator[int]:
        """Yield the epochs 0 … ``total`` - 1, or those that are left: ``for epoch in swarm.epochs(10):``.

        After ``load_state_dict`` it goes on where the checkpoint was written, and in a worker that came back at the
        epoch of the others.
        """
        self._check_deals("epochs")
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
        self._check_deals("batches")
        return self._data.batches(loader, total_steps, epochs)

    def _deal_turns(self, total_steps: int) -> Iterator[None]:
        """Yield once per step of this worker until all workers together have made ``total_steps``."""
        return self._data.batches(itertools.repeat(None), total_steps, None)

    @property
    def progress(self) -> float:
        """The share of the work that is done: of all workers' steps in ``batches``, of its own epochs in ``epochs``."""
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

        All workers must enter it; with a method in lockstep, after the same step. Workers count as in ``finish``. At
        the end of the block each worker gets its own model back. A worker that is lost meanwhile does not count. If the
        others went on without this worker, the block runs with its own model, and ``events`` says so.
        """
        runtime, flat_model = self._runtime, self._runtime.flat_model
        self._series.check_open("averaged")
        with runtime.state.lock:
            runtime.state.watch.before_average(runtime.driver.begun)
            weights, own = flat_model.weights.clone(), ModelCopy.of(flat_model)
        # Communication in flight must not see the averaged weights.
        runtime.effects.drain()
        groups, standing = runtime.groups, COUNTS if own.is_finite(flat_model) else EXCLUDED
        mean = self._series.run(
            lambda: average_models(groups, groups.averaged, "swarm", own, runtime.state, standing), "averaged"
        )
        with runtime.state.lock:
            flat_model.load_weights((mean or own).x)
            (mean or own).load_buffers(flat_model)
        around, runtime.state.averaging = runtime.state.averaging, True
        try:
            yield
        finally:
            runtime.state.averaging = around
            with runtime.state.lock:
                flat_model.load_weights(weights)
                own.load_buffers(flat_model)

    def mean(self, tensor: Tensor) -> Tensor:
        """Return the mean of a tensor over all workers, for example of a score. All must call it, with the same shape.

        The mean of whole numbers is a floating-point tensor.
        """
        return mean_over_workers(self._runtime, self._series, tensor)

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
        message, replica = messages[chosen], self._runtime.state.replica
        return decode_value(message if replica is None else replica.inner.gather_bytes(message)[0], chosen)

    def gather_bytes(self, message: bytes) -> dict[int, bytes]:
        """Return the messages of all workers alive, by rank, as ``gather`` does with tensors."""
        return gather_bytes(self._runtime, self._series, message)

    def recalibrate(
        self,
        loader: Iterable[Batch],
        batches: int | None = None,
        forward: Callable[[Batch], object] | None = None,
    ) -> None:
        """Estimate the statistics of all batch-norm layers anew, from mini-batches of ``loader``.

        For the averaged model, after ``finish`` or inside ``averaged``: its statistics are an average of the workers',
        which belong to models that differ a little. The layers run in training mode, all others in evaluation mode,
        without gradients; the statistics become the mean over the mini-batches. It does not communicate: give every
        worker the same mini-batches, then their models stay the same.

        Args:
            loader: Mini-batches: tensors, tuples or lists whose first element is the input, or dictionaries of keyword
                arguments of the model. Tensors are moved to the model's device.
            batches: How many of them to use; ``None``: all.
            forward: Runs the model on one mini-batch, for mini-batches of other kinds.
        """
        recalibrate(self._runtime.flat_model.model, self._runtime.flat_model.device, loader, batches, forward)

    def finish(self) -> None:
        """End the training: wait for the other workers alive and average all models exactly.

        Afterwards all workers have the same weights and buffers, and all connections and threads are closed. A worker
        that calls it early serves the exchanges of the others until they call it too. It counts less in the average
        the longer ago its last steps were: weights by when it did its last step or exchange, buffers by its steps in
        the last quarter of the run.

        InputError, before any weight is replaced, if the model was trained but no step of the optimizer given to
        ``join`` was seen. The others then finish without this worker.
        """
        runtime = self._runtime
        if runtime.lifecycle.closed:
            return
        if runtime.state.averaging:
            raise InputError("finish() inside swarm.averaged(): each worker gets its own model back; leave it first")
        runtime.driver.abandon_step()
        try:
            with runtime.state.lock:
                runtime.state.watch.before_average(runtime.driver.begun)
        except InputError:
            self.close()
            raise
        if self._output is not None:
            self._output.training_ended()
        runtime.finish_training()
        FinalAverage(self._runtime).run()
        if self._output is not None:
            self._output.finish()
        self._close(None, finished=True)
        self._runtime.flat_model.release()

    def leave(self) -> None:
        """Leave the run for good, between two steps: the others share this worker's place and its data.

        It takes part in one last exchange or average, if that comes within ten seconds; otherwise ``events`` says so.
        Its model stays its own, and ``finish`` does nothing."""
        if self._runtime.lifecycle.closed:
            return
        if self._runtime.state.averaging:
            raise InputError("leave() inside swarm.averaged(): the others wait for this worker; leave the block first")
        if self._runtime.state.replica is not None:
            raise InputError("leave() is for workers of one rank: with mesh end the processes of the replica instead")
        leave_for_good(self._runtime)
        self._close(None)

    def give_up(self, rank: int) -> None:
        """Give up the place of a dead worker, which it keeps otherwise: it can only come as a new worker then."""
        give_up(self._runtime, rank)

    def close(self) -> None:
        """Leave the job at once, without the final average. The other workers continue."""
        self._close(None)

    def _close(self, error: BaseException | None, finished: bool = False) -> None:
        with ignoring_interrupts():
            if self._runtime.state.replica is not None:
                self._runtime.state.replica.watch.close(finished)
            if self._output is not None:
                self._output.close(error)
            if error is not None:
                self._runtime.peer_watch.publish_failure(error)
        atexit.unregister(self._close_at_exit)
        self._runtime.close()

    def _close_at_exit(self) -> None:
        """Say that the process ends without ``finish``, unless an exception ended it: its traceback says enough."""
        if self._runtime.state.forked:
            return  # the threads and connections are the parent's
        error = getattr(sys, "last_value", None)
        if error is None:
            text = (
                "this worker ends without swarm.finish(): its model is its own, not the average of all workers; "
                "call swarm.finish() after the loop, or swarm.close() to leave on purpose"
            )
            self.events.add(EventKind.UNFINISHED, text)
        self._close(error)

    def __enter__(self) -> Swarm:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if kind is None:
            self.finish()
        else:
            self._close(error)
