"""Run the fault suite several times, many tests at once: they sleep most of the time.

The first test of a process waits for torch to be loaded, so several runs go into one. Stops after runs that fail
(unless told to go on), and keeps their output.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SUITE = ("faults", *(f"{kind}_faults" for kind in ("join", "partition", "poison", "replica", "slow", "stranger")))
# Not the project's own settings: they are for a pytest with all plugins.
SETTINGS = "[pytest]\nfilterwarnings = error\nxfail_strict = true\n"


def run_tests(folder: Path, chosen: argparse.Namespace, runs: int) -> bool:
    """Run the chosen tests, each so often; return whether all have passed. No process is left when this returns."""
    folder.mkdir(parents=True)
    settings, log, ready, figures = (folder / name for name in ("pytest.ini", "log", "ready", "figures"))
    settings.write_text(SETTINGS)
    ready.mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FAULT_RUNS": str(runs), "FAULT_READY": str(ready)}
    environment["FAULT_FIGURES"] = str(figures)
    paths = [str(ROOT / "src"), str(ROOT / "benchmarks"), str(HERE), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command = [sys.executable, "-m", "pytest", "-c", str(settings), f"--rootdir={ROOT}", "-p", "no:cacheprovider"]
    # Processes that have no tests left take some from those that have.
    command += ["-p", "fault_plugin", "-n", str(chosen.at_once), "--dist", "worksteal", "-v", "--durations=10"]
    command += [] if chosen.keep_going else ["-x"]
    command += ["-k", chosen.tests, *(str(HERE / f"{name}.py") for name in SUITE)]
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out, start_new_session=True)
        try:
            passed = process.wait(runs * chosen.within_s) == 0
        except subprocess.TimeoutExpired:
            out.write(f"\nnot through after {runs * chosen.within_s:.0f} s\n".encode())
            passed = False
        finally:
            # Its workers too, should any be left.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if figures.exists():
        print("\n".join(sorted(figures.read_text().splitlines())))
    text = log.read_text(errors="replace").splitlines()
    if not passed:
        print("\n".join(line for line in text if not line.startswith(("[W", "[E", "frame #")))[-20_000:])
        print(f"all of it: {log}")
    else:
        print(text[-1].strip("= "))
    return passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1, help="how often (1)")
    parser.add_argument("--at-once", type=int, default=8, help="tests side by side (8)")
    parser.add_argument("--batch", type=int, default=10, help="runs that share their processes (10)")
    parser.add_argument("--tests", default="", help="only those that pytest -k would choose by this")
    parser.add_argument(
        "--within-s", type=float, default=1200.0, help="of a run, on average: what takes longer has failed (1200)"
    )
    parser.add_argument("--keep-going", action="store_true", help="also after a run that failed")
    parser.add_argument("--output", type=Path, help="where outputs go (a new temporary folder)")
    chosen = parser.parse_args()
    folder = chosen.output or Path(tempfile.mkdtemp(prefix="gossamer-faults-"))
    began, failures = time.monotonic(), 0
    for first in range(0, chosen.runs, chosen.batch):
        runs = min(chosen.batch, chosen.runs - first)
        passed = run_tests(folder / f"from-{first + 1}", chosen, runs)
        failures += not passed
        done = f"runs {first + 1} to {first + runs} of {chosen.runs}"
        print(f"{done}: {'passed' if passed else 'failed'}, {time.monotonic() - began:.0f} s so far", flush=True)
        if not passed and not chosen.keep_going:
            break
    print(f"outputs in {folder}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
