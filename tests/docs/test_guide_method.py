"""The method of the guide "Write a method" exchanges vectors on real workers too, not only in the virtual cluster."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = """
import time

import torch

import gossamer
import lazygossip

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
swarm = gossamer.join(model, optimizer, method="lazygossip", weight=0.5)
for _ in range(50):
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.01)
swarm.finish()
print("exchanges", swarm.metrics().exchanges, flush=True)
"""


def test_the_method_of_the_guide_exchanges_on_real_workers(tmp_path):
    guide = (ROOT / "docs" / "write-a-method.md").read_text(encoding="utf-8")
    method = re.search(r"```python\n(# lazygossip\.py\n.*?)```", guide, re.DOTALL)[1]
    (tmp_path / "lazygossip.py").write_text(method, encoding="utf-8")
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"]
    finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert finished.returncode == 0, finished.stderr
    counts = [int(count) for count in re.findall(r"exchanges (\d+)", finished.stdout)]
    assert len(counts) == 2
    assert min(counts) > 0
