import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"


@pytest.fixture(scope="session")
def torchrun(tmp_path_factory):
    """Run a script of ours with two workers under torchrun; what each reports, and what they printed."""

    def run(script):
        out = tmp_path_factory.mktemp(script)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        # Each worker prints into a file of its own: in one pipe their lines would run into each other.
        logs = ["--redirects", "1", "--log-dir", str(out / "logs")]
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *logs]
        done = subprocess.run(
            [sys.executable, *command, str(HERE / script), str(out)],
            env=environment,
            cwd=out,
            capture_output=True,
            text=True,
            timeout=300,
        )
        printed = "".join(log.read_text() for log in sorted(out.glob("logs/**/stdout.log")))
        assert done.returncode == 0, printed + done.stdout + done.stderr
        reports = [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]
        return out, reports, printed

    return run
