"""LASGD: local steps that never wait, and an exact all-reduce of the models in the background:

    foreground, every step:   Update(x_i)
    background, repeatedly:   after H local steps since the last merge (H may be 0: at once)
                              s_i = x_i ;  S = mean over all workers of s ;
                              at the next step boundary  x_i += S − s_i

The average is exact and its result is applied as a displacement. So no update that a worker did during the all-reduce
is lost, and the mean model moves only by the workers' own updates. The optimizer state stays local. Workers drift apart
by at most ``2·lr/(1−μ)·(H + D)·G``, with D the number of steps during an all-reduce and G a bound on the gradient.

What travels: one all-reduce of the parameters per ``H + D`` steps, ``2(n−1)/n · 4P`` bytes sent per worker each time.
Extra memory: one snapshot, and the result of the all-reduce.

Reference: Avidor, Tal Israel, "Locally Asynchronous Stochastic Gradient Descent for Decentralised Deep Learning",
2022. Only its abstract and introduction were available: this is our formulation of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gossamer.effects import Mean, MethodGenerator, WaitSteps, yields
from gossamer.methods.method import Method, MethodConfig
from gossamer.methods.quasi_global import AveragingConfig
from gossamer.settings import option
from gossamer.topology import Topology
from gossamer.vectors.vector_math import chunks
from gossamer.worker import Worker


@dataclass(frozen=True, kw_only=True)
class LASGDConfig(AveragingConfig):
    period: int = option(1, "local steps between a merge and the next averaging; 0: at once", minimum=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_period(self.period)


class LASGD(Method):
    """Local steps, and an exact average in the background."""

    name = "lasgd"
    summary = "local steps that never wait, exact all-reduce of the models in the background (Avidor et al. 2022)"
    Config: ClassVar[type[MethodConfig]] = LASGDConfig
    shared = ("merges",)
    uses_topology = False
    planned_options = ({"period": 1}, {"period": 8})

    def __init__(self, config: LASGDConfig, topology: Topology) -> None:
        super().__init__(config, topology)
        self.period = config.period

    @yields(WaitSteps, Mean)
    def background(self, worker: Worker) -> MethodGenerator:
        while True:
            yield WaitSteps(self.period)
            sent = worker.snapshot()
            merges = int(worker.scalars.get("merges", 0))
            mean = yield Mean(sent, round=merges, topic="model")
            for x, m, s in chunks(worker.x, mean, sent):
                # The difference first: if it is zero, as for a single worker, x keeps every bit.
                x.sub_(s.sub_(m))
            worker.scalars["merges"] = merges + 1
