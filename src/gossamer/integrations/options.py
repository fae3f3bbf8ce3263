"""The options of ``gossamer.join`` as integrations take them: checked where the user writes them."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable
from typing import Any

from gossamer.api import join
from gossamer.config import AUTO
from gossamer.errors import InputError
from gossamer.methods import find

NOT_HERE = ("model", "optimizer", "loss", "settings")
"""Parameters of ``join`` that an integration gives itself, or cannot."""


def check_join_options(options: dict[str, Any], others: Iterable[str] = ()) -> dict[str, Any]:
    """Return ``options``, keyword arguments of ``join``; ``InputError`` if a name is unknown.

    ``others``: arguments that the integration takes itself, to suggest if a name is misspelt.
    """
    if options["method"] == AUTO:
        raise InputError("method auto has to time a step of a loop of your own: name a method here")
    kind = find(options["method"])
    own = [name for name in inspect.signature(join).parameters if name not in NOT_HERE]
    known = [*own, *kind.Config.__dataclass_fields__]
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, [*known, *others], n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"expected some of {', '.join(known)}"
            raise InputError(f"neither gossamer.join nor {kind.name} has an option {name!r}: {hint}")
    return options
