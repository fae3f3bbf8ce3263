"""Start-up time of commands that need no torch, next to ``python -c "import torch"``. Prints a markdown table.

    python benchmarks/startup.py                # --json for one JSON document, --rounds N for more rounds

All programs run once per round, one after the other, so that a slow phase of the machine slows down all of them. The
first round only warms up the file cache.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from importlib.metadata import version

from tables import table

BASELINE = "import torch"
COMMANDS = (
    "--help",
    "--version",
    "methods",
    "methods a2cid2",
    "topology ring --workers 16",
    "simulate --help",
    "train --help",
    "plan --help",
)


def measure(rounds: int) -> dict[str, list[float]]:
    """Return the wall times of all programs in seconds, one per round."""
    programs = {"python": ["-c", ""], BASELINE: ["-c", "import torch"]}
    programs |= {f"gossamer {command}": ["-m", "gossamer", *command.split()] for command in COMMANDS}
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for number in range(rounds + 1):
        for name, arguments in programs.items():
            began = time.perf_counter()
            subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
            if number:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="measured rounds (default: 9)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    seconds = measure(options.rounds)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    ratios = {name: median / medians[BASELINE] for name, median in medians.items()}
    if options.json:
        programs = [
            {"program": name, "median_s": medians[name], "ratio": ratios[name], "seconds": times}
            for name, times in seconds.items()
        ]
        machine = {"python": platform.python_version(), "torch": version("torch"), "rounds": options.rounds}
        print(json.dumps({**machine, "programs": programs}, indent=1))
        return
    rows = [
        {
            "program": f"`{name}`",
            "median s": f"{medians[name]:.2f}",
            "range": f"{min(times):.2f} to {max(times):.2f}",
            f"ratio to `{BASELINE}`": f"{ratios[name]:.2f}",
        }
        for name, times in seconds.items()
    ]
    print(table(rows))


if __name__ == "__main__":
    main()
