"""Scripts of users as workers of this machine: those that die are started again, those that fail are not."""

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import pytest

from gossamer.launch.script import Script, _exit_code
from gossamer.launch.script_supervisor import supervise
from gossamer.train.launcher import BAD_INPUT, StopSignals

TRAINS = """
import atexit, json, os, pathlib, signal, sys, time
import torch
import gossamer

folder, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]
atexit.register(lambda: (folder / f"atexit-{rank}").touch())
killed = folder / "killed"
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
swarm = gossamer.join(model, optimizer, method="gossip")


def step():
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.01)


came_back, back = killed.exists(), folder / "back"
while rank == "1" and not came_back and swarm.metrics().exchanges == 0:
    step()
if rank == "1" and not came_back:
    killed.touch()
    if sys.argv[2] == "for good":
        back.touch()
    os.kill(os.getpid(), signal.SIGKILL)
while not back.exists():
    step()
    if came_back and swarm.metrics().exchanges:
        back.touch()
swarm.finish()
weights = [value for parameter in model.parameters() for value in parameter.flatten().tolist()]
port = os.environ["MASTER_PORT"]
(folder / f"result-{rank}.json").write_text(json.dumps([__name__, sys.argv[2:], swarm.missing, port, weights]))
"""

WAITS = """
import pathlib, signal, sys, time
import torch
import gossamer

model = torch.nn.Linear(4, 1)
swarm = gossamer.join(model, torch.optim.SGD(model.parameters(), lr=0.01), method="gossip")
(pathlib.Path(sys.argv[1]) / f"joined-{swarm._runtime.rank}").touch()
while True:
    time.sleep(0.01)
"""


def launch(folder, code, arguments, signals=None, workers=2, max_restarts=3, grace_s=60.0):
    """Run a script in workers; return the outcome, and what was said of workers that died."""
    script, said = folder / "script.py", []
    script.write_text(code)
    outcome = supervise(
        Script(str(script), (str(folder), *arguments)),
        workers,
        max_restarts,
        None,
        signals or StopSignals(),
        said.append,
        grace_s,
    )
    return outcome, said


def test_a_worker_that_dies_starts_again_and_ends_with_the_model_of_the_others(tmp_path):
    outcome, said = launch(tmp_path, TRAINS, ("once", "--lr", "0.1"), workers=3)
    assert outcome.exit_codes == {0: 0, 1: 0, 2: 0}
    assert outcome.restarts == {0: 0, 1: 1, 2: 0}
    assert said == ["worker 1 died: killed by SIGKILL; it starts again (1 of 3), the others go on"]
    results = [json.loads((tmp_path / f"result-{rank}.json").read_text()) for rank in range(3)]
    assert results[0] == results[1] == results[2]
    name, arguments, missing, _, _ = results[0]
    assert (name, arguments, missing) == ("__main__", ["once", "--lr", "0.1"], [])
    assert sorted(path.name for path in tmp_path.glob("atexit-*")) == ["atexit-0", "atexit-1", "atexit-2"]


def test_a_script_that_fails_before_it_joins_ends_all_workers(tmp_path):
    fails = "import os, time\nif os.environ['RANK'] == '1':\n    raise SystemExit(3)\ntime.sleep(600)\n"
    outcome, said = launch(tmp_path, fails, ())
    assert outcome.failed == "worker 1 ended before it joined the others: ended with code 3"
    assert outcome.restarts == {0: 0, 1: 0}
    assert said == []


def test_a_worker_that_has_used_up_its_restarts_stays_away(tmp_path):
    outcome, said = launch(tmp_path, TRAINS, ("for good",), max_restarts=0)
    assert outcome.exit_codes == {0: 0, 1: -signal.SIGKILL}
    assert said == ["worker 1 died: killed by SIGKILL; the others go on"]


def test_a_stop_ends_the_workers_and_starts_none_again(tmp_path):
    signals = StopSignals()

    def stop():
        while len(list(tmp_path.glob("joined-*"))) < 2:
            time.sleep(0.01)
        signals.add()

    thread = threading.Thread(target=stop)
    thread.start()
    outcome, said = launch(tmp_path, WAITS, (), signals)
    thread.join()
    assert outcome.interrupted
    assert outcome.exit_codes == {0: -signal.SIGTERM, 1: -signal.SIGTERM}
    assert said == ["stopping: the workers have 60 s to end; a second Ctrl-C kills them"]


SAVES = """
except KeyboardInterrupt:
    # Longer than the launcher takes to notice.
    time.sleep(1.0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    (pathlib.Path(sys.argv[1]) / f"saved-{swarm.rank}").touch()
    while True:
        time.sleep(0.01)
"""


def wait_for(happened, within_s=120.0):
    until = time.monotonic() + within_s
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.01)


ON_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


class Terminal:
    """A command in the foreground of a terminal of its own, gone when the test is over."""

    def __init__(self, *command):
        self.keyboard, screen = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", ON_TERMINAL, *command],
            stdin=screen,
            stdout=screen,
            stderr=screen,
            start_new_session=True,
        )
        os.close(screen)
        self._said, self._reading = b"", threading.Thread(target=self._read)
        self._reading.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(ProcessLookupError):
            # Its workers end with it.
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        # The workers hold the terminal until they have ended.
        self._reading.join(60)
        os.close(self.keyboard)

    def _read(self):
        with contextlib.suppress(OSError):  # Linux raises it when the other end is closed
            while piece := os.read(self.keyboard, 4096):
                self._said += piece

    def type(self, key):
        os.write(self.keyboard, key)

    def signal(self, number):
        """To this process alone."""
        os.kill(self.process.pid, number)

    def lines(self):
        """What was said until the end."""
        self._reading.join(60)
        assert not self._reading.is_alive()
        return [line for line in self._said.decode().replace("^C", "").splitlines() if line]


