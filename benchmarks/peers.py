"""A worker dies, comes back, or is slow: DDP, torchft, hivemind and our methods in one run. Prints a markdown table.

    python benchmarks/peers.py                                         # all contenders, 3 turns
    python benchmarks/peers.py --only ddp,a2cid2,hivemind --turns 1
    python benchmarks/peers.py --only a2cid2 --cases straggler

Four workers train a model of 5 million parameters; a gradient is a wait of 100 ms. Two cases:

- kill: one worker gets SIGKILL. What counts is the longest step of a survivor. Some seconds later its process is
  started again. What counts is the time from that start until it has contributed: until an average of several workers
  contains a gradient that it computed.
- straggler: one worker is ten times slower. What counts are the steps of all workers together, as a share of those that
  they make alone, with nothing joined, in the same turn.

All contenders take turns; every figure is the median over the turns. Torchft and hivemind run in environments of their
own, which are made under build/. ``benchmarks/README.md`` keeps the results.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from environments import CannotInstall
from peers_cases import CASES, Outcome
from peers_contenders import CONTENDERS, Contender
from peers_table import rows
from tables import table

Turn = dict[str, Outcome]
"""The outcomes of one turn of a contender, by case."""


def chosen(only: str) -> list[Contender]:
    """Return the contenders that the user wants, and the workers that train alone beside them."""
    names = [name for name in only.split(",") if name]
    unknown = set(names) - {contender.name for contender in CONTENDERS}
    if unknown:
        known = ", ".join(contender.name for contender in CONTENDERS)
        raise SystemExit(f"no contender {', '.join(sorted(unknown))}: expected some of {known}")
    wanted = [contender for contender in CONTENDERS if not names or contender.name in names]
    needed = {contender.optimizer for contender in wanted}
    return [one for one in CONTENDERS if one in wanted or (one.kind == "none" and one.optimizer in needed)]


def pythons(contenders: Sequence[Contender]) -> dict[str, Path | str]:
    """Return the Python of each contender, or why there is none."""
    found: dict[str, Path | str] = {}
    for contender in contenders:
        try:
            environment = contender.environment
            found[contender.name] = Path(sys.executable) if environment is None else environment.python()
        except CannotInstall as error:
            found[contender.name] = f"cannot be installed: {error}"
    return found


def measure(contender: Contender, python: Path | str, cases: Sequence[str], moment: float) -> Turn:
    """Measure one turn of a contender and say how it went."""
    turn: Turn = {}
    for case in cases:
        if contender.kind == "none" and case == "kill":
            continue
        began = time.monotonic()
        turn[case] = {"problem": python} if isinstance(python, str) else CASES[case](contender, python, moment)
        took = time.monotonic() - began
        figures = ", ".join(
            f"{name} {value:.2f}" if isinstance(value, float) else f"{name}: {value}"
            for name, value in turn[case].items()
        )
        print(f"{contender.name}, {case}: {figures} ({took:.0f} s)", file=sys.stderr, flush=True)
    return turn


def machine(turns: int) -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "turns": turns,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3, help="turns (default: 3)")
    parser.add_argument("--only", default="", help="names of contenders, separated by commas")
    parser.add_argument("--cases", default=",".join(CASES), help=f"some of {', '.join(CASES)} (default: all)")
    parser.add_argument("--json", type=Path, help="write all figures to this file, while they come")
    options = parser.parse_args()
    cases = options.cases.split(",")
    if unknown := set(cases) - set(CASES):
        parser.error(f"no case {', '.join(sorted(unknown))}: expected some of {', '.join(CASES)}")
    # Whoever ends this process, its workers go too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    contenders = chosen(options.only)
    found = pythons(contenders)
    began = machine(options.turns)
    results: dict[str, list[Turn]] = {contender.name: [] for contender in contenders}
    for number in range(options.turns):
        print(f"turn {number + 1} of {options.turns}", file=sys.stderr, flush=True)
        moment = (number + 0.5) / options.turns
        for contender in contenders:
            results[contender.name].append(measure(contender, found[contender.name], cases, moment))
            if options.json is not None:
                options.json.write_text(json.dumps({"machine": began, "turns": results}, indent=1) + "\n")
    print(", ".join(f"{name} {value}" for name, value in began.items()) + "\n")
    print(table(rows(contenders, results, cases)))


if __name__ == "__main__":
    main()
