"""What goes wrong because of what a person gave us, and how it is said."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Something the user gave cannot be used.

    The message is one line that says what was wrong, what was expected and what to do. The command line
    prints it without a traceback and exits with 2.
    """


def unknown(kind: str, given: str, known: Iterable[str]) -> InputError:
    """The error for a name that is not in a table: it lists the names and guesses what was meant."""
    names = sorted(known)
    close = difflib.get_close_matches(given, names, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return InputError(f"unknown {kind} {given!r}: expected one of {', '.join(names)}.{hint}")
