"""``python -m gossamer.testing.histories``: run histories of the liveness protocol, or print one of them."""

from __future__ import annotations

import argparse
import sys
import time

from gossamer.testing.histories.history import run_history


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gossamer.testing.histories", description=__doc__)
    parser.add_argument("--seed", type=int, help="print the history of this seed")
    parser.add_argument("--first", type=int, default=0, help="first seed to run")
    parser.add_argument("--count", type=int, default=1000, help="how many histories to run")
    parser.add_argument("--messages", action="store_true", help="print messages too")
    options = parser.parse_args(arguments)
    if options.seed is not None:
        return _print_one(options.seed, options.messages)
    began, failed, num_notices = time.monotonic(), 0, 0
    for seed in range(options.first, options.first + options.count):
        result = run_history(seed)
        num_notices += result.num_notices
        if result.violation is not None:
            failed += 1
            print(f"seed {seed}: {result.violation}")
    seconds = time.monotonic() - began
    rate = 60 * options.count / seconds
    print(f"{options.count} histories, {num_notices} deaths and returns, {failed} violations, {rate:.0f} per minute")
    return 1 if failed else 0


def _print_one(seed: int, messages: bool) -> int:
    def log(line: str) -> None:
        if messages or " → " not in line or " is cut" in line:
            print(line)

    violation = run_history(seed, log=log).violation
    print(f"violated: {violation}" if violation else "all invariants hold")
    return 1 if violation else 0


if __name__ == "__main__":
    sys.exit(main())
