"""Quasi-global momentum: the momentum follows where the model went, instead of the worker's own gradients.

A setting of every method that averages models. With different data on every worker, the momentum of a worker's own
gradients pulls its model away from the others. The model itself moves by exchanges too, so its path contains the other
workers' gradients. Before the Update of step t, with ``x_t`` this worker's model now:

    m = μ m + (1 − μ) (x_{t−1} − x_t) / lr_{t−1}        lr of the Update that made the move; skipped where it is 0
    g += β m ;  Update(x) with plain SGD                 μ = β: the setting ``quasi_global``

``x_t`` is ``worker.x``, or what ``eval_point`` writes (for A²CiD² the advanced model). It contains all exchanges since
the last Update, also those within a step. m is ``worker.vector("quasi_global_m")``, ``x_{t−1}`` is
``worker.vector("quasi_global_x")``.

With Adam and AdamW, m is in units of the gradient and replaces the first moment (v̂: the second one, bias-corrected as
Adam does; AdamW's decay is not a part of the move):

    m = μ m + (1 − μ) (x_{t−1} − x_t) (√v̂_{t−1} + ε) / lr_{t−1}
    exp_avg = m/w · (1 − β1^(t−1)) ;  Update(x)               w = 1 − μ^(t−1), the sum of the weights in m

With one worker and SGD it is ``m_{t+1} = β(2−β) m_t + (1−β) g_t``: quasi-hyperbolic momentum with the decay β(2−β), the
weight ν = 1/(2−β) on the momentum and the learning rate lr/(1−β).

Exchanges that are rare compared with the momentum's memory of 1/(1−β)² steps are overdone: see ``longest_period``.

What travels: nothing more. Extra memory: two vectors, three if the method has an ``eval_point``.

Reference: Lin, Karimireddy, Stich, Jaggi, "Quasi-global momentum: accelerating decentralized deep learning on
heterogeneous data", ICML 2021. Deviations: workers need not be in lockstep, so the move is that between two Updates of
this worker, whatever has been exchanged; the form for Adam is ours.
"""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from gossamer.effects import MethodGenerator, Update, yields
from gossamer.errors import InputError
from gossamer.methods.loading.method_contract import declared
from gossamer.methods.method import Method, MethodConfig
from gossamer.settings import option
from gossamer.vectors.vector_math import combine
from gossamer.worker import Worker

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from gossamer.topology import Topology

MOMENTUM, LAST, POINT = "quasi_global_m", "quasi_global_x", "quasi_global_point"
"""Vectors of a worker: the momentum, its model at the last Update, and now (only with an ``eval_point``)."""
LAST_LR, NUM_UPDATES, WEIGHT = "quasi_global_lr", "quasi_global_updates", "quasi_global_weight"
"""Scalars of a worker: the learning rate of its last Update, the number of Updates since it began, and the sum of the
weights of all moves in the momentum (only with Adam)."""


