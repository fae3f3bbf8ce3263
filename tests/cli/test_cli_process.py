"""A real ``gossamer`` process: pipes, terminals and Ctrl-C."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time

import pytest

LONG = ("simulate", "--task", "digits", "--workers", "4", "--steps", "100000", "--batch", "8", "--eval-every", "100000")


def test_a_pipe_gets_no_escape_codes(process, quick):
    ran = process(*quick, "--method", "gossip,lasgd", "--fail", "1@0.1")
    assert ran.code == 0
    assert "\x1b" not in ran.out + ran.err
    assert "\r" not in ran.out + ran.err
    assert "gossip" in ran.out


def test_a_reader_that_closes_the_pipe_early_is_no_error(command, quick, tmp_path):
    program, environment = command
    running = subprocess.Popen(
        [*program, *quick, "--json"], env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    running.stdout.close()
    assert running.stderr.read() == b""
    running.stderr.close()
    assert running.wait(60) == 0


@pytest.mark.parametrize("form", ["text", "json"])
def test_ctrl_c_keeps_what_there_is(command, tmp_path, form):
    program, environment = command
    running = subprocess.Popen(
        [*program, *LONG, "--method", "gossip,lasgd", "--out", "run", *(("--json",) if form == "json" else ())],
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics = tmp_path / "run" / "gossip" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count("\n") > 3):
        assert running.poll() is None, running.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "Traceback" not in out + err
    assert err.splitlines()[-1].startswith("gossamer: stopped at time ")
    assert "run" in err.splitlines()[-1]
    if form == "json":
        (result,) = json.loads(out)["results"]
        assert result["interrupted"] is True
        assert len(result["history"]) > 3
    else:
        assert "gossip" in out
    folder = tmp_path / "run" / "gossip"
    assert {path.name for path in folder.iterdir()} == {
        *("run.json", "config.toml", "metrics.jsonl", "recording.json", "summary.json", "model.safetensors")
    }
    assert json.loads((folder / "summary.json").read_text())["interrupted"] is True
    assert not (tmp_path / "run" / "lasgd").exists()


def on_terminal(command, arguments, width, folder):
    """What a terminal of that width is sent, standard error included."""
    program, environment = command
    ours, theirs = pty.openpty()
    environment = {**environment, "COLUMNS": str(width), "LINES": "40"}
    running = subprocess.Popen(
        [*program, *arguments], env=environment, cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    sent = b""
    while True:
        try:
            piece = os.read(ours, 4096)
        except OSError:  # Linux raises it when the other end is closed
            break
        if not piece:
            break
        sent += piece
    os.close(ours)
    assert running.wait(60) == 0
    return sent.decode()


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_terminal_of_80_columns_can_read_the_table(command, tmp_path):
    arguments = ("simulate", "--workers", "3", "--steps", "3", "--method", "allreduce,divisible")
    sent = on_terminal(command, arguments, 80, tmp_path)
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", sent).replace("\r", "\n")
    lines = [line for line in plain.splitlines() if line.strip()]
    assert max(map(len, lines)) <= 80
    # Not folded: a row is one line, and the header is whole.
    (header,) = [line for line in lines if line.startswith("method ")]
    for column in ("time", "accuracy", "workers", "consensus", "sent", "busy"):
        assert column in header
    assert "Not shown, the terminal is too narrow: exchanges, steps" in " ".join(plain.split())
    # The live screen appears too.
    assert any(re.match(r"divisible .* 100%  [0-9.]+ s", line) for line in lines)
    assert any(re.match(r"train loss +[0-9.]+ +[▁▂▃▄▅▆▇█]+", line) for line in lines)
    assert any(re.match(r" *worker +steps +steps/s +exchanges", line) for line in lines)


def test_ctrl_c_while_torch_is_being_loaded():
    program = """
import sys

class Interrupted:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupted())
from gossamer.__main__ import main
sys.exit(main(["simulate"]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "gossamer: stopped\n")
