"""Local SGD: the models are averaged exactly every H steps, and all workers wait for it. A baseline:

    every step:      Update(x_i)
    every H-th:      x_i = mean_j x_j

What travels: one all-reduce of the parameters every ``period`` steps, ``2(n−1)/n · 4P / H`` bytes sent per worker and
step in float32. The optimizer state stays local. No extra memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gossamer.effects import Mean, MethodGenerator, Update, yields
from gossamer.methods.method import Method, MethodConfig
from gossamer.methods.quasi_global import AveragingConfig
from gossamer.settings import option
from gossamer.topology import Topology
from gossamer.worker import Worker


@dataclass(frozen=True, kw_only=True)
class LocalSGDConfig(AveragingConfig):
    period: int = option(8, "local steps between two averagings", minimum=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_period(self.period)


class LocalSGD(Method):
    """Local steps, and an exact average that all workers wait for."""

    name = "localsgd"
    summary = "models averaged exactly every few steps, all workers wait (baseline)"
    Config: ClassVar[type[MethodConfig]] = LocalSGDConfig
    uses_topology = False
    planned_options = ({"period": 4}, {"period": 8}, {"period": 16}, {"period": 32})

    def __init__(self, config: LocalSGDConfig, topology: Topology) -> None:
        super().__init__(config, topology)
        self.period = config.period

    def steps_until_shared(self, step: int) -> int:
        return -step % self.period

    @yields(Update, Mean)
    def step(self, worker: Worker) -> MethodGenerator:
        yield Update()
        if (worker.step + 1) % self.period == 0:
            mean = yield Mean(worker.x, round=worker.step, topic="model")
            worker.x.copy_(mean)
