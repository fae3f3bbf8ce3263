"""Loads the user's own Python files: one that defines a task, a method or a tracker."""

from __future__ import annotations

import sys
import traceback
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from gossamer.errors import InputError

PREFIX = "gossamer_file_"
"""Starts the name of every module that is a user's file, so that a file called numpy.py does not replace numpy."""


def execute(path: Path) -> ModuleType:
    """Run a Python file as a module of its own, and return it."""
    path = path.resolve()
    # Files of the same name in different folders are different modules.
    name = f"{PREFIX}{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    module = ModuleType(name)
    module.__file__ = str(path)
    # Dataclasses and pickle look up a class in its module.
    sys.modules[name] = module
    # Not by an import, which would keep the file's bytecode and miss a change within the same second.
    exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
    return module


def path_of(defined: type) -> Path | None:
    """Return the user's file that defines a class; None if it comes from a module of another kind."""
    if not defined.__module__.startswith(PREFIX):
        return None
    return Path(str(sys.modules[defined.__module__].__file__))


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
        raise blame(path, error) from error


def blame(path: Path, error: BaseException) -> InputError:
    """Return the ``InputError`` of one line for an exception of the file at ``path``."""
    where, file = str(path), str(path.resolve())
    if isinstance(error, SyntaxError) and error.filename == file:
        line = error.lineno
    else:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == file]
        line = lines[-1] if lines else None
    if line is not None:
        where += f", line {line}"
    return InputError(f"{where}: {describe(error)}")


def describe(error: BaseException) -> str:
    """Return the kind and the message of an exception in one line."""
    # The first line only: some libraries raise long explanations.
    message = str(error.msg if isinstance(error, SyntaxError) else error).strip().split("\n")[0]
    return f"{type(error).__name__}: {message}"
