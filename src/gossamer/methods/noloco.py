"""NoLoCo: an outer optimizer as in DiLoCo, but without any all-reduce: outer steps are taken in pairs.

Every worker keeps an anchor of its own. It takes inner steps at its own pace; after H of them it pairs with a
neighbour that is ready too. With ``Δ_i = a_i − x_i``, and ``Δ̄`` and ``ā`` the means of the two:

    gradient:    Update(x_i)
    outer step:  send (a_i, Δ_i), receive the peer's ;  δ_i = μ δ_i − β Δ̄ − γ (a_i − ā) ;
                 a_i += δ_i ;  x_i += δ_i + Δ_i

    a, δ         vector("anchor"), vector("outer_momentum")
    H, β, μ, γ   period, outer_lr, outer_momentum, anchor_pull

``x_i += δ_i + Δ_i`` is ``x_i += a_i − s_i``, with the new anchor and the parameters s_i at the time of sending. So
training continues from the anchor, and the inner steps that the worker did while the message was in flight are kept.
The terms with γ pull the anchors of all workers together. They cancel within a pair, so the mean of all anchors follows
the workers' progress only: ``Σ_i (a_i + μ/(1−μ) δ_i)`` moves by ``−β/(1−μ) · (Δ_i + Δ_j)`` in an exchange, and by
nothing else. The state of the inner optimizer stays local. A worker that finds no peer goes on with its inner steps and
exchanges later; without any peer this is plain training.

What travels: two vectors of parameters each way per outer step, ``8P / H`` bytes sent per worker and step in float32.
Extra memory: the anchor, δ, the message of length 2P, and one buffer for the peer's.

Defaults: β = 0.7 and μ = 0.5, as DiLoCo's here. The pull needs care, since momentum repeats it: on a complete graph of
many workers the anchors' distance stays bounded only if γ < 2(1 − μ²). Half of that is the default; it is best on a
complete graph without momentum, and sparse graphs want no less. H varies by up to a quarter from one outer step to the
next (``worker.rng``): workers of the same speed would otherwise form the same pairs again and again.

Reference: Kolehmainen et al., "NoLoCo: No-all-reduce Low Communication Training Method for Large Models", 2025. Only
its abstract was available: this is our formulation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gossamer.effects import MethodGenerator, Pair, Swap, WaitSteps, yields
from gossamer.errors import InputError
from gossamer.methods.method import Method, MethodConfig
from gossamer.settings import option
from gossamer.topology import Topology
from gossamer.vectors.vector_math import combine
from gossamer.worker import Worker

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class NoLoCoConfig(MethodConfig):
    period: int = option(4, "local steps between two outer steps (H)", minimum=1)
    outer_lr: float = option(0.7, "learning rate of the outer optimizer (β)", above=0)
    outer_momentum: float = option(0.5, "momentum of the outer optimizer (μ)", minimum=0, maximum=0.99)
    anchor_pull: float = option(-1.0, "pull of an anchor to the mean of its pair's (γ); -1: 1 − μ²")

    def __post_init__(self) -> None:
        super().__post_init__()
        limit = 2 * (1 - self.outer_momentum**2)
        if self.anchor_pull < 0 and self.anchor_pull != -1:
            raise InputError(f"--anchor-pull is {self.anchor_pull}: expected 0 or more, or -1 for 1 − μ²")
        if self.anchor_pull >= limit:
            raise InputError(
                f"--anchor-pull is {self.anchor_pull}: anchors diverge unless it is less than {limit:g}, which is "
                f"2(1 − μ²) at --outer-momentum {self.outer_momentum}; expected about half of that"
            )


class NoLoCo(Method):
    """Local steps, and outer steps with one neighbour at a time."""

    name = "noloco"
    summary = "local steps, every few an outer step with one neighbour; no worker waits (Kolehmainen et al. 2025)"
    Config: ClassVar[type[MethodConfig]] = NoLoCoConfig
    gives_up = ("mean",)
    planned_options = ({"period": 4}, {"period": 16})

    def __init__(self, config: NoLoCoConfig, topology: Topology) -> None:
        super().__init__(config, topology)
        self.config: NoLoCoConfig = config
        self.pull = config.anchor_pull if config.anchor_pull >= 0 else 1 - config.outer_momentum**2

    def begin(self, worker: Worker) -> None:
        worker.vector("anchor").copy_(worker.x)

    @yields(WaitSteps, Pair, Swap)
    def background(self, worker: Worker) -> MethodGenerator:
        # Ready at once: a worker that joins moves its anchor to a neighbour's, and real workers take over a state when
        # they pair. At the start of a run this exchange changes nothing.
        while True:
            peer = yield Pair(math.inf)
            message = self.write_message(worker)
            received = yield Swap(message, peer)
            if received is not None:
                self.outer_step(worker, message, received)
            # Free the memory while the worker trains.
            del received
            yield WaitSteps(self.steps_until_ready(worker))

    def steps_until_ready(self, worker: Worker) -> int:
        """Return H, up to a quarter more or less, so that pairs change."""
        period = self.config.period
        spread = max(1, period // 4)
        return period - spread + int(worker.rng.integers(2 * spread + 1))

    def write_message(self, worker: Worker) -> Tensor:
        """Return (a, Δ) in one vector."""
        anchor, size = worker.vector("anchor"), len(worker.x)
        message = worker.vector("message", 2 * size)
        message[:size].copy_(anchor)
        message[size:].copy_(anchor).sub_(worker.x)
        return message

    def outer_step(self, worker: Worker, sent: Tensor, received: Tensor) -> None:
        """Take the outer step with what this worker sent and what its peer did."""
        size, c = len(worker.x), self.config
        delta, peer_anchor, peer_delta = sent[size:], received[:size], received[size:]
        anchor, momentum = worker.vector("anchor"), worker.vector("outer_momentum")
        lr, pull = c.outer_lr / 2, self.pull / 2
        combine(
            (momentum, c.outer_momentum, ((-lr, delta), (-lr, peer_delta), (-pull, anchor), (pull, peer_anchor))),
            (anchor, 1.0, ((1.0, momentum),)),
            (worker.x, 1.0, ((1.0, momentum), (1.0, delta))),
        )
