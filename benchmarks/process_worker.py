"""One worker of ``benchmarks/process.py``: reads jobs as lines of JSON and answers each with a line of JSON.

A job names a *contender* (a way to train: nothing joined, torch DDP, decent-dp, or one of our methods) and what to do.
It is carried out by all workers together. Runs also where only torch and decent-dp are installed.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import gzip
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

LAYERS = 5
FORWARD_SHARE = 1 / 3
"""A gradient's share of the time that is spent in the forward pass."""

JobSpec = dict[str, Any]


class Layer(torch.autograd.Function):
    """A layer whose gradient is there at a given time, as an accelerator's would be, whatever the host does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, due: list[float]) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.due = due
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (weight,) = ctx.saved_tensors
        wait_until(ctx.due.pop())
        return grad, weight * 1e-3, None


class Waiting(nn.Module):
    """A model of about ``size`` parameters whose gradient takes a fixed time and next to no compute."""

    def __init__(self, size: int, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weights = nn.ParameterList(torch.randn(size // LAYERS) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        began = time.monotonic()
        backward = 1 - FORWARD_SHARE
        due = [began + self.seconds * (FORWARD_SHARE + backward * k / LAYERS) for k in range(LAYERS, 0, -1)]
        for weight in self.weights:
            x = Layer.apply(x, weight, due)
        wait_until(began + self.seconds * FORWARD_SHARE)
        return x


def wait_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Data:
    """Train and test set of one task."""

    def __init__(self, name: str, folder: str) -> None:
        if name == "digits":
            from gossamer.tasks.digits import digits
            from gossamer.tasks.task import TaskConfig

            task = digits(1, 0, TaskConfig())
            self.train, self.test = task.train, task.test
        else:
            self.train, self.test = (mnist(Path(folder) / "mnist", part) for part in ("train", "t10k"))

    def batch(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        index = torch.randint(len(self.train[0]), (size,), generator=generator)
        return self.train[0][index], self.train[1][index]


def mnist(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    images = gzip.decompress((folder / f"{part}-images-idx3-ubyte.gz").read_bytes())
    labels = gzip.decompress((folder / f"{part}-labels-idx1-ubyte.gz").read_bytes())
    pixels = torch.frombuffer(bytearray(images[16:]), dtype=torch.uint8).reshape(-1, 784).float()
    return (pixels / 255 - 0.13) / 0.31, torch.frombuffer(bytearray(labels[8:]), dtype=torch.uint8).long()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: mlp(784, 1900, 1850, 10),
    "digits": lambda: mlp(64, 2200, 2160, 10),
    "mnist": lambda: mlp(784, 512, 512, 10),
}


def make_optimizer(kind: str, parameters: Any, lr: float) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9)
    if kind == "adam":
        return torch.optim.Adam(parameters, lr=lr)
    from gossamer import AccumAdam

    return AccumAdam(parameters, lr=lr)


class Contender:
    """A model under training, one way or another. ``step`` makes one step from inputs and targets."""

    def __init__(self, job_spec: JobSpec, model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.name, self.model, self.loss = job_spec["contender"], model, loss
        self.optimizer: torch.optim.Optimizer | None = None
        self.swarm: Any = None
        kind, lr = job_spec["optimizer"], job_spec["lr"]
        if self.name == "decent-dp":
            self.forward: nn.Module = decent(model, kind, lr)
            return
        self.optimizer = make_optimizer(kind, model.parameters(), lr)
        self.forward = nn.parallel.DistributedDataParallel(model) if self.name == "ddp" else model
        if self.name not in ("ddp", "none"):
            import gossamer

            self.swarm = gossamer.join(
                model, self.optimizer, method=self.name, topology="ring", seed=job_spec["seed"], **job_spec["settings"]
            )

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        self.loss(self.forward(inputs), targets).backward()
        # decent-dp makes the optimizer's step itself, in the backward pass.
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def exchanges(self) -> int:
        return self.swarm.metrics().exchanges if self.swarm is not None else 0

    def end(self) -> None:
        if self.swarm is not None:
            self.swarm.finish()


def decent(model: nn.Module, kind: str, lr: float) -> nn.Module:
    from decent_dp.ddp import DecentralizedDataParallel
    from decent_dp.optim import optim_fn_accum_adam

    assert kind == "accumadam"
    optimizer = partial(optim_fn_accum_adam, lr=lr, weight_decay=0.0)
    return DecentralizedDataParallel(model, optim_fn=optimizer, topology="ring")


def slowed(job_spec: JobSpec) -> float:
    """How many times slower than usual this worker is."""
    rank, factor = job_spec.get("straggler", (-1, 1.0))
    return factor if rank == dist.get_rank() else 1.0


def speed(job_spec: JobSpec) -> dict[str, Any]:
    """How many steps this worker makes in a second."""
    torch.manual_seed(job_spec["seed"])
    waiting = job_spec["model"] == "waiting"
    factor = slowed(job_spec)
    if waiting:
        model: nn.Module = Waiting(job_spec["size"], job_spec["wait_s"] * factor)
        inputs, targets = torch.zeros(1, requires_grad=True), torch.zeros(1)
    else:
        model = MODELS[job_spec["model"]]()
        inputs, targets = torch.randn(job_spec["batch"], 784), torch.randint(10, (job_spec["batch"],))
    contender = Contender(job_spec, model, (lambda out, _: out.sum()) if waiting else nn.functional.cross_entropy)
    warm_up = job_spec["warm_up_steps"]
    began = time.monotonic()
    for step in range(warm_up):
        if step == warm_up // 2:
            began = time.monotonic()
        contender.step(inputs, targets)
    steps = None
    if job_spec["lockstep"]:
        # All make the same number of steps, a multiple of what recurs.
        likely = job_spec["seconds"] * (warm_up - warm_up // 2) / (time.monotonic() - began)
        count = torch.tensor([max(1, round(likely / job_spec["cycle"])) * job_spec["cycle"]])
        dist.broadcast(count, 0)
        steps = int(count)
    else:
        dist.barrier()
    before, made = contender.exchanges(), 0
    began, cpu = time.monotonic(), time.process_time()
    while made < steps if steps is not None else time.monotonic() < began + job_spec["seconds"]:
        contender.step(inputs, targets)
        made += 1
    took, cpu = time.monotonic() - began, time.process_time() - cpu
    exchanges = contender.exchanges() - before
    contender.end()
    return {"steps_per_s": made / took, "exchanges_per_step": exchanges / made, "cpu_s_per_step": cpu / made}


def accuracy(job_spec: JobSpec) -> dict[str, Any]:
    """How long until worker 0's own model is right on a given share of the test set.

    Its weights are put aside every few steps and looked at afterwards, so that looking takes no time.
    """
    torch.manual_seed(job_spec["seed"])
    data = Data(job_spec["task"], job_spec["data"])
    generator = torch.Generator().manual_seed(1000 * job_spec["seed"] + dist.get_rank())
    factor, first = slowed(job_spec), dist.get_rank() == 0
    model = MODELS[job_spec["task"]]()
    contender = Contender(job_spec, model, nn.functional.cross_entropy)
    store = dist.distributed_c10d._get_default_store()
    over = f"over/{job_spec['number']}"
    kept: list[tuple[float, int, dict[str, Tensor]]] = []
    dist.barrier()
    began, step = time.monotonic(), 0
    while step < job_spec["steps"] if job_spec["lockstep"] or first else not store.check([over]):
        step_began = time.monotonic()
        inputs, targets = data.batch(job_spec["batch"], generator)
        contender.loss(contender.forward(inputs), targets).backward()
        if factor > 1.0:
            # Slow is its gradient, not its optimizer nor what it waits for.
            time.sleep((factor - 1.0) * (time.monotonic() - step_began))
        assert contender.optimizer is not None
        contender.optimizer.step()
        contender.optimizer.zero_grad()
        step += 1
        if first and step % job_spec["keep_every"] == 0:
            weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
            kept.append((time.monotonic() - began, step, weights))
    if first:
        store.set(over, "1")
    contender.end()
    reached, best = None, 0.0
    for seconds, at, weights in kept:
        model.load_state_dict(weights)
        with torch.no_grad():
            right = float((model(data.test[0]).argmax(1) == data.test[1]).float().mean())
        best = max(best, right)
        if right >= job_spec["target"]:
            reached = {"seconds": seconds, "steps": at}
            break
    dist.barrier()
    return {"reached": reached, "best": best, "steps": step}


def memory(job_spec: JobSpec) -> dict[str, Any]:
    """How much memory this worker takes at most, beyond what it held before."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = resident("VmRSS")
    # The kernel then forgets the peak so far.
    Path("/proc/self/clear_refs").write_text("5")
    speed(job_spec)
    return {"peak_bytes": resident("VmHWM") - before}


def resident(what: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what):
            return int(line.split()[1]) * 1024
    raise AssertionError(what)


JOBS: dict[str, Callable[[JobSpec], dict[str, Any]]] = {"speed": speed, "accuracy": accuracy, "memory": memory}


def job_specs() -> Iterator[JobSpec]:
    for line in sys.stdin:
        yield json.loads(line)


def main() -> None:
    torch.set_num_threads(1)
    # Results go to where standard output was; whatever libraries print goes to standard error.
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    dist.init_process_group("gloo")
    with contextlib.suppress(KeyboardInterrupt):
        for job_spec in job_specs():
            dist.barrier()
            answer = JOBS[job_spec["job"]](job_spec)
            gc.collect()
            results.write(json.dumps(answer) + "\n")
            results.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
