"""Two workers of the real Ray Train on a local Ray cluster; one fails, is replaced alone and comes back."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("ray.train")

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"


@pytest.mark.timeout(400)
def test_a_worker_that_fails_is_replaced_and_comes_back(tmp_path):
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "ray_driver.py"), str(tmp_path)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=390,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "failed").exists()
    models = {path.name: torch.load(path, weights_only=True) for path in tmp_path.glob("*/checkpoint_*/model-*.pt")}
    assert set(models) == {"model-0.pt", "model-1.pt"}
    first, second = models.values()
    assert all(torch.equal(first[name], second[name]) for name in first)
    (events,) = (path.read_text() for path in tmp_path.glob("*/checkpoint_*/events-1.txt"))
    assert "came back: taking over from the others" in events
    assert "accuracy of the averaged model: 0.9" in done.stdout
