"""Divisible communication: Adam whose every step sends a small message at once and the rest later.

The *foreground* message is compressed and waited for. The *background* one carries what the foreground left out, dense,
overlapped with several steps of compute, and is merged at an agreed step. In symbols, with the names they have here::

    alike on all workers:  x, m, v, w      worker.x, vector("m"), vector("v"), scalars["w"] (the weight of v)
    local:                 a_i             vector("undelivered")
                           A_i, P_i        the two halves of vector("flying"), and ‖A_i‖² behind them

    each step t:
      y_i = x − λ·lr·clip((a_i + A_i)/(√(v/w) + ε), ±c)       where the gradient is evaluated
      p_i = g_i(y_i) + a_i ;  c_i = compress(p_i) ;  a_i = p_i − c_i
      F = mean_i c_i                                                          foreground
      every H steps:  A_i = a_i ;  a_i = 0 ;  P_i = g_i ;  start mean(A), mean(P)   background
      D steps later:  B = mean A ;  A_i = 0 ;  v = β2^H v + (1−β2^H) mean(P)² ;  w = β2^H w + (1−β2^H)
      otherwise       B = 0
      m = β1 m + (1−β1)(F + B)
      x −= lr · clip((m/(1−β1^t)) / (√(v/w) + ε), ±c)        after x *= 1 − lr·wd (decoupled weight decay)
    λ = auto: at each merge  q = n‖B‖²/Σ_i‖A_i‖² ;  λ ← ½λ + ½·clamp((n·q − 1)/(n − 1), 0, 1)

The first ``warmup`` steps are dense: gradients averaged exactly, v fed every step. ``y_i`` guesses the update that the
undelivered gradient will cause from the worker's own part of it, and λ measures how much of that part all workers have
in common. v is fed by averaged, uncompressed gradients only: compressed ones would distort the step size. Merging at
an agreed step, not "when it has arrived", keeps the replicas alike to the bit. v sees one gradient in H, and F may hold
what v has never seen (a unit that was silent then; a compressor's noise): c bounds the step where v is as good as zero.
Adam's own steps stay below 7.3 with the usual betas, so c = 15 leaves them alone.

The learning rate, betas, ε and weight decay are those of the optimizer (Adam or AdamW), which is not stepped itself.

No gradient is lost: Σ_t mean(g) = Σ_t (F + B) + mean(a) + mean(A) at every step.

What travels per step and worker: the compressed foreground (top-k with ratio R: ``8P/R`` bytes to each other worker)
and ``2/H`` dense vectors in the background, ``2(n−1)/n · 8P/H`` bytes. Extra memory: the vectors m and v (instead of
the optimizer's own), a, the 2P-long message in flight with its mean, and within a step what was sent and its mean.

Reference: Xu, Bai, "Divisible communication", ECML-PKDD 2023. Only its abstract was at hand: this is our formulation.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from gossamer import compress
from gossamer.effects import Effect, Mean, MethodGenerator, Start, Wait
from gossamer.errors import InputError
from gossamer.methods.method import Method, MethodConfig
from gossamer.settings import option
from gossamer.topology import Topology
from gossamer.vector_math import chunks
from gossamer.worker import Worker


@dataclass(frozen=True, kw_only=True)
class DivisibleConfig(MethodConfig):
    """Settings of divisible communication."""

    period: int = option(8, "steps between two background messages (H)", least=1)
    delay: int = option(-1, "steps after which a background message is merged (D); -1: a whole period", least=-1)
    compressor: str = option("topk", "how the foreground message is compressed", choices=compress.names())
    ratio: float = option(128.0, "how many times smaller the foreground message is (R)", least=1)
    lookahead: float = option(-1.0, "share λ of the undelivered gradient that is looked ahead; -1: measured", most=1)
    clip: float = option(15.0, "bound c on each coordinate of a step and of the look-ahead, in learning rates", above=0)
    warmup: int = option(10, "dense steps at the start", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.delay > self.period:
            raise InputError(f"--delay is {self.delay}: expected at most --period, which is {self.period}")
        if self.lookahead < 0 and self.lookahead != -1:
            raise InputError(f"--lookahead is {self.lookahead}: expected a share from 0 to 1, or -1 to measure it")
        if self.warmup == 0 and self.delay != 0:
            raise InputError("--warmup is 0: Adam's v would be empty until the first merge; expected 1 or more")


class Divisible(Method):
    """Adam with a compressed foreground message and a dense background one."""

    name = "divisible"
    summary = "Adam; a small compressed message each step, the rest dense in the background (Xu, Bai 2023)"
    Config: ClassVar[type[MethodConfig]] = DivisibleConfig
    lockstep = True
    shared = ("m", "v", "w", "lookahead", "merge_at", "background")
    shared_vectors = ("m", "v")
    preferred_optimizer = "adam"

    def __init__(self, config: DivisibleConfig, topology: Topology) -> None:
        super().__init__(config, topology)
        self.config = config
        self.delay = config.period if config.delay < 0 else config.delay
        self.compressor = compress.make(config.compressor, config.ratio)

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if not isinstance(optimizer, torch.optim.Adam):  # AdamW is one too
            raise InputError(
                f"divisible is a form of Adam and cannot use {type(optimizer).__name__}: "
                "take --optimizer adam or adamw, or another method"
            )
        if not isinstance(optimizer, torch.optim.AdamW) and any(g["weight_decay"] for g in optimizer.param_groups):
            raise InputError("divisible decays weights apart from the gradient: take --optimizer adamw")

    def eval_point(self, worker: Worker, out: Tensor) -> None:
        share = self.lookahead(worker)
        if share == 0.0 or worker.scalars.get("w", 0.0) == 0.0:
            out.copy_(worker.x)
            return
        undelivered, clip = worker.vector("undelivered"), self.config.clip
        size, towards = len(undelivered), -share * worker.optimizer_setting("lr")
        flying = worker.vector("flying", 2 * size + 1)[:size]
        for ahead, a, in_flight, v, x in chunks(out, undelivered, flying, worker.vector("v"), worker.x):
            torch.add(a, in_flight, out=ahead)
            ahead.div_(self.scale(worker, v)).clamp_(-clip, clip).mul_(towards).add_(x)

    def lookahead(self, worker: Worker) -> float:
        """λ now."""
        return self.config.lookahead if self.config.lookahead >= 0 else worker.scalars.get("lookahead", 0.0)

    def scale(self, worker: Worker, v: Tensor) -> Tensor:
        """√(v/w) + ε, what Adam divides by."""
        return (v / worker.scalars["w"]).sqrt_().add_(worker.optimizer_setting("eps"))

    def step(self, worker: Worker) -> MethodGenerator:
        round, gradient = worker.step, worker.gradient
        if round < self.config.warmup:
            mean = yield Mean(gradient, round=round, topic="foreground")
            self.feed(worker, mean, 1)
            arrived = mean
        else:
            undelivered = worker.vector("undelivered")
            arrived = yield from compress.average_with_feedback(
                self.compressor, worker, gradient, undelivered, round, "foreground"
            )
            due = (round - self.config.warmup) % self.config.period == 0
            if self.delay and worker.scalars.get("merge_at") == round:
                arrived = arrived.add_((yield from self.merge(worker)))
            if due:
                yield from self.depart(worker)
            if due and not self.delay:
                arrived = arrived.add_((yield from self.merge(worker)))
        self.adam(worker, arrived)

    def depart(self, worker: Worker) -> MethodGenerator:
        """Put what is undelivered, and the newest gradient, under way."""
        undelivered = worker.vector("undelivered")
        size = len(undelivered)
        flying = worker.vector("flying", 2 * size + 1)
        flying[:size].copy_(undelivered)
        flying[size:-1].copy_(worker.gradient)
        flying[-1] = undelivered.square().sum()
        undelivered.zero_()
        worker.scalars["merge_at"] = worker.step + self.delay
        worker.tickets["background"] = yield Start(Mean(flying, round=worker.step, topic="background"))

    def merge(self, worker: Worker) -> Generator[Effect, Any, Tensor]:
        """Take what was under way: feeds v, measures λ, and returns B."""
        mean = yield Wait(worker.tickets["background"])
        worker.tickets.pop("background", None)
        size = len(mean) // 2
        worker.vector("flying", len(mean))[:size].zero_()
        late, gradient, energy = mean[:size], mean[size:-1], float(mean[-1])
        self.feed(worker, gradient, self.config.period)
        share = float(late.square().sum()) / energy if energy > 0 else 0.0
        worker.scalars["lookahead"] = 0.5 * worker.scalars.get("lookahead", 0.0) + 0.5 * common(
            share, worker.num_workers
        )
        return late

    def feed(self, worker: Worker, gradient: Tensor, steps: int) -> None:
        """Feed v with an averaged gradient that stands for so many steps."""
        _, beta2 = worker.optimizer_setting("betas")
        keep = beta2**steps
        worker.vector("v").mul_(keep).addcmul_(gradient, gradient, value=1 - keep)
        worker.scalars["w"] = keep * worker.scalars.get("w", 0.0) + (1 - keep)

    def adam(self, worker: Worker, arrived: Tensor) -> None:
        """One step of Adam on x with the gradient that has arrived."""
        beta1, _ = worker.optimizer_setting("betas")
        lr, decay = worker.optimizer_setting("lr"), worker.optimizer_setting("weight_decay")
        clip, correction = self.config.clip, 1 - beta1 ** (worker.step + 1)
        for m, v, x, new in chunks(worker.vector("m"), worker.vector("v"), worker.x, arrived):
            m.mul_(beta1).add_(new, alpha=1 - beta1)
            if decay:
                x.mul_(1 - lr * decay)
            x.sub_((m / self.scale(worker, v)).div_(correction).clamp_(-clip, clip).mul_(lr))

    def on_membership_change(self, worker: Worker) -> None:
        """What was in flight is undelivered again."""
        undelivered = worker.vector("undelivered")
        flying = worker.vector("flying", 2 * len(undelivered) + 1)
        undelivered.add_(flying[: len(undelivered)])
        flying.zero_()
        worker.scalars.pop("merge_at", None)
        super().on_membership_change(worker)

    def finish(self, worker: Worker) -> MethodGenerator:
        """Drain: what is in flight and what is undelivered is averaged and applied in one last step."""
        undelivered = worker.vector("undelivered")
        rest = (yield Mean(undelivered, round=worker.step, topic="drain")).clone()
        undelivered.zero_()
        if "background" in worker.tickets:
            rest.add_((yield from self.merge(worker)))
        # With nothing left a step would only repeat the momentum; the rest is alike on all workers, so all agree.
        if rest.any():
            self.adam(worker, rest)


def common(share: float, workers: int) -> float:
    """λ from ``q = share``: the part of the local remainders that all workers have in common."""
    if workers == 1:
        return 1.0
    return min(max((workers * share - 1) / (workers - 1), 0.0), 1.0)
