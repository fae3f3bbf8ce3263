"""Settings of torchft that are compared, and its coordinator, the lighthouse."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from worker_processes import free_port


@dataclass(frozen=True)
class TorchftSettings:
    timeouts: dict[str, float] = field(default_factory=dict)
    """Of its manager, in seconds."""
    use_async_quorum: bool = True
    lighthouse: tuple[str, ...] = ()
    """Options of its coordinator."""

    def for_worker(self) -> dict[str, Any]:
        """What a worker has to know (``torchft_loop.py``)."""
        return {"timeouts": self.timeouts, "use_async_quorum": self.use_async_quorum}


PR_SET_PDEATHSIG = 1
TUNED_TIMEOUTS = {"timeout": 2.0, "quorum_timeout": 10.0, "connect_timeout": 5.0, "heartbeat_interval": 0.05}
TUNED_LIGHTHOUSE = ("--join_timeout_ms", "1000", "--quorum_tick_ms", "10", "--heartbeat_timeout_ms", "1000")
DEFAULT = TorchftSettings()
TUNED = TorchftSettings(TUNED_TIMEOUTS, lighthouse=TUNED_LIGHTHOUSE)
TUNED_SYNCHRONOUS = TorchftSettings(TUNED_TIMEOUTS, use_async_quorum=False, lighthouse=TUNED_LIGHTHOUSE)


def end_with_parent() -> None:
    """Let the kernel kill this process when the benchmark is killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@contextlib.contextmanager
def lighthouse(settings: TorchftSettings, python: Path, folder: Path) -> Iterator[str]:
    """Run torchft's coordinator and yield its address."""
    port = free_port()
    command = [str(python.with_name("torchft_lighthouse")), "--bind", f"[::]:{port}", "--min_replicas", "1"]
    with (folder / "lighthouse.log").open("w") as log:
        process = subprocess.Popen([*command, *settings.lighthouse], stdout=log, stderr=log, preexec_fn=end_with_parent)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()