@dataclass(frozen=True, kw_only=True)
class AveragingConfig(MethodConfig):
    """Settings of every method that averages models."""

    quasi_global: float = option(
        0.0, "quasi-global momentum μ = β, such as 0.9, in place of the optimizer's own; 0: off", minimum=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.quasi_global >= 1:
            raise InputError(f"--quasi-global is {self.quasi_global}: expected less than 1, such as 0.9")

    def check_period(self, period: int) -> None:
        """Raise ``InputError`` if workers that average exactly every ``period`` steps would drift apart."""
        longest = longest_period(self.quasi_global)
        if period > longest:
            raise InputError(
                f"--period is {period}: with --quasi-global {self.quasi_global} workers drift apart if they average so "
                f"rarely; expected {longest:.0f} or less, or a smaller --quasi-global"
            )


def longest_period(beta: float) -> float:
    """Return the largest number of steps between two exact averages for which the workers stay together.

    An average moves a worker by −y, and the momentum goes on in that direction: until the next average H steps later it
    has taken the worker β/(1−β) · (1 − a^H) · y further, with a = β(2−β). The drift shrinks from one average to the
    next if a^H > 2β − 1.
    """
    return math.inf if beta <= 0.5 else float(math.ceil(math.log(2 * beta - 1) / math.log(beta * (2 - beta))) - 1)


class QuasiGlobal(Method):
    """A method with quasi-global momentum. Everything but the momentum is the inner method's."""

    def __init__(self, inner: Method, momentum: float) -> None:
        super().__init__(MethodConfig(), inner.topology)
        self.inner, self.momentum, self.adam = inner, momentum, False
        own = {"step", "check_optimizer", "begin", "on_topology_change"}
        for name in (Method.__annotations__.keys() | vars(Method).keys()) - own:
            if not name.startswith("_"):
                setattr(self, name, getattr(inner, name))
        self.gives_up = tuple(dict.fromkeys((*inner.gives_up, "alone")))  # type: ignore[misc]
        # A bound method cannot carry a declaration of its own.
        self.step = yields(*declared(inner, "step"), Update)(partial(self._step))

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Also find out which form of the rule this optimizer needs."""
        from torch.optim import SGD, Adam

        self.inner.check_optimizer(optimizer)
        kind, groups = type(optimizer).__name__, optimizer.param_groups
        self.adam = isinstance(optimizer, Adam)  # AdamW is a subclass
        if not isinstance(optimizer, SGD | Adam):
            raise InputError(f"quasi-global momentum cannot use {kind}: use SGD with momentum=0, Adam or AdamW")
        if any(group.get("momentum") for group in groups):
            raise InputError(f"quasi-global momentum replaces the momentum of {kind}: create it with momentum=0")
        if any(group.get("maximize") or group.get("amsgrad") for group in groups):
            raise InputError(f"quasi-global momentum cannot use {kind} with maximize or amsgrad: leave them out")
        for name in ("lr", "betas", "eps", "weight_decay") if self.adam else ("lr",):
            if any(group[name] != groups[0][name] for group in groups):
                raise InputError(
                    f"the parameter groups of {kind} differ in {name}: quasi-global momentum expects one for all"
                )

    def on_topology_change(self, topology: Topology) -> None:
        super().on_topology_change(topology)
        self.inner.on_topology_change(topology)

    def begin(self, worker: Worker) -> None:
        self.inner.begin(worker)
        worker.scalars.update({LAST_LR: 0.0, NUM_UPDATES: 0.0, WEIGHT: 0.0})
        worker.vector(LAST).copy_(self.model(worker))

    def _step(self, worker: Worker) -> MethodGenerator:
        if self.inner.step is None:
            self.prepare_update(worker)
            yield Update()
            return
        with closing(self.inner.step(worker)) as inner:
            answer: Any = None
            while True:
                try:
                    effect = inner.send(answer)
                except StopIteration:
                    return
                if isinstance(effect, Update):
                    self.prepare_update(worker)
                answer = yield effect

    def prepare_update(self, worker: Worker) -> None:
        """Bring the momentum up to date and let the coming Update use it."""
        scalars, model = worker.scalars, self.model(worker)
        if self.adam:
            self.replace_first_moment(worker, model)
        else:
            self.add_momentum(worker, model)
        scalars[LAST_LR] = float(worker.optimizer_setting("lr"))
        scalars[NUM_UPDATES] = scalars.get(NUM_UPDATES, 0.0) + 1

    def model(self, worker: Worker) -> Tensor:
        """Return this worker's model now."""
        if self.inner.eval_point is None:
            return worker.x
        point = worker.vector(POINT)
        self.inner.eval_point(worker, point)
        return point

    def add_momentum(self, worker: Worker, model: Tensor) -> None:
        m, last, lr = worker.vector(MOMENTUM), worker.vector(LAST), worker.scalars.get(LAST_LR, 0.0)
        remember, add = (last, 0.0, ((1.0, model),)), (worker.gradient, 1.0, ((self.momentum, m),))
        if lr:
            # The difference of the two models first: it is small, and exact in floating point.
            move = (last, 1.0, ((-1.0, model),))
            combine(move, (m, self.momentum, (((1.0 - self.momentum) / lr, last),)), remember, add)
        else:
            combine(remember, add)

    def replace_first_moment(self, worker: Worker, model: Tensor) -> None:
        m, last, scalars = worker.vector(MOMENTUM), worker.vector(LAST), worker.scalars
        lr, (beta1, beta2) = scalars.get(LAST_LR, 0.0), worker.optimizer_setting("betas")
        # A worker that joins takes over the optimizer's state, and its step count, in lockstep only.
        steps = max(scalars.get(NUM_UPDATES, 0.0), worker.step if self.lockstep else 0)
        if lr:
            scale = worker.read_optimizer_state("exp_avg_sq")
            scale.div_(1.0 - beta2**steps).sqrt_().add_(worker.optimizer_setting("eps"))
            if worker.optimizer_setting("decoupled_weight_decay"):
                last.mul_(1.0 - lr * worker.optimizer_setting("weight_decay"))
            scale.mul_(last.sub_(model))
            combine((m, self.momentum, (((1.0 - self.momentum) / lr, scale),)))
            scalars[WEIGHT] = self.momentum * scalars.get(WEIGHT, 0.0) + 1.0 - self.momentum
        last.copy_(model)
        if scalars.get(WEIGHT, 0.0):
            worker.write_optimizer_state("exp_avg", m * ((1.0 - beta1**steps) / scalars[WEIGHT]))
