"""Sends the gradient while the backward pass still computes the rest of it.

For methods whose ``step`` begins with the mean of the gradient (``gossamer.effects.yields``). A hook copies each
parameter's gradient into the flat vector as soon as it is there. A bucket whose gradients are all there is sent; the
last one waits for the optimizer's step.

The mean is that of the gradients which the optimizer would see. Whatever changes them after they were sent (a second
backward pass, clipping, a ``GradScaler``) is noticed at the step: what was sent is compared with what is there. Then
what was sent does not hold, all workers learn so with the last bucket, and they average the gradients again as a whole.
In the next steps they do so at once: twice as many steps each time.

Workers need not agree on when a bucket is sent, only on the order of buckets, and on the steps in which there are
buckets: these follow from what they have all seen in this generation of the membership. If a worker dies, the gradients
are still in ``parameter.grad``, and the step is void as with any other collective.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait

from torch import Tensor

from gossamer.effects import Mean
from gossamer.errors import MethodError
from gossamer.process.collectives.bucket_mean import Bucket, BucketMean, divide
from gossamer.process.collectives.call import Call
from gossamer.process.collectives.groups import TAIL, Groups
from gossamer.process.collectives.membership import ASYNC, FOREGROUND
from gossamer.process.daemon_executor import DaemonExecutor
from gossamer.process.lifecycle import CommAborted
from gossamer.process.runtime.worker_state import WorkerState, is_finite

BUCKET_BYTES = 1 << 22
"""Size of a bucket, unless a parameter is larger. Nothing overlaps with the last one, so it should be small; but each
takes messages around the ring, which wait for the slowest worker."""

MAX_AT_ONCE = 2
"""So many buckets travel at once, each over connections of its own. With one at a time the network idles while the last
piece of a bucket goes around the ring."""

MAX_PAUSE = 1 << 10
"""After what was sent did not hold, nothing is sent early for at most so many steps."""


def make_early_gradient(state: WorkerState, groups: Groups, topic: str) -> EarlyGradient | None:
    """Return what sends the gradients of this worker early; None if they are a single bucket or on a GPU.

    On a GPU every bucket would have to be copied to the host beside the backward pass.
    """
    flat = state.flat_model.flat
    if state.flat_model.device.type != "cpu":
        return None
    buckets = divide([part.end for part in flat.parts], BUCKET_BYTES // flat.dtype.itemsize)
    return EarlyGradient(state, groups, topic, buckets) if len(buckets) > 1 else None


class EarlyGradient:
    """Averages the gradients of one worker, in buckets."""

    def __init__(self, state: WorkerState, groups: Groups, topic: str, buckets: list[Bucket]) -> None:
        self.state, self.groups, self.topic = state, groups, topic
        self._flat_model, self._buckets = state.flat_model, buckets
        flat = self._flat_model.flat
        self.buffer = state.staging.host_buffer(f"{FOREGROUND} {topic} mean", self._flat_model.x, flat.size + TAIL)
        """Memory for the mean and what travels along with it; the mean as a whole uses it too."""
        channels = [f"{ASYNC} {topic} {number}" for number in range(MAX_AT_ONCE)]
        self._means = [BucketMean(groups, channel, self.buffer) for channel in channels]
        """Of one buffer, with a channel each: the buckets take turns with them."""
        self._executors = [DaemonExecutor(f"gossamer-{channel.replace(' ', '-')}") for channel in channels]
        turn = (len(buckets) - 1) % MAX_AT_ONCE
        self._last_mean, self.last_channel = self._means[turn], channels[turn]
        """Of the last bucket."""
        self._layout = f"{flat.size} {str(flat.dtype).removeprefix('torch.')}"
        self._lock = threading.Lock()
        self._generation = -1
        """The generation of the membership of which the following is known."""
        self._pause = self._resume_at = 0
        """For how many steps nothing was sent early, the last time that it did not hold; the step from which on it is
        tried again."""
        self._version = 0
        """Of the vector of gradients, at the beginning of the step: how often it was written to."""
        self.reset()
        self._remove_hooks = self._register_hooks()

    def _register_hooks(self) -> Callable[[], object]:
        # The hooks must not keep this worker, and all its vectors, alive.
        found = weakref.ref(self)

        def hook(index: int) -> Callable[[Tensor], None]:
            def on_gradient(parameter: Tensor) -> None:
                early = found()
                if early is not None:
                    early.on_gradient(index)

            return on_gradient

        parameters = enumerate(self._flat_model.parameters)
        hooks = [parameter.register_post_accumulate_grad_hook(hook(index)) for index, parameter in parameters]

        def remove() -> None:
            for handle in hooks:
                handle.remove()

        finalize = weakref.finalize(self, remove)
        finalize.atexit = False
        return finalize

    def reset(self) -> None:
        """A step is over: the next gradient begins."""
        self._packed: set[int] = set()
        """Parameters whose gradients were copied into the vector."""
        self._sent: list[Future[bool]] = []
        """The buckets that were sent. The result says whether what was sent holds, and the mean is finite."""
        self._holds = True
        """As far as is known, no gradient that was copied has changed since."""

    @property
    def active(self) -> bool:
        """Whether the gradient of this step travels in buckets: the same on all workers."""
        generation = self.groups.train.generation
        if generation != self._generation:
            self._generation = generation
            self._pause = self._resume_at = 0
        return self.state.worker.step >= self._resume_at

    # Backward

    def on_gradient(self, index: int) -> None:
        """A gradient was added to that of a parameter. Runs in the thread of the backward pass."""
        if self.state.lifecycle.done or self.state.in_step or self.state.forked or not self.active:
            return
        with self._lock:
            if index in self._packed:
                # A second backward pass: it is not known before whether there will be one.
                self._holds = False
            if not self._holds:
                return
            self._packed.add(index)
            self._flat_model.pack_gradient(index)
            while len(self._sent) < len(self._buckets) - 1 and self._is_complete(len(self._sent)):
                self._send()

    def _is_complete(self, number: int) -> bool:
        end = self._buckets[number - 1].first if number else len(self._flat_model.parameters)
        return all(index in self._packed for index in range(self._buckets[number].first, end))

    def _send(self) -> None:
        """Let the thread of its channel average the next bucket."""
        of, call, holds = self.groups.train, self._call(), self._holds
        bucket, generation = self._buckets[len(self._sent)], of.generation
        gradient = self._flat_model.gradient_buffer()[bucket.start : bucket.end]
        turn = len(self._sent) % MAX_AT_ONCE
        mean = self._means[turn]

        def send() -> bool:
            holds_everywhere = mean.send(of, call, gradient, bucket, holds, generation)
            return holds_everywhere and is_finite(mean.mean[bucket.start : bucket.end])

        self._sent.append(self._executors[turn].submit(send))

    def _call(self) -> Call:
        return Call("Mean", self.topic, self.state.worker.step, None, self._layout)

    # The optimizer's step

    def before_step(self) -> None:
        """Copy the gradients that were not sent, and compare those that were with what they are now."""
        if not self.active:
            return
        num_parameters = len(self._flat_model.parameters)
        sent_from = self._buckets[len(self._sent) - 1].first if self._sent else num_parameters
        self._holds = self._holds and self._flat_model.are_packed(range(sent_from, num_parameters))
        for index in range(sent_from if self._holds else num_parameters):
            self._flat_model.pack_gradient(index)
        self._flat_model.gradient_packed = True
        self._version = self._flat_model.gradient_buffer()._version

    def averages(self, effect: Mean) -> bool:
        """Return whether ``effect`` is that mean of the gradient which travels in buckets."""
        if effect.topic != self.topic or effect.round != self.state.worker.step or not self.active:
            return False
        gradient = self._flat_model.gradient_buffer()
        if effect.vector is not gradient or gradient._version != self._version:
            raise MethodError(
                f"step of method {self.state.method.name} declares gradient_topic={self.topic!r} and sends something "
                "else than the gradient as it was: send worker.gradient, or do not declare it"
            )
        return True

    def mean(self) -> tuple[Tensor | None, int]:
        """Return the mean of the gradient, and of how many workers; None, on all of them, if it has to be averaged as a
        whole.

        Raises StepRetry if the membership was rebuilt.
        """
        of, completed = self.groups.train, False
        while len(self._sent) < len(self._buckets):
            self._send()
        of.waits.begin(FOREGROUND, self._call(), of.members_of(None))
        try:
            results = [sent.result() for sent in self._sent]
            completed = True
        except CommAborted:
            try:
                of.rebuild(FOREGROUND)
            finally:
                # Whoever averages next writes to the same memory.
                wait(self._sent)
            # This worker is alone, so the step goes on.
            return None, 1
        finally:
            of.waits.end(FOREGROUND, completed)
        if all(results):
            self._pause //= 2
            return self._last_mean.mean, self._last_mean.num_members
        self._pause = min(2 * self._pause + 1, MAX_PAUSE)
        self._resume_at = self.state.worker.step + 1 + self._pause
        return None, self._last_mean.num_members

    def close(self, timeout_s: float) -> None:
        self._remove_hooks()
        for executor in self._executors:
            executor.close(timeout_s)
