"""Divisible communication: Adam in which every step sends a small message at once and the rest later.

Every step waits for its *foreground* message, which is compressed. The *background* message contains what the
foreground left out. It is dense, it overlaps with several steps, and all workers merge it at the same step. In symbols,
with the names that they have in the code:

    equal on all workers:  x, m, v, w      worker.x, vector("m"), vector("v"), scalars["w"] (the weight of v)
    local:                 a_i             vector("undelivered")
                           A_i, P_i        the two halves of vector("in_flight"), and ‖A_i‖² behind them

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

The first ``warmup`` steps are dense: gradients are averaged exactly, and every one updates v. ``y_i`` estimates the
update that the undelivered gradient will cause, from the worker's own part of it. λ measures how much of that part is
common to all workers. Only averaged, uncompressed gradients update v: compressed ones would distort the step size. All
workers merge at the same step, not when the message has arrived, so the replicas stay equal to the bit. v receives one
gradient in H, and F may contain coordinates that v has never seen (a unit that was inactive then; noise of the
compressor): c bounds the step where v is nearly zero. Adam's own steps stay below 7.3 with the usual betas, so c = 15
does not change them.

The learning rate, betas, ε and weight decay are those of the optimizer (Adam or AdamW). Its ``step`` is not used.

No gradient is lost: Σ_t mean(g) = Σ_t (F + B) + mean(a) + mean(A) at every step.

What travels per step and worker: the compressed foreground (top-k with ratio R: ``8P/R`` bytes to each other worker)
and ``2/H`` dense vectors in the background, ``2(n−1)/n · 8P/H`` bytes. Extra memory: the vectors m and v (instead of
the optimizer's) and 1/(√(v/w) + ε), a, the message of length 2P in flight and its mean, and during a step the
foreground and its mean, unless the compressor is sparse.

Reference: Xu, Bai, "Divisible communication", ECML-PKDD 2023. Only its abstract was available: this is our formulation.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from gossamer import compress
from gossamer.effects import Effect, Gather, Mean, MethodGenerator, Start, Wait, yields
from gossamer.errors import InputError
from gossamer.methods.method import Method, MethodConfig
from gossamer.settings import option
from gossamer.topology import Topology
from gossamer.vectors.vector_math import chunks
from gossamer.worker import Worker

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer


@dataclass(frozen=True, kw_only=True)
class DivisibleConfig(MethodConfig):
    period: int = option(8, "steps between two background messages (H)", minimum=1)
    delay: int = option(-1, "steps after which a background message is merged (D); -1: one period", minimum=-1)
    compressor: str = option("topk", "how the foreground message is compressed", choices=compress.names())
    ratio: float = option(128.0, "compression ratio of the foreground message (R)", minimum=1)
    lookahead: float = option(-1.0, "share λ of the undelivered gradient that is anticipated; -1: measured", maximum=1)
    clip: float = option(15.0, "bound c on each coordinate of a step and of the look-ahead, in learning rates", above=0)
    warmup: int = option(10, "dense steps at the start", minimum=0)

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
    shared = ("m", "v", "v_at", "w", "lookahead", "merge_at", "background")
    preferred_optimizer = "adam"
    uses_topology = False
    sends_models = False
    # It takes Adam's step itself, and not with the newest gradient alone.
    gives_up = ("mean", "alone")
    planned_options = (
        {"period": 8, "ratio": 128.0},
        {"period": 32, "ratio": 128.0},
        {"period": 32, "ratio": 1024.0},
    )

    def __init__(self, config: DivisibleConfig, topology: Topology) -> None:
        super().__init__(config, topology)
        self.config: DivisibleConfig = config
        self.delay = config.period if config.delay < 0 else config.delay
        self.compressor = compress.make(config.compressor, config.ratio)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        from torch.optim import Adam, AdamW

        if not isinstance(optimizer, Adam):  # AdamW is a subclass
            raise InputError(
                f"divisible is a form of Adam and cannot use {type(optimizer).__name__}: "
                "use --optimizer adam or adamw, or another method"
            )
        if not isinstance(optimizer, AdamW) and any(g["weight_decay"] for g in optimizer.param_groups):
            raise InputError("divisible decouples weight decay from the gradient: use --optimizer adamw")

    def eval_point(self, worker: Worker, out: Tensor) -> None:
        import torch

        share = self.lookahead(worker)
        if share == 0.0 or worker.scalars.get("w", 0.0) == 0.0:
            out.copy_(worker.x)
            return
        undelivered, clip = worker.vector("undelivered"), self.config.clip
        size, factor = len(undelivered), -share * worker.optimizer_setting("lr")
        in_flight = worker.vector("in_flight", 2 * size + 1)[:size]
        for y, a, sent, scale, x in chunks(out, undelivered, in_flight, self.scale(worker), worker.x):
            torch.add(x, (a + sent).mul_(scale).clamp_(-clip, clip), alpha=factor, out=y)

    def lookahead(self, worker: Worker) -> float:
        """Return the present λ."""
        return self.config.lookahead if self.config.lookahead >= 0 else worker.scalars.get("lookahead", 0.0)

    def scale(self, worker: Worker) -> Tensor:
        """Return 1/(√(v/w) + ε), by which Adam scales a step. It is computed anew when v has changed, once in H steps.

        Kept apart from v: one that joins, or has loaded a checkpoint, may have the one and not yet the other.
        """
        scale, updated_at = worker.vector("scale"), worker.scalars.get("v_at", -1.0)
        if worker.scalars.get("scale_at") != updated_at:
            w, eps = worker.scalars["w"], worker.optimizer_setting("eps")
            for s, v in chunks(scale, worker.vector("v")):
                s.copy_(v).div_(w).sqrt_().add_(eps).reciprocal_()
            worker.scalars["scale_at"] = updated_at
        return scale

    @yields(Mean, Gather, Start, Wait)
    def step(self, worker: Worker) -> MethodGenerator:
        round = worker.step
        if round < self.config.warmup:
            mean = yield Mean(worker.gradient, round=round, topic="foreground")
            self.update_v(worker, mean, 1)
            arrived = [compress.Part(mean)]
        else:
            undelivered = worker.vector("undelivered")
            worker.add_gradient(undelivered)
            arrived = yield from compress.average_with_feedback(
                self.compressor, worker, undelivered, round, "foreground"
            )
            due = (round - self.config.warmup) % self.config.period == 0
            if self.delay and worker.scalars.get("merge_at") == round:
                arrived.append((yield from self.merge(worker)))
            if due:
                yield from self.start_background_mean(worker)
            if due and not self.delay:
                arrived.append((yield from self.merge(worker)))
        self.adam_step(worker, arrived)

    def start_background_mean(self, worker: Worker) -> MethodGenerator:
        """Start the background mean of what is undelivered and of the newest gradient."""
        undelivered = worker.vector("undelivered")
        size = len(undelivered)
        in_flight = worker.vector("in_flight", 2 * size + 1)
        in_flight[:size].copy_(undelivered)
        in_flight[size:-1].copy_(worker.gradient)
        in_flight[-1] = undelivered.dot(undelivered)
        undelivered.zero_()
        worker.scalars["merge_at"] = worker.step + self.delay
        worker.tickets["background"] = yield Start(Mean(in_flight, round=worker.step, topic="background"))

    def merge(self, worker: Worker) -> Generator[Effect, Any, compress.Part]:
        """Wait for the background mean, update v and λ with it, and return B."""
        mean = yield Wait(worker.tickets["background"])
        worker.tickets.pop("background", None)
        size = len(mean) // 2
        worker.vector("in_flight", len(mean))[:size].zero_()
        late, gradient, energy = mean[:size], mean[size:-1], float(mean[-1])
        self.update_v(worker, gradient, self.config.period)
        share = float(late.dot(late)) / energy if energy > 0 else 0.0
        worker.scalars["lookahead"] = 0.5 * worker.scalars.get("lookahead", 0.0) + 0.5 * common_share(
            share, worker.num_workers
        )
        # The next background mean may start before B is applied, and its answer takes the place of this one.
        return compress.Part(late.clone())

    def update_v(self, worker: Worker, gradient: Tensor, steps: int) -> None:
        """Update v with an averaged gradient that stands for ``steps`` steps."""
        _, beta2 = worker.optimizer_setting("betas")
        keep = beta2**steps
        worker.vector("v").mul_(keep).addcmul_(gradient, gradient, value=1 - keep)
        worker.scalars["w"] = keep * worker.scalars.get("w", 0.0) + (1 - keep)
        worker.scalars["v_at"] = float(worker.step)

    def adam_step(self, worker: Worker, arrived: list[compress.Part]) -> None:
        """Do one step of Adam on x with the averaged gradient, the sum of what has ``arrived``."""
        beta1, _ = worker.optimizer_setting("betas")
        lr, decay = worker.optimizer_setting("lr"), worker.optimizer_setting("weight_decay")
        correction = 1 - beta1 ** (worker.step + 1)
        bound = self.config.clip * correction
        compress.add_parts(worker.vector("m").mul_(beta1), arrived, 1 - beta1)
        for m, scale, x in chunks(worker.vector("m"), self.scale(worker), worker.x):
            if decay:
                x.mul_(1 - lr * decay)
            x.sub_((m * scale).clamp_(-bound, bound), alpha=lr / correction)

    def on_membership_change(self, worker: Worker) -> None:
        """Count what was in flight as undelivered again."""
        undelivered = worker.vector("undelivered")
        in_flight = worker.vector("in_flight", 2 * len(undelivered) + 1)
        undelivered.add_(in_flight[: len(undelivered)])
        in_flight.zero_()
        worker.scalars.pop("merge_at", None)
        # v may be replaced by that of another worker.
        worker.scalars.pop("scale_at", None)
        super().on_membership_change(worker)

    @yields(Mean, Wait)
    def finish(self, worker: Worker) -> MethodGenerator:
        """Average what is in flight and what is undelivered, and apply it in one last step."""
        undelivered = worker.vector("undelivered")
        rest = [compress.Part((yield Mean(undelivered, round=worker.step, topic="drain")).clone())]
        undelivered.zero_()
        if "background" in worker.tickets:
            rest.append((yield from self.merge(worker)))
        # If nothing is left, a step would only repeat the momentum. All workers have the same rest, so all agree. One
        # that has seen no gradient has no v to step with.
        if any(part.values.any() for part in rest) and worker.scalars.get("w", 0.0) > 0.0:
            self.adam_step(worker, rest)


def common_share(share: float, workers: int) -> float:
    """Return λ from ``q = share``: the part of the undelivered gradients that is common to all workers."""
    if workers == 1:
        return 1.0
    return min(max((workers * share - 1) / (workers - 1), 0.0), 1.0)
