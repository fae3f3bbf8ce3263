"""Commands that need no torch do not import it; ``import gossamer`` imports next to nothing."""

import json
import os
import subprocess
import sys

from gossamer.cli import COMMANDS
from gossamer.process.store.rank_info import free_port

HEAVY = ("torch", "scipy", "networkx", "plotly", "sklearn", "matplotlib", "pandas")

PROGRAM = f"""
import contextlib, io, json, sys
from gossamer.cli import main
outcomes = []
for arguments in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            code = main(arguments.split())
        except SystemExit as exit:  # --help and --version
            code = exit.code
    outcomes.append([arguments, code, [name for name in {HEAVY!r} if name in sys.modules]])
print(json.dumps(outcomes))
"""
"""Runs one command after the other; says how each ended, and what was imported by then."""


def run_python(*command):
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=200, check=True)
    assert done.stderr == ""
    return json.loads(done.stdout)


LIGHT = (
    "--help",
    "--version",
    "methods",
    "methods a2cid2",
    "methods divisible --json",
    "reproduce",
    "topology",
    "topology ring --workers 16",
)


def test_a_command_that_needs_no_heavy_library_imports_none():
    assert run_python("-c", PROGRAM, *LIGHT) == [[arguments, 0, []] for arguments in LIGHT]


def test_the_help_of_a_command_does_not_import_torch():
    outcomes = run_python("-c", PROGRAM, *(f"{command} --help" for command in COMMANDS))
    assert [code for _, code, _ in outcomes] == [0] * len(COMMANDS)
    assert [arguments for arguments, _, imported in outcomes if "torch" in imported] == []


def test_a_mistake_in_the_command_line_is_answered_without_torch():
    mistake = "simulate --wrokers 3"
    assert run_python("-c", PROGRAM, mistake) == [[mistake, 2, []]]


def test_importing_gossamer_imports_no_library():
    program = f"import gossamer, json, sys; print(json.dumps([m for m in {(*HEAVY, 'numpy')!r} if m in sys.modules]))"
    assert run_python("-c", program) == []


WORKER = """
import json, sys
import torch
import gossamer

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with gossamer.join(model, optimizer, method="a2cid2", topology="ring"):
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
print(json.dumps(sorted({name.split(".")[0] for name in sys.modules} | {n for n in sys.modules if "gossamer." in n})))
"""


def test_a_worker_imports_neither_the_planner_nor_what_it_needs():
    """A worker that is restarted must be back soon: scipy.stats alone takes a second to import."""
    environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-c", WORKER]
    workers = [
        subprocess.Popen(
            command, env={**environment, "RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    for worker in workers:
        out, errors = worker.communicate(timeout=120)
        assert worker.returncode == 0, errors
        imported = set(json.loads(out))
        assert "torch" in imported
        assert not imported & {*HEAVY} - {"torch"}
        assert not [name for name in imported if name.startswith(("gossamer.plan", "gossamer.virtual", "gossamer.cli"))]


def test_the_histories_of_the_protocol_need_neither_torch_nor_numpy():
    """So they also run on interpreters that have neither, such as PyPy."""
    program = "import json, sys; import gossamer.testing.histories.__main__; print(json.dumps(list(sys.modules)))"
    assert not {"torch", "numpy"} & set(run_python("-c", program))
