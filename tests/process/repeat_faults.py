"""Run the fault suite several times, spread over several pytest processes: its tests sleep most of the time.

Needs nothing beyond pytest. The first test of a process waits for torch to be loaded, so several runs go into one.
Stops after runs that fail (unless told to go on), and keeps their output.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SUITE = HERE / "faults.py"
# Not the project's own settings: they are for a pytest with all plugins.
SETTINGS = "[pytest]\nfilterwarnings = error\nxfail_strict = true\n"


def pytest(settings: Path, log: Path, arguments: list[str], within_s: float, runs: int) -> int:
    """Run pytest with its output in ``log``; no process of it is left when this returns."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FAULT_RUNS": str(runs)}
    paths = [str(ROOT / "src"), str(ROOT / "benchmarks"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command = [sys.executable, "-m", "pytest", "-c", str(settings), f"--rootdir={ROOT}", "-p", "no:cacheprovider"]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, *arguments], cwd=ROOT, env=environment, stdout=out, stderr=out, start_new_session=True
        )
        try:
            return process.wait(within_s)
        except subprocess.TimeoutExpired:
            out.write(f"\nnot through after {within_s:.0f} s\n".encode())
            return 124
        finally:
            # Its workers too, should any be left.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def collect(settings: Path, folder: Path, chosen: str, runs: int) -> list[str]:
    log = folder / "collected"
    if pytest(settings, log, ["--collect-only", "-q", "-k", chosen, str(SUITE)], 120, runs):
        sys.exit(log.read_text())
    return re.findall(r"^\S+::\S+$", log.read_text(), re.MULTILINE)


def run_tests(settings: Path, folder: Path, tests: list[str], chosen: argparse.Namespace, runs: int) -> list[Path]:
    """Run all tests, so many at once; returns the outputs of those processes that failed."""
    shards = [tests[first :: chosen.at_once] for first in range(min(chosen.at_once, len(tests)))]
    ready = folder / "ready"
    ready.mkdir(parents=True)
    os.environ.update(FAULT_READY=str(ready), FAULT_AT_ONCE=str(len(shards)))
    logs = [folder / f"part-{number}.log" for number in range(len(shards))]

    def run(log: Path, shard: list[str]) -> bool:
        stop = [] if chosen.keep_going else ["-x"]
        return pytest(settings, log, [*stop, "-v", "--durations=3", *shard], runs * chosen.within_s, runs) == 0

    with ThreadPoolExecutor(len(shards)) as executor:
        passed = list(executor.map(run, logs, shards))
    return [log for log, good in zip(logs, passed, strict=True) if not good]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1, help="how often (1)")
    parser.add_argument("--at-once", type=int, default=6, help="pytest processes side by side (6)")
    parser.add_argument("--batch", type=int, default=10, help="runs that share their processes (10)")
    parser.add_argument("--tests", default="", help="only those that pytest -k would choose by this")
    parser.add_argument(
        "--within-s", type=float, default=1200.0, help="of a run, on average: what takes longer has failed (1200)"
    )
    parser.add_argument("--keep-going", action="store_true", help="also after a run that failed")
    parser.add_argument("--output", type=Path, help="where outputs go (a new temporary folder)")
    chosen = parser.parse_args()
    folder = chosen.output or Path(tempfile.mkdtemp(prefix="gossamer-faults-"))
    folder.mkdir(parents=True, exist_ok=True)
    settings = folder / "pytest.ini"
    settings.write_text(SETTINGS)
    began, failures = time.monotonic(), 0
    for first in range(0, chosen.runs, chosen.batch):
        runs = min(chosen.batch, chosen.runs - first)
        tests = collect(settings, folder, chosen.tests, runs)
        failed = run_tests(settings, folder / f"from-{first + 1}", tests, chosen, runs)
        for log in failed:
            text = log.read_text(errors="replace").splitlines()
            print("\n".join(line for line in text if not line.startswith(("[W", "[E", "frame #")))[-20_000:])
            print(f"all of it: {log}")
        failures += len(failed)
        done = f"runs {first + 1} to {first + runs} of {chosen.runs}, {len(tests)} tests"
        print(f"{done}: {'failed' if failed else 'passed'}, {time.monotonic() - began:.0f} s so far", flush=True)
        if failed and not chosen.keep_going:
            break
    print(f"outputs in {folder}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
