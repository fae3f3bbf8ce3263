"""The errors for input that cannot be used and for methods that break their contract."""

from __future__ import annotations

import difflib
import os
import traceback
from collections.abc import Iterable


class InputError(ValueError):
    """Something that the user gave cannot be used.

    The message is one line: what was wrong, what was expected, what to do. The command line prints it without a
    traceback and exits with 2.
    """


class MethodError(InputError):
    """A method broke its contract (``gossamer.effects``). The message names the method, the generator and the rule."""


def unknown(kind: str, given: str, known: Iterable[str]) -> InputError:
    """Return the error for a name that is not in a table: it lists the known names and suggests the closest."""
    names = sorted(known)
    close = difflib.get_close_matches(given, names, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return InputError(f"unknown {kind} {given!r}: expected one of {', '.join(names)}.{hint}")


def one_line(error: BaseException) -> str:
    """Describe an exception and its origin in one line."""
    message = " ".join(str(error).split())
    if isinstance(error, InputError):
        return message
    frames = traceback.extract_tb(error.__traceback__)
    origin = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {message}{origin}"
