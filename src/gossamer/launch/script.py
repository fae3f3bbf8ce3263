"""A user's script in a worker's process, run as Python would run it."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import sys
import threading
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from types import TracebackType

from gossamer.errors import InputError, one_line
from gossamer.process.net import secret
from gossamer.process.store.rank_info import LAUNCHER_STORE, RankInfo
from gossamer.train.launcher import BAD_INPUT

END_TIMEOUT_S = 10.0
"""How long a script may take to end after its launcher has died."""


@dataclass(frozen=True)
class Script:
    """What to run: ``python NAME ARGUMENTS``, or ``python -m NAME ARGUMENTS``."""

    name: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    torch_port: int = 0
    """Free for a store of torch's own, if the script makes a process group."""
    prints_to_stderr: bool = False


def run_script(script: Script, rank_info: RankInfo) -> int:
    """Run ``script`` as one of the workers of a launcher; return its exit code."""
    # The launcher passes signals on, once each: this process does not hear those of the terminal, but may write to it.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    os.setpgid(0, 0)
    # What a shell starts in the background, and all it starts, would not hear Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=_end_with_launcher, name="gossamer-launcher-watch", daemon=True).start()
    os.environ[LAUNCHER_STORE] = f"{rank_info.host}:{rank_info.port}"
    os.environ.update(MASTER_PORT=str(script.torch_port), LOCAL_WORLD_SIZE=str(rank_info.workers))
    if not {secret.VALUE, secret.FILE} & os.environ.keys():
        os.environ[secret.VALUE] = rank_info.secret.decode()
    if script.prints_to_stderr:
        os.dup2(2, 1)
    sys.argv = [script.name, *script.arguments]
    sys.path.insert(0, os.getcwd() if script.is_module else str(Path(script.name).resolve().parent))
    code = _exit_code(script)
    # A process of ``multiprocessing`` ends without what was registered for its end, which comes after its threads.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    return code


def _exit_code(script: Script) -> int:
    """Run ``script`` and return the exit code that Python would end with; an exception is shown as Python shows it."""
    try:
        if script.is_module:
            runpy.run_module(script.name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script.name, run_name="__main__")
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BaseException as error:
        error = error.with_traceback(_of_the_script(error.__traceback__))
        # Where Python puts what has ended a process, and others look for it.
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        if isinstance(error, InputError):
            print(f"gossamer: {one_line(error)}", file=sys.stderr)
            return BAD_INPUT
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def _of_the_script(trace: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that begins in the script."""
    ours = {__file__, runpy.__file__, "<frozen runpy>"}
    inner = trace
    while inner is not None and inner.tb_frame.f_code.co_filename in ours:
        inner = inner.tb_next
    return inner or trace


def _end_with_launcher() -> None:
    """End this process if its launcher dies: nobody would end it then."""
    launcher = multiprocessing.parent_process()
    if launcher is not None:
        connection.wait([launcher.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(END_TIMEOUT_S)
        os.kill(os.getpid(), signal.SIGKILL)
