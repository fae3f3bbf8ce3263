"""Training loops as users write them, each trained alone and joined with others."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gossamer

STEPS = 6


class Tied(nn.Module):
    """Two layers that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 6), nn.Linear(6, 6)
        self.decode.weight = self.encode.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(torch.tanh(self.encode(x)))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))


def frozen() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)
    return model


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 6))


def channels_last() -> nn.Module:
    model = nn.Sequential(nn.Unflatten(1, (6, 1, 1)), nn.Conv2d(6, 4, 1), nn.Conv2d(4, 6, 1), nn.Flatten())
    model.insert(1, nn.Conv2d(6, 6, 3, padding=1))
    return model.to(memory_format=torch.channels_last)


@dataclass
class Loop:
    """One user's way to train: what is built, and how a step is made."""

    model: Callable[[], nn.Module] = mlp
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = field(
        default=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    )
    step: Callable[[Training], None] = field(default=lambda training: training.plain_step())
    compiler: str | None = None


class Training:
    """A model in training, with data of its own."""

    def __init__(self, loop: Loop, data_seed: int) -> None:
        torch.manual_seed(0)
        self.loop = loop
        self.model = loop.model()
        self.optimizer = loop.optimizer(self.model)
        self.called = self.model
        if loop.compiler is not None:
            self.called = torch.compile(self.model, backend=loop.compiler)  # type: ignore[assignment]
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        # Workers find scales of their own.
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0 * 2**data_seed, growth_interval=2)
        self.generator = torch.Generator().manual_seed(data_seed)
        self.poisoned = False
        """Whether the next gradient overflows."""

    def loss(self) -> Tensor:
        x = torch.randn(16, 6, generator=self.generator)
        return nn.functional.mse_loss(self.called(x), torch.roll(x, 1, dims=1))

    def plain_step(self) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()

    def weights(self) -> list[float]:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()]).tolist()

    def buffers(self) -> list[float]:
        return torch.cat([b.detach().flatten().float() for b in self.model.buffers()] or [torch.empty(0)]).tolist()


def scheduled(training: Training) -> None:
    training.plain_step()
    training.scheduler.step()


def accumulated(training: Training) -> None:
    training.optimizer.zero_grad()
    for _ in range(3):
        (training.loss() / 3).backward()
    training.optimizer.step()


def clipped(training: Training) -> None:
    training.optimizer.zero_grad()
    training.loss().backward()
    nn.utils.clip_grad_norm_(training.model.parameters(), 0.05)
    training.optimizer.step()


def closure(training: Training) -> None:
    def evaluate() -> Tensor:
        training.optimizer.zero_grad()
        loss = training.loss()
        loss.backward()
        return loss

    assert isinstance(training.optimizer.step(evaluate), Tensor)


def set_to_zero(training: Training) -> None:
    training.optimizer.zero_grad(set_to_none=False)
    training.loss().backward()
    training.optimizer.step()


def autocast(training: Training) -> None:
    training.optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = training.loss()
    loss.backward()
    training.optimizer.step()


def scaled(training: Training) -> None:
    training.optimizer.zero_grad()
    training.scaler.scale(training.loss()).backward()
    if training.poisoned:
        next(p for p in training.model.parameters() if p.grad is not None).grad[0] = float("inf")
    training.scaler.step(training.optimizer)
    training.scaler.update()


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    first, *rest = model.parameters()
    return torch.optim.AdamW([{"params": [first], "lr": 0.05, "weight_decay": 0.0}, {"params": rest}], lr=0.01)


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.05, fused=True)


LOOPS = {
    "plain": Loop(),
    "param groups": Loop(optimizer=two_groups),
    "schedule": Loop(step=scheduled),
    "accumulation": Loop(step=accumulated),
    "clipping": Loop(step=clipped),
    "closure": Loop(step=closure),
    "gradients set to zero": Loop(step=set_to_zero),
    "autocast": Loop(step=autocast),
    "grad scaler": Loop(step=scaled),
    "grad scaler, adam": Loop(step=scaled, optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=0.05)),
    "grad scaler, fused": Loop(step=scaled, optimizer=fused),
    "compiled": Loop(compiler="eager"),
    "compiled ahead of time": Loop(compiler="aot_eager"),
    "tied weights": Loop(model=Tied),
    "frozen parameters": Loop(model=frozen),
    "channels last": Loop(model=channels_last),
    "batch norm": Loop(model=normed),
}


def train(rank: int, environment: dict[str, str], order: dict[str, Any], out: Connection) -> None:
    """One real worker with such a loop."""
    os.environ.update(environment, RANK=str(rank))
    torch.set_num_threads(1)
    if order.get("own_group"):
        dist.init_process_group("gloo")
    training = Training(LOOPS[order["loop"]], data_seed=rank)
    swarm = gossamer.join(training.model, training.optimizer, method=order["method"])
    for step in range(order.get("steps", STEPS)):
        training.poisoned = order.get("overflow") == (rank, step)
        training.loop.step(training)
        if order.get("own_group"):
            total = torch.ones(1)
            dist.all_reduce(total)
            assert total.item() == dist.get_world_size()
    own_weights, own_buffers = training.weights(), training.buffers()
    steps = swarm.metrics().steps
    swarm.finish()
    if order.get("own_group"):
        dist.barrier()
        assert dist.get_world_size() == int(environment["WORLD_SIZE"])
        dist.destroy_process_group()
    out.send(
        {
            "at": "finished",
            "weights": training.weights(),
            "buffers": training.buffers(),
            "own_weights": own_weights,
            "own_buffers": own_buffers,
            "steps": steps,
        }
    )
