"""Loading the user's own Python files, such as one that defines a task.

A task file defines ``task``: a function ``def task(workers: int, seed: int) -> Task``, or a ``Task``.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from gossamer.errors import InputError
from gossamer.tasks.task import Task

EXPECTED = "expected `def task(workers: int, seed: int) -> Task` or `task = Task(...)`"


def load_task(spec: str, *, workers: int, seed: int) -> Task:
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


def execute(path: Path) -> ModuleType:
    # The prefix prevents that a file called numpy.py replaces numpy.
    name = f"gossamer_task_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickle look up a class in its module.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Let the file import modules from its own folder, as a script can."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


@contextmanager
def blaming(path: Path) -> Iterator[None]:
    """Turn any exception of the file into an ``InputError`` of one line that names the line in the file."""
    try:
        yield
    except (Exception, SystemExit) as error:
        where = str(path)
        if isinstance(error, SyntaxError) and error.filename == str(path.resolve()):
            line = error.lineno
        else:
            frames = traceback.extract_tb(error.__traceback__)
            lines = [frame.lineno for frame in frames if frame.filename == str(path.resolve())]
            line = lines[-1] if lines else None
        if line is not None:
            where += f", line {line}"
        # The first line only: some libraries raise long explanations.
        message = str(error.msg if isinstance(error, SyntaxError) else error).strip().split("\n")[0]
        raise InputError(f"{where}: {type(error).__name__}: {message}") from error
