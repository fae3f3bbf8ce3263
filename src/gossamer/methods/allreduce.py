"""All-reduce: the gradients are averaged over all workers before every step, as DDP does. The baseline:

    x_i ← Update(x_i, mean_j g_j)

What travels: one all-reduce of the gradient per step, ``2(n−1)/n · 4P`` bytes sent per worker in float32 with a ring.
All workers wait for the slowest one and for the network in every step. No extra memory.
"""

from __future__ import annotations

from gossamer.effects import Mean, MethodGenerator, Update, yields
from gossamer.methods.method import Method
from gossamer.worker import Worker


class AllReduce(Method):
    """Synchronous data parallelism."""

    name = "allreduce"
    summary = "gradients averaged exactly every step, all workers wait: as DDP (baseline)"
    uses_topology = False
    sends_models = False
    keeps_gradient = True

    @yields(Mean, Update, gradient_topic="gradient")
    def step(self, worker: Worker) -> MethodGenerator:
        mean = yield Mean(worker.gradient, round=worker.step, topic="gradient")
        yield Update(mean)
