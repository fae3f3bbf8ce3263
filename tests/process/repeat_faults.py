"""Run the fault suite several times, many tests at once: they sleep most of the time.

The first test of a process waits for torch to be loaded, so several runs go into one. Stops after runs that fail
(unless told to go on), and keeps their output.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
KINDS = ("crowd", "healing", "join", "partition", "poison", "replica", "slow", "split", "stranger")
SUITE = ("faults.py", *(f"{kind}_faults.py" for kind in KINDS))
OTHERS = (
    "test_process_join.py",
    "test_process_networks.py",
    "test_process_strangers.py",
    "test_process_uneven.py::test_uneven_batches_cost_nothing",
    "../cli/test_cli_checkpoints.py::test_a_model_that_does_not_fit_in_the_end_is_an_error",
)
"""Faults that are quick enough for ``make test``: it runs them too."""

CANNOT_BE = re.compile(r"this machine has no |there is no |needs a GPU|could not import")
"""Why a test may be skipped in spite of ``--strict``."""
NO_TESTS = 5
"""How pytest ends if none are left: those that are chosen run once, and have."""

# Not the project's own settings: they are for a pytest with all plugins.
SETTINGS = "[pytest]\nfilterwarnings = error\nxfail_strict = true\n"


def run_tests(folder: Path, chosen: argparse.Namespace, first: int, runs: int) -> bool:
    """Run the chosen tests, each so often; return whether all have passed. No process is left when this returns.

    ``first``: the number of the first of these runs.
    """
    folder.mkdir(parents=True)
    settings, log, ready, figures = (folder / name for name in ("pytest.ini", "log", "ready", "figures"))
    settings.write_text(SETTINGS)
    ready.mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FAULT_READY": str(ready)}
    environment |= {"FAULT_FIRST": str(first), "FAULT_RUNS": str(runs)}
    environment["FAULT_FIGURES"] = str(figures)
    paths = [str(ROOT / "src"), str(ROOT / "benchmarks"), str(HERE), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command = [sys.executable, "-m", "pytest", "-c", str(settings), f"--rootdir={ROOT}", "-p", "no:cacheprovider"]
    # Processes that have no tests left take some from those that have.
    command += ["-p", "fault_plugin", "-n", str(chosen.at_once), "--dist", "worksteal", "-v", "-rs", "--durations=10"]
    command += [] if chosen.keep_going else ["-x"]
    command += ["-k", chosen.tests, *(str(HERE / name) for name in (*SUITE, *OTHERS))]
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out, start_new_session=True)
        try:
            code = process.wait(runs * chosen.within_s)
            passed = code == 0 or (code == NO_TESTS and first > 1)
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
    skips = count_skips(text)
    for why, number in skips.items():
        print(f"{number} tests skipped: {why}")
    missed = sum(number for why, number in skips.items() if not CANNOT_BE.search(why))
    if passed and chosen.strict and missed:
        print(f"{missed} tests were skipped that should run here")
        return False
    if not passed:
        print("\n".join(line for line in text if not line.startswith(("[W", "[E", "frame #")))[-20_000:])
        print(f"all of it: {log}")
    else:
        print(text[-1].strip("= "))
    return passed


def count_skips(log: list[str]) -> Counter[str]:
    """Return how many tests were skipped, by reason, from what pytest's ``-rs`` prints."""
    skips: Counter[str] = Counter()
    for line in log:
        if found := re.fullmatch(r"SKIPPED \[(\d+)\] [^ ]+ (.*)", line):
            skips[found[2]] += int(found[1])
    return skips


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1, help="how often (1)")
    parser.add_argument("--at-once", type=int, default=8, help="tests side by side (8)")
    parser.add_argument("--batch", type=int, default=10, help="runs that share their processes (10)")
    parser.add_argument("--tests", default="", help="only those that pytest -k would choose by this")
    parser.add_argument(
        "--within-s", type=float, default=1200.0, help="of a run, on average: what takes longer has failed (1200)"
    )
    parser.add_argument("--strict", action="store_true", help="skipped tests are failures, unless a device is missing")
    parser.add_argument("--keep-going", action="store_true", help="also after a run that failed")
    parser.add_argument("--output", type=Path, help="where outputs go (a new temporary folder)")
    chosen = parser.parse_args()
    folder = chosen.output or Path(tempfile.mkdtemp(prefix="gossamer-faults-"))
    began, failures = time.monotonic(), 0
    for first in range(0, chosen.runs, chosen.batch):
        runs = min(chosen.batch, chosen.runs - first)
        passed = run_tests(folder / f"from-{first + 1}", chosen, first + 1, runs)
        failures += not passed
        done = f"runs {first + 1} to {first + runs} of {chosen.runs}"
        print(f"{done}: {'passed' if passed else 'failed'}, {time.monotonic() - began:.0f} s so far", flush=True)
        if not passed and not chosen.keep_going:
            break
    print(f"outputs in {folder}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
