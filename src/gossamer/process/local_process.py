"""Names a process so that others on its machine can tell whether it has ended, whoever has its port by now."""

from __future__ import annotations

import os
import re
from pathlib import Path

UNKNOWN = "-"
"""The name of a process where the system has no /proc."""

NAME = re.compile(r"(?P<machine>[0-9a-f-]{1,64}:[0-9]{1,20}):(?P<pid>[1-9][0-9]{0,9}):(?P<started>[0-9]{1,20})")


def own_name() -> str:
    try:
        return f"{_machine()}:{os.getpid()}:{_started('self')}"
    except OSError:
        return UNKNOWN


def has_ended(name: str) -> bool:
    """Return whether a process of this machine has ended; False also if that cannot be known here."""
    match = NAME.fullmatch(name)
    try:
        if match is None or match["machine"] != _machine():
            return False
        os.kill(int(match["pid"]), 0)
        return _started(match["pid"]) != match["started"]
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False


def _machine() -> str:
    """Return which start of which machine this is, and which of its numberings of processes: containers have others.

    OSError if /proc is that of another numbering.
    """
    if os.readlink("/proc/self") != str(os.getpid()):
        raise OSError("/proc numbers other processes")
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}"


def _started(pid: str) -> str:
    """Return when a process was started; another one can have its number later. ProcessLookupError if it is a zombie:
    it holds nothing any more, but its parent has not asked how it ended."""
    # The name of the program, in brackets, may hold anything.
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    if fields[0] in (b"Z", b"X") and not _has_threads(pid):
        raise ProcessLookupError(pid)
    return fields[19].decode()


def _has_threads(pid: str) -> bool:
    """Return whether a process goes on in other threads than its first."""
    return len(os.listdir(f"/proc/{pid}/task")) > 1
