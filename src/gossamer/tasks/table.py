"""The table of tasks, and how one is built from its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from gossamer.errors import InputError, unknown
from gossamer.tasks.cifar10 import cifar10
from gossamer.tasks.consensus import consensus
from gossamer.tasks.digits import digits
from gossamer.tasks.quadratic import quadratic
from gossamer.tasks.shakespeare import shakespeare
from gossamer.tasks.task import Task, TaskConfig
from gossamer.tasks.userfile import load_task


@dataclass(frozen=True)
class TaskEntry:
    make: Callable[[int, int, TaskConfig], Task]
    line: str
    # The fields of TaskConfig that the task looks at.
    options: tuple[str, ...]


TABLE = {
    "consensus": TaskEntry(consensus, "average random vectors; no data, no gradients", ("dim",)),
    "quadratic": TaskEntry(
        quadratic, "worker i minimises ½‖w − b_i‖²: everything known in closed form", ("dim", "noise")
    ),
    "digits": TaskEntry(digits, "1,797 handwritten digits of 8×8 pixels, built in; models mlp, conv", ("model",)),
    "shakespeare": TaskEntry(
        shakespeare, "next character of the text given by --data; a 0.24 M transformer", ("data",)
    ),
    "cifar10": TaskEntry(
        cifar10, "CIFAR-10 images from the folder given by --data; models resnet18, conv", ("model", "data")
    ),
}

DEFAULTS = TaskConfig()


def names() -> tuple[str, ...]:
    """The built-in tasks."""
    return tuple(TABLE)


def describe(name: str) -> str:
    """One line about a built-in task."""
    if name not in TABLE:
        raise unknown("task", name, TABLE)
    return TABLE[name].line


def build(spec: str, *, workers: int, seed: int, config: TaskConfig = DEFAULTS) -> Task:
    """The task called `spec`, or the one defined in the Python file at path `spec`."""
    if workers < 1:
        raise InputError(f"workers is {workers}: expected at least 1.")
    if seed < 0:
        raise InputError(f"seed is {seed}: expected a whole number of 0 or more.")
    if spec.endswith(".py"):
        refuse_unused(spec, (), config)
        return load_task(spec, workers=workers, seed=seed)
    if spec not in TABLE:
        raise unknown("task", spec, (*TABLE, "path/to/your_task.py"))
    row = TABLE[spec]
    refuse_unused(spec, row.options, config)
    return row.make(workers, seed, config)


def refuse_unused(spec: str, options: tuple[str, ...], config: TaskConfig) -> None:
    """An option that would have no effect is a mistake that should not pass in silence."""
    for option in fields(TaskConfig):
        value = getattr(config, option.name)
        if option.name not in options and value != option.default:
            users = ", ".join(name for name, row in TABLE.items() if option.name in row.options)
            raise InputError(
                f"task {spec} does not use {option.name} (given: {value!r}): "
                f"leave it out, or train one that does: {users}."
            )
