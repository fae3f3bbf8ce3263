"""``python -m gossamer.testing.histories``: run histories of the protocol between workers, or print one of them.

It needs neither torch nor numpy. On PyPy (``PYTHONPATH=src pypy3 -m …``) the same histories take less time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator

from gossamer.testing.histories.crowd import run_crowd
from gossamer.testing.histories.history import Result, run_history

CHUNK = 50


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gossamer.testing.histories", description=__doc__)
    parser.add_argument("--seed", type=int, help="print the history of this seed")
    parser.add_argument("--first", type=int, default=0, help="first seed to run")
    parser.add_argument("--count", type=int, default=1000, help="how many histories to run")
    parser.add_argument("--processes", type=int, default=1, help="how many processes to run them in")
    parser.add_argument("--workers", type=int, help="instead: lose one of so many workers, and say how long all take")
    parser.add_argument("--messages", action="store_true", help="print messages too")
    options = parser.parse_args(arguments)
    if options.workers is not None:
        print(run_crowd(options.workers))
        return 0
    if options.seed is not None:
        return _print_one(options.seed, options.messages)
    began, failed = time.monotonic(), 0
    sums: Counter[str] = Counter()
    for result in _results(range(options.first, options.first + options.count), options.processes):
        sums.update(
            deaths_and_returns=result.num_notices,
            steps=result.num_steps,
            merges=result.num_merges,
            repeated=result.num_repeated,
            discarded=result.num_discarded,
        )
        if result.violation is not None:
            failed += 1
            print(f"seed {result.seed}: {result.violation}", flush=True)
    rate = 60 * options.count / (time.monotonic() - began)
    print(
        f"{options.count} histories: {sums['deaths_and_returns']} deaths and returns, {sums['steps']} steps, of which "
        f"{sums['repeated']} were repeated and {sums['discarded']} discarded, {sums['merges']} merges"
    )
    print(f"{failed} violations; {rate:.0f} histories per minute, {rate / options.processes:.0f} of each process")
    return 1 if failed else 0


def _results(seeds: range, processes: int) -> Iterator[Result]:
    if processes == 1:
        yield from map(run_history, seeds)
        return
    with multiprocessing.Pool(processes) as pool:
        yield from pool.imap_unordered(run_history, seeds, CHUNK)


def _print_one(seed: int, messages: bool) -> int:
    violation = run_history(seed, log=print, logs_messages=messages).violation
    print(f"violated: {violation}" if violation else "all invariants hold")
    return 1 if violation else 0


if __name__ == "__main__":
    sys.exit(main())