def launched(tmp_path, code):
    script = tmp_path / "script.py"
    script.write_text(code)
    return Terminal("-m", "gossamer", "launch", "--workers", "2", "--grace", "600", str(script), str(tmp_path))


@pytest.mark.parametrize("stop", ["Ctrl-C", "SIGINT"])
def test_ctrl_c_in_a_terminal_lets_a_script_save_something_and_a_second_one_kills(tmp_path, stop):
    """SIGINT that is sent to the launcher alone, as by an editor's button, does the same."""
    with launched(tmp_path, WAITS.replace("while True:", "try:\n  while True:") + SAVES) as terminal:
        interrupt = partial(terminal.type, b"\x03") if stop == "Ctrl-C" else partial(terminal.signal, signal.SIGINT)
        wait_for(lambda: all((tmp_path / f"joined-{rank}").exists() for rank in range(2)))
        interrupt()
        wait_for(lambda: all((tmp_path / f"saved-{rank}").exists() for rank in range(2)))
        interrupt()
        assert terminal.process.wait(120) == 130
        lines = terminal.lines()
    assert lines == [
        "gossamer: stopping: the workers have 600 s to end; a second Ctrl-C kills them",
        "gossamer: stopped",
    ]


COUNTS = """
import os, pathlib, sys, time
import torch
import gossamer

model = torch.nn.Linear(4, 1)
swarm = gossamer.join(model, torch.optim.SGD(model.parameters(), lr=0.01), method="gossip")
folder = pathlib.Path(sys.argv[1])
(folder / f"pid-{swarm.rank}.part").write_text(str(os.getpid()))
(folder / f"pid-{swarm.rank}.part").rename(folder / f"pid-{swarm.rank}")
while not (folder / "enough").exists():
    time.sleep(0.01)
swarm.finish()
"""


def state(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="looks into /proc")
def test_ctrl_z_in_a_terminal_stops_the_workers_too_and_they_go_on_with_the_launcher(tmp_path):
    with launched(tmp_path, COUNTS) as terminal:
        files = [tmp_path / f"pid-{rank}" for rank in range(2)]
        wait_for(lambda: all(file.exists() for file in files))
        pids = [terminal.process.pid, *(int(file.read_text()) for file in files)]
        terminal.type(b"\x1a")
        wait_for(lambda: all(state(pid) == "T" for pid in pids))
        # As a shell does at "fg".
        os.killpg(terminal.process.pid, signal.SIGCONT)
        wait_for(lambda: all(state(pid) != "T" for pid in pids))
        (tmp_path / "enough").touch()
        assert terminal.process.wait(120) == 0


def test_workers_end_when_their_launcher_is_killed(tmp_path):
    script = tmp_path / "script.py"
    # One write: lines of several workers must not mix.
    script.write_text(WAITS.replace("while True:", "import os\nos.write(1, b'joined\\n')\nwhile True:"))
    command = [sys.executable, "-m", "gossamer", "launch", "--workers", "2", str(script), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        try:
            assert [running.stdout.readline() for _ in range(2)] == ["joined\n", "joined\n"]
        finally:
            running.kill()
        running.wait()
        # The workers hold the other end of the pipe: it ends with them.
        assert running.stdout.read() == ""


@pytest.mark.parametrize(
    ("code", "ends_with", "says"),
    [
        ("", 0, ""),
        ("import sys; sys.exit(7)", 7, ""),
        ("raise SystemExit('no data')", 1, "no data\n"),
        ("raise KeyboardInterrupt", 130, ""),
        ("from gossamer.errors import InputError\nraise InputError('lr is -1')", BAD_INPUT, "gossamer: lr is -1\n"),
    ],
)
def test_a_script_ends_as_python_would_end_it(tmp_path, capsys, code, ends_with, says):
    script = tmp_path / "script.py"
    script.write_text(code)
    assert _exit_code(Script(str(script))) == ends_with
    assert capsys.readouterr().err == says


def test_the_traceback_of_a_script_begins_in_the_script(tmp_path, capsys, monkeypatch):
    for name in ("last_type", "last_value", "last_traceback"):
        monkeypatch.setattr(sys, name, None, raising=False)
    script = tmp_path / "script.py"
    script.write_text("def f():\n    return 1 / 0\nf()\n")
    assert _exit_code(Script(str(script))) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].split(",")[0] == f'  File "{script}"'
    assert lines[-1] == "ZeroDivisionError: division by zero"
    assert isinstance(sys.last_value, ZeroDivisionError)


def test_a_module_runs_as_python_m_does(tmp_path, capsys):
    assert _exit_code(Script("this", is_module=True)) == 0
    assert "Beautiful is better than ugly." in capsys.readouterr().out
    assert _exit_code(Script("no_such_module_here", is_module=True)) == 1
