"""The board: what workers publish in the store about how far they are, for those that come later."""

from __future__ import annotations

import re

from gossamer.process.liveness.records import Stage
from gossamer.process.store.parsing import MAX_PROCESS

BOARD_INTERVAL_S = 1.0
"""How often a worker reads what the others have published."""

BOARD_WORKERS = 64
"""Among more workers each of them reads less often."""


def read_stage(value: bytes | None) -> tuple[Stage, int] | None:
    """Return the stage that a worker has published, and its process."""
    match = re.fullmatch(rb"([0123]) ([0-9]{1,19})", value or b"")
    if match is None or int(match[2]) > MAX_PROCESS:
        return None
    return Stage(int(match[1])), int(match[2])
