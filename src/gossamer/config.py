"""The settings of a run, and how a run is built from them.

A value that the user gives wins over the method's preference, which wins over the task's, which wins over the general
default.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from gossamer import tasks, wire
from gossamer.errors import InputError, MethodError, unknown
from gossamer.hardware import HardwareConfig, parse_link
from gossamer.methods import METHODS, AnyMethod, Method, MethodConfig, Source, locate
from gossamer.methods.divisible import Divisible
from gossamer.methods.loading.method_contract import is_encodable
from gossamer.methods.loading.method_source import build as build_method
from gossamer.methods.loading.method_source import check_ready
from gossamer.replica_time import INSIDE, ReplicaShape
from gossamer.schedules import SHAPES
from gossamer.settings import Settings, from_values, option
from gossamer.tasks import Task, TaskConfig
from gossamer.topology import Topology, build
from gossamer.topology import names as topologies

if TYPE_CHECKING:
    import networkx as nx
    import torch
    from torch import nn

    from gossamer.virtual.compute.optimizers import MakeOptimizer
    from gossamer.wire import Codec

AUTO = "auto"
"""Stands for the method that ``gossamer.plan.auto`` chooses."""

PRECISIONS = ("float32", "bfloat16")
GRADIENT_BACKENDS = ("auto", "batched", "graph", "compiled", "loop")


@dataclass(frozen=True, kw_only=True)
class RunConfig(Settings):
    """Settings of every run, whatever its method, task and hardware."""

    task: str = option("digits", "what to train: the name of a task, or a Python file that defines one")
    method: str = option("a2cid2", "how to train: a name, or path.py[:CLASS]; several, with commas, are compared")
    topology: str = option("ring", "the graph of the workers: a name, or an edge-list file")
    workers: int = option(16, "number of workers", minimum=1)
    steps: int = option(200, "steps per worker; time units on the ideal clock", minimum=1)
    epochs: float = option(0.0, "passes over the data by all workers together, instead of --steps", minimum=0)
    optimizer: str = option("sgd", "any optimizer of torch by name, or accumadam, accumadamw")
    lr: float = option(0.05, "learning rate", minimum=0)
    momentum: float = option(0.9, "momentum, for optimizers that have one", minimum=0, maximum=1)
    weight_decay: float = option(0.0, "weight decay", minimum=0)
    accumadam_period: int = option(4, "steps over which AccumAdam accumulates gradients for its moments", minimum=1)
    schedule: str = option("constant", "how the learning rate changes over the run", choices=tuple(SHAPES))
    lr_warmup: int = option(0, "steps over which the learning rate rises at the start", minimum=0)
    batch: int = option(32, "samples per mini-batch and worker, or rank of a replica", minimum=1)
    replica_size: int = option(1, "ranks per worker, which is then a replica; 1: each worker is one rank", minimum=1)
    inside: str = option("ddp", "what connects the ranks of a replica", choices=INSIDE)
    partition: str = option("iid", "how the data is dealt to the workers: iid, dirichlet:ALPHA or by-class")
    wire: str = option("float32", "how models that are exchanged or averaged travel", choices=wire.names())
    seed: int = option(0, "seed of all random numbers", minimum=0, maximum=2**63 - 1)
    clock: str = option(
        "hardware", "ideal: the papers' Poisson model; hardware: described machines", choices=("ideal", "hardware")
    )
    device: str = option("cpu", "where to compute: cpu or cuda")
    precision: str = option(
        "float32", "arithmetic of the models; bfloat16: by autocast, weights keep their dtype", choices=PRECISIONS
    )
    gradient_backend: str = option("auto", "how the workers' gradients are computed", choices=GRADIENT_BACKENDS)
    eval_every: int = option(
        0, "history points between two evaluations on the test set; 0: as often as is cheap", minimum=0
    )

    @property
    def time_unit(self) -> str:
        return "s" if self.clock == "hardware" else "gradients"

    @property
    def worker_batch(self) -> int:
        """Samples of one step of a worker, by all its ranks together."""
        return self.batch * self.replica_size


SECTIONS: tuple[type[Settings], ...] = (RunConfig, HardwareConfig, TaskConfig)
"""The settings classes that do not belong to a method."""


@dataclass(frozen=True)
class Run:
    """One run, ready to start."""

    config: RunConfig
    hardware: HardwareConfig
    task_config: TaskConfig
    method_config: MethodConfig
    task: Task
    topology: Topology
    make_optimizer: MakeOptimizer
    schedule: Callable[[int], float]
    """Step number → factor on the learning rate."""
    codec: Codec | None
    """How models are encoded on the wire; None: not at all."""
    built_method: Method
    method_spec: str
    """What finds the method's class in another process: its name, or its file and name."""

    def method(self) -> Method:
        return self.built_method

    @property
    def replica(self) -> ReplicaShape | None:
        """What each worker consists of, if it is a replica of several ranks."""
        c, hardware = self.config, self.hardware
        if c.replica_size == 1:
            return None
        link = parse_link(hardware.replica_link or hardware.node_link, "--replica-link")
        return ReplicaShape(c.replica_size, c.inside, link, hardware.replica_blocks)

    def values(self) -> dict[str, Any]:
        """Return all settings by name, as in a configuration file."""
        merged: dict[str, Any] = {}
        for settings in (self.config, self.task_config, self.method_config, self.hardware):
            merged |= dataclasses.asdict(settings)
        return merged | {"method": self.method_spec}


