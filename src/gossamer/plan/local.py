"""Workers on this machine that run a command of ours together, as torchrun would start them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence

from gossamer.process.store.rank_info import free_port

AFTER_S = 30.0
"""How long the others may go on when one has ended badly: they notice by themselves and say what was lost."""


def launch(arguments: Sequence[str], workers: int, quiet: bool = False) -> int:
    """Run ``gossamer …`` in so many processes that meet; returns the exit code of the worst. ``quiet``: errors only."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "WORLD_SIZE": str(workers),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "TORCH_CPP_LOG_LEVEL": "FATAL",
    }
    program = [sys.executable, "-m", "gossamer", *arguments]
    started = [
        subprocess.Popen(
            program,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL if quiet else None,
        )
        for rank in range(workers)
    ]
    failed_at: float | None = None
    try:
        while any(process.poll() is None for process in started):
            bad = [process for process in started if process.poll() not in (None, 0)]
            if bad and failed_at is None:
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() - failed_at > AFTER_S:
                break
            time.sleep(0.05)
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
            process.wait()
    return max(abs(process.returncode) if process.returncode in (0, 1, 2, 130) else 1 for process in started)
