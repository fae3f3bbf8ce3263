"""Ready-made tasks: model, data, loss and metric; and how the data is dealt to the workers."""

from __future__ import annotations

from dataclasses import fields
from importlib import import_module
from pathlib import Path

from gossamer.errors import InputError, unknown
from gossamer.tasks.partition import Batches, partition, worker_batches
from gossamer.tasks.task import Task, TaskConfig, accuracy, cross_entropy
from gossamer.user_file import blaming, execute, importable

__all__ = [
    "TASKS",
    "Batches",
    "Task",
    "TaskConfig",
    "accuracy",
    "build",
    "cross_entropy",
    "names",
    "partition",
    "worker_batches",
]

TASKS: dict[str, tuple[str, ...]] = {
    "consensus": ("dim",),
    "quadratic": ("dim", "noise"),
    "digits": ("model",),
    "shakespeare": ("data",),
    "multi30k": ("data",),
    "cifar10": ("model", "data"),
}
"""The built-in tasks, each with the fields of ``TaskConfig`` that it uses.

The task NAME is built by the function NAME in the module ``gossamer.tasks.NAME``, which ``build`` loads: the command
line needs the names, but not torch.
"""

SAME_FOR_ALL = ("digits", "shakespeare", "multi30k", "cifar10")
"""The built-in tasks that are the same for every number of workers and every seed."""

EXPECTED = "expected `def task(workers: int, seed: int) -> Task` or `task = Task(...)`"
"""What the user's own file has to define."""


def names() -> tuple[str, ...]:
    """Return the names of the built-in tasks."""
    return tuple(TASKS)


def build(spec: str, *, workers: int, seed: int, config: TaskConfig | None = None) -> Task:
    """Return the built-in task called ``spec``, or the task that the Python file at path ``spec`` defines."""
    config = config or TaskConfig()
    if workers < 1:
        raise InputError(f"workers is {workers}: expected at least 1.")
    if seed < 0:
        raise InputError(f"seed is {seed}: expected a whole number of 0 or more.")
    if spec.endswith(".py"):
        _check_unused(spec, (), config)
        return _load_task(spec, workers, seed)
    if spec not in TASKS:
        raise unknown("task", spec, (*TASKS, "path/to/your_task.py"))
    _check_unused(spec, TASKS[spec], config)
    task: Task = getattr(import_module(f"gossamer.tasks.{spec}"), spec)(workers, seed, config)
    return task


def _load_task(spec: str, workers: int, seed: int) -> Task:
    path = Path(spec)
    if not path.is_file():
        raise InputError(f"task file {spec} does not exist: expected a Python file that defines `task`.")
    with blaming(path), importable(path.resolve().parent):
        module = execute(path)
        defined = getattr(module, "task", None)
        task = defined(workers=workers, seed=seed) if callable(defined) else defined
    if isinstance(task, Task):
        return task
    if callable(defined):
        raise InputError(f"{spec}: task() returned a {type(task).__name__}: {EXPECTED}.")
    if hasattr(module, "task"):
        raise InputError(f"{spec}: `task` is a {type(task).__name__}: {EXPECTED}.")
    raise InputError(f"{spec} defines no `task`: {EXPECTED}.")


def _check_unused(spec: str, used: tuple[str, ...], config: TaskConfig) -> None:
    """Raise ``InputError`` for an option that the task does not use: it would have no effect."""
    for field in fields(TaskConfig):
        value = getattr(config, field.name)
        if field.name not in used and value != field.default:
            users = ", ".join(name for name, options in TASKS.items() if field.name in options)
            raise InputError(
                f"task {spec} does not use {field.name} (given: {value!r}): leave it out, or train one of {users}."
            )
