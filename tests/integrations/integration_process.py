"""The process of one worker of the integrations: it runs a script of ours as torchrun would."""

import os
import runpy
import sys
from pathlib import Path

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"


def run_script(script, out, rank, environment):
    """Run a script of ours as one worker that prints into a file of its own."""
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        with open(Path(out, f"{name}-{rank}.log"), "w") as log:
            os.dup2(log.fileno(), descriptor)
    os.chdir(out)
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = [str(HERE / script), str(out)]
    try:
        runpy.run_path(str(HERE / script), run_name="__main__")
    finally:
        sys.stdout.flush()
