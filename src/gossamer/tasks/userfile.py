"""A task of one's own: a Python file that defines `task`.

Either a function `def task(workers: int, seed: int) -> Task`, or a `Task` by that name.
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
    """The task that the file `spec` defines."""
    path = Path(spec)
    if not path.is_file():
        raise InputError(f"task file {spec} does not exist: expected a Python file that defines `task`.")
    with blaming(path), importable(path.resolve().parent):
        module = execute(path)
        found = getattr(module, "task", None)
        task = found(workers=workers, seed=seed) if callable(found) else found
    if isinstance(task, Task):
        return task
    if callable(found):
        raise InputError(f"{spec}: task() returned a {type(task).__name__}: {EXPECTED}.")
    if hasattr(module, "task"):
        raise InputError(f"{spec}: `task` is a {type(task).__name__}: {EXPECTED}.")
    raise InputError(f"{spec} defines no `task`: {EXPECTED}.")


def execute(path: Path) -> ModuleType:
    # A name of its own, so that a file called numpy.py stays harmless.
    name = f"gossamer_task_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickle look a class up in its module.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Let the file import its neighbours, as it could if it were run as a script."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


@contextmanager
def blaming(path: Path) -> Iterator[None]:
    """Turn whatever the file raises into one line that says where in the file."""
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
        # The first line only; some libraries explain themselves over many.
        said = str(error.msg if isinstance(error, SyntaxError) else error).strip().split("\n")[0]
        raise InputError(f"{where}: {type(error).__name__}: {said}") from error
