"""The methods of the guide "Write a method" work with real workers too, and what it says about a mistake is true."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from gossamer.testing import CHECKS, MethodCheckError, check_method

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "write-a-method.md").read_text(encoding="utf-8")
FILES = {name: text for text, name in re.findall(r"```python\n(# (\w+\.py)\n.*?)```", GUIDE, re.DOTALL)}

SCRIPT = """
import os
import time

import torch

import gossamer
from lazygossip import LazyGossip

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
swarm = gossamer.join(model, optimizer, method=LazyGossip, weight=0.5)
steps = 0
while steps < 20 or not swarm.metrics().exchanges:
    steps += 1
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.01)
swarm.finish()
# In one piece: the two workers share the pipe.
os.write(1, f"exchanges {swarm.metrics().exchanges}\\n".encode())
"""


def test_the_method_of_the_guide_exchanges_on_real_workers(tmp_path):
    (tmp_path / "lazygossip.py").write_text(FILES["lazygossip.py"], encoding="utf-8")
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"]
    finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert finished.returncode == 0, finished.stderr
    counts = [int(count) for count in re.findall(r"exchanges (\d+)", finished.stdout)]
    assert len(counts) == 2
    assert min(counts) > 0


def test_the_method_with_shared_state_passes_with_real_processes(tmp_path):
    # The page itself leaves them out for this one.
    (tmp_path / "outerstep.py").write_text(FILES["outerstep.py"], encoding="utf-8")
    check_method(str(tmp_path / "outerstep.py"), only=[name for name, check in CHECKS.items() if check.real])


def test_the_mistake_that_the_guide_names_is_found(tmp_path):
    update = "worker.x.add_(sent, alpha=-self.weight).add_(received, alpha=self.weight)"
    assert update in FILES["lazygossip.py"]
    path = tmp_path / "lazygossip.py"
    path.write_text(FILES["lazygossip.py"].replace(update, "worker.x.copy_(received)"), encoding="utf-8")
    with pytest.raises(MethodCheckError) as caught:
        check_method(str(path), real=False)
    (shown,) = re.findall(r"```text\n(.*?)\n```", GUIDE, re.DOTALL)
    assert shown in str(caught.value)