def find_device(name: str) -> torch.device:
    """Return the torch device called ``name``. Raise ``InputError`` if this machine does not have it."""
    import torch

    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"--device is {name!r}: expected cpu, cuda or cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError("--device is cuda, but torch finds no CUDA device: use --device cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(f"--device is {name!r}, but this machine has {torch.cuda.device_count()} CUDA devices")
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"--device is {name!r}: expected cpu, cuda or cuda:N")
    return device


def make_schedule(kind: str, steps: int, warmup: int) -> Callable[[int], float]:
    """Return the function from the step number to a factor on the learning rate."""
    shape = SHAPES[kind]

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, steps - warmup))
        return shape(progress)

    return factor


def find_methods(method: AnyMethod) -> list[Source]:
    """Return the methods that a text names, separated by commas; or the one that is given as an object."""
    given = [name.strip() for name in method.split(",")] if isinstance(method, str) else [method]
    sources = [locate(each) for each in given]
    names = [source.name for source in sources]
    if len(set(names)) != len(names):
        raise InputError(f"--method names {', '.join(names)}: expected each method once, and each with its own name")
    for source in sources:
        _check_option_names(source.method)
    return sources


def methods_with_options(sources: Iterable[Source] = ()) -> dict[str, type[Method]]:
    """Return by name the methods whose options a run may have: those of the table, and of ``sources``."""
    return METHODS | {source.name: source.method for source in sources}


def method_fields(sources: Iterable[Source] = ()) -> dict[str, list[str]]:
    """Return every option of every method, with the names of the methods that have it."""
    owners: dict[str, list[str]] = {}
    for name, method in methods_with_options(sources).items():
        for field in dataclasses.fields(method.Config):
            owners.setdefault(field.name, []).append(name)
    return owners


def _check_option_names(method: type[Method]) -> None:
    for field in dataclasses.fields(method.Config):
        if field.name in _common_fields():
            raise MethodError(
                f"Config of method {method.name} has an option {field.name}, as every run has: give it another name"
            )


def resolve(
    values: Mapping[str, Any],
    *,
    method: type[Method] | Method | None = None,
    task: Task | None = None,
    graph: nx.Graph | None = None,
    make_optimizer: MakeOptimizer | None = None,
    schedule: Callable[[int], float] | None = None,
    codec: Codec | None = None,
    build_task: Callable[..., Task] = tasks.build,
) -> list[Run]:
    """Return the runs that ``values`` (by option name) describe: one per method.

    A method, a task, a graph, a function that creates the optimizer, a learning-rate schedule (step number → factor)
    and a codec may also be given as objects, which win over their names. A method that is built already brings its
    topology. ``build_task`` is called in place of ``tasks.build``, with its arguments.
    """
    sources = find_methods(str(values.get("method", RunConfig.method)) if method is None else method)
    _check_names(values, sources)
    ready = method if isinstance(method, Method) else None
    hardware, task_config = from_values(HardwareConfig, values), from_values(TaskConfig, values)
    # Check the bounds of the given values before building anything from them.
    first = from_values(RunConfig, values)
    by_name = graph is None and first.topology.partition(":")[0] in topologies()
    # The user's own graph determines the number of workers.
    workers = first.workers if (by_name and ready is None) or "workers" in values else None
    if ready is not None:
        topology = check_ready(ready, workers, [name for name in values if name not in _common_fields()])
    else:
        topology = build(
            first.topology if graph is None else graph, workers=workers, seed=first.seed, nodes=hardware.nodes or None
        )
    if task is None:
        task = build_task(first.task, workers=topology.workers, seed=first.seed, config=task_config)
    if (first.wire != RunConfig.wire or codec is not None) and not any(is_encodable(each.method) for each in sources):
        names = ", ".join(each.name for each in sources)
        raise InputError(
            f"--wire is for models that are exchanged or averaged, which {names} does not do: leave it out"
        )
    runs = []
    for source in sources:
        config = _run_config(values, source, task, topology)
        method_config = from_values(source.method.Config, values)
        run = Run(
            config=config,
            hardware=hardware,
            task_config=task_config,
            method_config=method_config if ready is None else getattr(ready, "config", method_config),
            task=task,
            topology=topology,
            make_optimizer=make_optimizer or partial(_optimizer, config),
            schedule=schedule or make_schedule(config.schedule, config.steps, config.lr_warmup),
            codec=(codec or wire.find(config.wire)) if is_encodable(source.method) else None,
            built_method=build_method(source.method, method_config, topology) if ready is None else ready,
            method_spec=source.spec,
        )
        if make_optimizer is None:
            import torch

            # Two dimensions, because some optimizers accept nothing else.
            run.method().check_optimizer(run.make_optimizer([torch.nn.Parameter(torch.zeros(1, 1))]))
        runs.append(run)
    return runs


