"""A training job whose workers each live in a network of their own, so that tests can separate and join them."""

from __future__ import annotations

import ctypes
import os
from multiprocessing.connection import Connection
from typing import Any

import training_script

from gossamer.errors import InputError

CLONE_NEWNET = 0x40000000


def train(rank: int, environment: dict[str, str], order: dict[str, Any], out: Connection) -> None:
    """Enter this worker's network namespace, then train. The process has no other thread yet that stays outside."""
    handle = os.open(f"/run/netns/{order['spaces'][rank]}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(handle, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(handle)
    try:
        training_script.train(rank, environment, order, out)
    except InputError as error:
        out.send({"at": "ended", "why": str(error)})