def _run_config(values: Mapping[str, Any], source: Source, task: Task, topology: Topology) -> RunConfig:
    """Return the general settings of a run: the user's, or the method's, or the task's, or the general defaults."""
    from gossamer import optim

    defaults = dict(task.defaults)
    lrs = defaults.pop("lr", {})
    if getattr(from_values(source.method.Config, values), "quasi_global", 0.0) > 0:
        # It takes the place of the optimizer's own momentum.
        defaults["momentum"] = 0.0
    if source.method.preferred_optimizer:
        defaults["optimizer"] = source.method.preferred_optimizer
    optimizer = str(values.get("optimizer", defaults.get("optimizer", RunConfig.optimizer))).lower()
    if not isinstance(lrs, Mapping):
        lrs = {defaults.get("optimizer", RunConfig.optimizer): lrs}
    defaults["lr"] = lrs.get(optimizer, lrs.get(optimizer.removeprefix("accum"), optim.default_lr(optimizer)))
    merged = {**defaults, **values, "method": source.name, "optimizer": optimizer, "workers": topology.workers}
    if not is_encodable(source.method):
        merged["wire"] = RunConfig.wire
    config = from_values(RunConfig, merged)
    if task.own_data and config.partition != RunConfig.partition:
        raise InputError(f"--partition does not apply to {config.task}: its workers have data of their own")
    if config.epochs:
        per_epoch = len(task.train[0]) / (config.workers * config.worker_batch)
        config = dataclasses.replace(config, steps=max(1, math.ceil(config.epochs * per_epoch)))
    find_device(config.device)
    check_replicas(config, task, source.method)
    return config


def check_replicas(config: RunConfig, task: Task, method: type[Method]) -> None:
    if config.replica_size == 1:
        if config.inside != RunConfig.inside:
            raise InputError(f"--inside {config.inside} is for replicas of several ranks: give --replica-size too")
    elif not task.gradients:
        raise InputError(
            f"--replica-size is {config.replica_size}, but {task.name} has no gradients that the ranks of a replica "
            "could share: leave it out, or train another task"
        )
    elif config.inside == "fsdp" and issubclass(method, Divisible):
        raise InputError(
            f"{config.method} compresses a gradient as a whole, and with --inside fsdp a rank has a part of it: take "
            "--inside ddp, or another method"
        )


def _optimizer(config: RunConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    from gossamer import optim

    return optim.make(
        config.optimizer,
        parameters,
        lr=config.lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        period=config.accumadam_period,
    )


def unused_options(run: Run) -> list[str]:
    """Return the options that describe machines but were given to a run on the ideal clock, which has none."""
    if run.config.clock != "ideal":
        return []
    names = ("compute", "straggler", "link", "node_link", "slow_link")
    given = [name for name in names if getattr(run.hardware, name) != getattr(HardwareConfig, name)]
    return ["--" + name.replace("_", "-") for name in given]


def _common_fields() -> set[str]:
    return {field.name for section in SECTIONS for field in dataclasses.fields(section)}  # type: ignore[arg-type]


def _check_names(values: Mapping[str, Any], sources: Sequence[Source]) -> None:
    """Raise ``InputError`` for an option that no run has, or none with these methods."""
    owners, chosen = method_fields(sources), [source.name for source in sources]
    known = _common_fields() | owners.keys()
    for name in values:
        if name not in known:
            raise unknown("option", name, known)
        if name in owners and not set(owners[name]) & set(chosen):
            raise InputError(
                f"--{name.replace('_', '-')} does not apply to {', '.join(chosen)}: "
                f"it is an option of {', '.join(owners[name])}"
            )
